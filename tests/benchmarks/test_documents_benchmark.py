"""The documents benchmark in small: its counts add up, and the policies save what they should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """The benchmark's modules, which find each other by the folder they lie in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.syspath_prepend(ROOT / "benchmarks" / "documents")
        import documents_scripted
        import documents_workload

        yield documents_scripted, documents_workload


def test_the_documents_of_questions_are_drawn_by_popularity_and_not_ordered_by_it(
    modules: Any,
) -> None:
    _, workload = modules
    drawn = workload.draw_documents(2000, 50, 1.0, seed=3)
    assert drawn == workload.draw_documents(2000, 50, 1.0, seed=3)
    assert all(len(set(chosen)) == 4 for chosen in drawn)
    times = [sum(number in chosen for chosen in drawn) for number in range(50)]
    popular = times.index(max(times))
    assert max(times) > 8 * min(times)
    places = [chosen.index(popular) for chosen in drawn if popular in chosen]
    shares = [places.count(place) / len(places) for place in range(4)]
    assert max(shares) < 1.2 * min(shares)


def test_documents_are_cut_between_words_and_what_is_too_many_is_refused(modules: Any) -> None:
    _, workload = modules

    def encode(text: str) -> list[int]:
        return [0] * len(text.split())

    documents = workload.cut_documents(20, encode)
    assert len(set(documents)) == 20
    assert {len(encode(text)) for text in documents} == {249}
    with pytest.raises(ValueError, match="ask for fewer"):
        workload.cut_documents(100_000, encode)


def test_policies_find_twice_as_much_as_plain_caching(modules: Any) -> None:
    scripted, _ = modules
    case = scripted.Case(1.0, 0.25, 8, documents=100, questions=400, warm=100)
    off, plain, ours = (
        scripted.answer(case, policy) for policy in (scripted.OFF, scripted.PLAIN, scripted.OURS)
    )
    assert off.hit_tokens == 0
    assert off.computed_tokens == off.prompt_tokens
    for outcome in (plain, ours):
        assert outcome.preemptions == 0
        assert outcome.hit_tokens + outcome.computed_tokens == pytest.approx(outcome.prompt_tokens)
    assert ours.hit_tokens >= 2 * plain.hit_tokens
