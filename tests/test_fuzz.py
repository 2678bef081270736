"""The harness in fuzz/: what was kept does no harm, and some hundred new inputs do none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing.minimise import minimise
from fuzzing.mutation import mutate_bytes, mutate_http, mutate_json_text
from fuzzing.target import Target, Violation, signature
from fuzzing.targets import SHARES, corpus_of, make_target
from fuzzing.worker import Judge, current_input

INPUTS = {"http-h11": 300, "http-httptools": 300, "disk-tier": 300, "tokenizer-config": 40}
"""Of the other targets 100."""


@pytest.fixture(params=SHARES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    target = make_target(request.param, tmp_path)
    yield target
    target.close()


@pytest.mark.filterwarnings("ignore")
def test_no_input_does_harm(target: Target) -> None:
    judge, rng = Judge(target), random.Random(1)
    seeds = [*target.seeds(), *corpus_of(target.name)]
    judge.fault(seeds[0])  # what the first one imports takes memory that is not its own
    judge.outcomes.clear()
    mutated = [target.mutate(rng, rng.choice(seeds)) for _ in range(INPUTS.get(target.name, 100))]
    for data in (*seeds, *mutated):
        fault = judge.fault(data)
        assert fault is None, f"{data[:2000]!r}\n{fault[1]}"
    assert len(judge.outcomes) > 1, "all inputs came to the same"


class Fragile:
    """Breaks at a word."""

    name = "fragile"
    modules = ()

    def run(self, data: bytes) -> str:
        if b"bad" in data:
            raise Violation("it is bad")
        return "fine"


def test_a_fault_is_named_and_its_input_made_small() -> None:
    judge = Judge(Fragile())  # type: ignore[arg-type]
    data = b"x" * 300 + b"a bad word" + b"y" * 100
    fault = judge.fault(data)
    assert fault is not None
    assert fault[0] == "it is bad"
    assert judge.fault(b"good") is None
    assert minimise(data, lambda other: judge.fault(other) is not None) == b"bad"


def test_faults_of_one_line_are_one() -> None:
    names = set()
    for value in ("x", [], None):
        try:
            raise_type_error(value)
        except TypeError as error:
            names.add(signature(error))
    assert len(names) == 1
    assert names.pop().startswith("TypeError at tests/test_fuzz.py:")


def raise_type_error(value: Any) -> int:
    return int(value + {})  # type: ignore[operator]


def test_mutations_follow_their_seed() -> None:
    body = json.dumps({"a": [1, "x", {"b": None}]}).encode()
    request = b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + body
    for mutate in (
        lambda rng: mutate_bytes(rng, body),
        lambda rng: mutate_json_text(rng, body, ["c"]),
        lambda rng: mutate_http(rng, request, ["c"]),
    ):
        first = [mutate(random.Random(seed)) for seed in range(50)]
        assert first == [mutate(random.Random(seed)) for seed in range(50)]
        assert len(set(first)) > 25


def test_no_input_is_under_way_where_none_is(tmp_path: Path) -> None:
    assert current_input(tmp_path) == (0.0, b"")
