"""The GPU benchmark without a GPU: its workloads, figures, orchestration and report."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu" / "gpu.py"
PAGE = "before\n<!-- gpu:begin -->\nold\n<!-- gpu:end -->\nafter\n"


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """The benchmark's modules, which find each other by the folder they lie in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.syspath_prepend(ROOT / "benchmarks" / "gpu")
        import gpu
        import gpu_numerics
        import gpu_report
        import gpu_stages
        import gpu_workloads

        class Modules:
            main, report, stages, workloads = gpu, gpu_report, gpu_stages, gpu_workloads
            numerics = gpu_numerics

        yield Modules


def records(stage: str, attempt: float, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"stage": stage, "attempt": attempt, **part} for part in parts]


OK = {"kind": "end", "ok": True, "error": "", "seconds": 1.0}


# -- workloads ------------------------------------------------------------------------------------


def test_workloads_have_the_sizes_that_their_titles_say(modules: Any) -> None:
    works = modules.workloads.WORKS
    w1, w2, w3, w4 = (works[name].requests() for name in ("w1", "w2", "w3", "w4"))
    assert {(len(r.prompt), r.output_tokens) for r in w1} == {(1024, 256)}
    assert {(len(r.prompt), r.output_tokens) for r in w2} == {(512 + 5 * 512 + 32, 128)}
    assert [(len(r.prompt), r.output_tokens) for r in w3] == [(3000, 300)]
    assert [len(requests) for requests in (w1, w2, w4)] == [256, 256, 256]
    assert all(100 <= len(r.prompt) <= 1024 and 100 <= r.output_tokens <= 1024 for r in w4)
    assert sum(r.output_tokens for r in w4) == 143_790
    assert all(1000 <= token < 150_000 for r in w1 + w2 + w3 + w4 for token in r.prompt)
    assert works["w1"].requests() == w1
    assert not {tuple(r.prompt) for r in works["w1"].warm_up()} & {tuple(r.prompt) for r in w1}


def test_rag_shares_a_system_prompt_and_documents_in_a_fixed_order(modules: Any) -> None:
    requests = modules.workloads.rag()
    assert len({r.segments[0] for r in requests}) == 1
    assert len({r.segments[-1] for r in requests}) == len(requests)
    documents = {segment for r in requests for segment in r.segments[1:-1]}
    assert len(documents) <= 100
    assert all(len(set(r.segments[1:-1])) == 5 for r in requests)
    # Sorted by number: two documents of two requests never stand in opposite orders.
    orders = {pair for r in requests for pair in itertools.combinations(r.segments[1:-1], 2)}
    assert not orders & {(b, a) for a, b in orders}
    assert modules.workloads.shared_tokens(requests) == pytest.approx(0.5696, abs=1e-4)


def test_a_hit_is_of_whole_blocks_and_leaves_a_token(modules: Any) -> None:
    request = modules.workloads.BenchRequest
    share = modules.workloads.shared_tokens
    same = [request((tuple(range(32)),), 1)] * 2
    assert share(same, block_size=16) == 16 / 64
    other = request((tuple(range(20)) + (99,) * 12,), 1)
    assert share([same[0], other], block_size=16) == 16 / 64
    assert share([same[0], request(((7, *range(31)),), 1)], block_size=16) == 0


@pytest.mark.parametrize(
    ("work", "floors"),
    [
        ("w1", {"output_tok_s": 9292}),
        ("w1-small", {"output_tok_s": 113_164}),
        ("w2", {"output_tok_s": 3092}),
        ("w2-off", {"output_tok_s": 1773}),
        ("w3", {"ttft_p50_ms": 52.2, "tpot_p50_ms": 3.251}),
        ("w3-small", {"ttft_p50_ms": 3.23, "tpot_p50_ms": 0.233}),
        ("w4", {"output_tok_s": 37_629}),
    ],
)
def test_floors_at_the_rates_of_an_h200(modules: Any, work: str, floors: dict[str, float]) -> None:
    w = modules.workloads
    got = w.floor(w.WORKS[work], w.Ceilings())
    assert {name: got[name] for name in floors} == pytest.approx(floors, rel=1e-3)


# -- figures --------------------------------------------------------------------------------------


def test_summary_of_streams_that_are_known(modules: Any) -> None:
    seen = modules.workloads.Seen
    # Deltas of 1, 2 and 1 tokens, and one of a single token at once.
    figures = modules.workloads.summarize(
        [seen(10.0, [10.1, 10.3, 10.4], [1, 2, 1]), seen(10.0, [10.3], [1])], wall=2.0
    )
    assert figures["output_tok_s"] == 2.5
    assert figures["requests_s"] == 1.0
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["ttft_p90_ms"] == pytest.approx(280)
    assert figures["tpot_p50_ms"] == pytest.approx(100)
    assert figures["itl_p50_ms"] == pytest.approx(150)
    assert figures["itl_max_ms"] == pytest.approx(200)
    assert figures["deltas"] == 4


def test_busy_time_is_the_union_and_a_stall_is_a_long_gap(modules: Any) -> None:
    busy = modules.stages.busy_intervals
    assert busy([], []) == (0.0, 0.0)
    # Out of order, overlapping, one inside another, a gap of 5 µs and one of 30 µs.
    starts, ends = [15_000, 0, 2_000, 1_000, 65_000], [35_000, 10_000, 3_000, 9_000, 70_000]
    assert busy(starts, ends) == (35_000.0, pytest.approx(30_000 / 70_000))


def test_answers_are_compared_up_to_the_first_difference(modules: Any) -> None:
    answer, compare = modules.numerics.Answer, modules.numerics.compare
    ours = [
        answer((1, 2, 3), (-0.5, -0.25, -1.0)),
        answer((1, 2, 3), (-0.5, -1.0, -2.0)),
        answer((4, 5, 6), (-1.0, -1.0, -1.0)),
    ]
    theirs = [
        answer((1, 2, 3), (-0.5, -0.75, -1.0)),
        answer((1, 9, 3), (-0.75, -8.0, -9.0)),
        answer((5, 5, 6), (-3.0, -1.0, -1.0)),
    ]
    assert compare(ours, theirs) == {
        "answers": 3,
        "answers_differ": 2,
        "tokens": 3 + 2 + 1,
        "flip_share": 2 / 6,
        "logprob_apart_p50": 0.125,
        "logprob_apart_max": 0.5,
    }
    nothing_shared = compare(ours[2:], theirs[2:])
    assert nothing_shared["flip_share"] == 1.0
    assert nothing_shared["logprob_apart_max"] is None


# -- orchestration --------------------------------------------------------------------------------


def test_stages_and_groups_in_the_order_of_their_engines(modules: Any) -> None:
    stages = modules.main.stages_of
    assert stages("memory,w2,check,w1,kernels") == [
        "kernels-attention",
        "kernels-sampling",
        "kernels-linear",
        "check",
        "w1",
        "w2",
        "memory",
    ]
    assert set(stages(modules.main.DEFAULT)) == {*modules.stages.STAGES, "check"}
    with pytest.raises(ValueError, match="'w9' is no stage"):
        stages("w1,w9")


def test_knobs_of_a_stage(modules: Any) -> None:
    given = ["max_num_seqs=64", "w2:max_num_seqs=32", "host:dtype=float16", "w1:seed=null"]
    knobs = modules.main.knobs_of
    assert knobs(given, "w2") == {"max_num_seqs": 32}
    assert knobs(given, "w2-off") == {"max_num_seqs": 64}
    assert knobs(given, "host-7b") == {"max_num_seqs": 64, "dtype": "float16"}
    assert knobs(given, "w1") == {"max_num_seqs": 64, "seed": None}


def test_what_pytest_said(modules: Any) -> None:
    lines = [
        "FAILED tests/test_x.py::test_y - assert 1 == 2",
        "=== 1 failed, 20 passed, 3 skipped, 2 warnings in 61.20s (0:01:01) ===",
    ]
    assert modules.main.parse_pytest(lines) == {
        "counts": {"failed": 1, "passed": 20, "skipped": 3, "warnings": 2},
        "failed": [lines[0]],
    }
    assert modules.main.parse_pytest(["Killed"]) == {"counts": {}, "failed": []}


def test_failed_tests_are_named_when_pytest_is_cut_off(modules: Any) -> None:
    alone = [
        "tests/test_x.py::test_a PASSED                                    [ 25%]",
        "tests/test_x.py::test_y[a b] FAILED                               [ 50%]",
    ]
    several = [
        "[gw0] [ 25%] PASSED tests/test_x.py::test_a ",
        "[gw11] [  5%] ERROR tests/test_x.py::test_z ",
        "[gw0] [ 50%] FAILED tests/test_x.py::test_y[a b] ",
        "ERROR    ragserve:core.py:12 a line of the log",
    ]
    parse = modules.main.parse_pytest
    assert parse(alone)["failed"] == ["FAILED tests/test_x.py::test_y[a b]"]
    assert parse(several)["failed"] == [
        "ERROR tests/test_x.py::test_z",
        "FAILED tests/test_x.py::test_y[a b]",
    ]
    # The summary says why, once.
    summary = "FAILED tests/test_x.py::test_y[a b] - assert 1 == 2"
    assert parse([*alone, summary])["failed"] == [summary]


def test_what_the_other_engine_said(modules: Any) -> None:
    line = {
        "model": "qwen2.5-7b",
        "work": "w2on",
        "out_tok_s": 2426,
        "req_s": 19,
        "wall_s": 13.5,
        "itl_ms": {"p50": 6, "p99": 157},
    }
    assert modules.main.peer_figures(line) == {
        "work": "w2",
        "output_tok_s": 2426,
        "requests_s": 19,
        "wall_s": 13.5,
        "itl_p50_ms": 6,
        "itl_p99_ms": 157,
    }


# -- the report -----------------------------------------------------------------------------------


def test_report_from_saved_records(modules: Any, tmp_path: Path) -> None:
    def run(rate: float) -> dict[str, Any]:
        figures = modules.workloads.summarize([modules.workloads.Seen(0.0, [1.0], [1])], 1.0)
        return {"kind": "run", **figures, "output_tok_s": rate}

    failed = {"kind": "end", "ok": False, "error": "RuntimeError: boom", "seconds": 1.0}
    peer = {"kind": "peer", "work": "w1", "output_tok_s": 7000.0}
    machine = {
        "stage": "",
        "attempt": 0.0,
        "kind": "machine",
        "date": "1 May 2026",
        "device": "A GPU",
        "cores": 16,
        "versions": {"torch": "2.11.0"},
        "command": "python -P benchmarks/gpu/gpu.py",
    }
    lines = [
        machine,
        *records("w1", 1.0, run(1.0), OK),
        *records("w1", 2.0, run(8000.0), run(8400.0), run(8800.0), OK),
        *records("w4", 1.0, run(20_000.0), OK),
        *records("w4", 2.0, failed),
        *records("peer-v7off", 3.0, peer, OK),
        *records("kernels-linear", 1.0, {"kind": "row", "row": {"kind": "qkv", "us": 10.25}}, OK),
        *records("memory", 1.0, {"kind": "memory", "taken_mib": 900.0, "kept_mib": 2.0}, OK),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    command = ["--from", str(tmp_path), "--write", str(page)]
    subprocess.run(
        [sys.executable, "-P", str(GPU), *command],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    text = page.read_text()
    assert text.startswith("before\n<!-- gpu:begin -->\nMeasured on 1 May 2026: A GPU, 16 CPU")
    assert text.endswith("\n<!-- gpu:end -->\nafter\n")
    assert "old" not in text
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    (w1,) = (row[2:-1] for row in rows if len(row) > 9 and row[1].startswith("W1: "))
    assert w1 == ["output tok/s", "8,400", "7,000", "1.20", "7,045", "9,292", "≥ 7,400", "yes"]
    (w4,) = (row[2:-1] for row in rows if len(row) > 9 and row[1].startswith("W4: "))
    assert w4[1] == "20,000"  # the last attempt that gave figures
    assert w4[-1] == "no"
    assert "- w4: RuntimeError: boom" in text
    assert "| qkv | 10.2 |" in text
    assert "still taken after closing 2.0 MiB" in text


def test_a_page_without_markers_is_left_alone(modules: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="gpu:begin"):
        modules.report.write_section(page, "text")
    assert page.read_text() == "nothing"


def test_the_page_has_the_markers() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text.count("<!-- gpu:begin -->") == text.count("<!-- gpu:end -->") == 1


def test_a_run_on_the_cpu_from_stages_to_page(modules: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    command = (
        "--device cpu --dims tiny --repeat 1 --stages w2,w3,w4,host-7b,consumers-7b,numerics "
        "--knob w4:kv_cache_bytes=1"
    )
    folders = ["--out", str(tmp_path / "out"), "--write", str(page)]
    done = subprocess.run(
        [sys.executable, "-P", str(GPU), *command.split(), *folders],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    results = modules.report.Results.of(modules.report.read_records([tmp_path / "out"]))
    assert list(results.failures) == ["w4"]
    assert results.failures["w4"].startswith("OutOfMemoryError")
    assert results.ours("w3")["output_tokens"] == 12
    assert results.ours("w2")["cached_tokens"] > 0
    assert [r["sequences"] for r in results.rows("host-7b", "steady")] == [1, 4]
    modes = [r["mode"] for r in results.rows("consumers-7b", "consumers")]
    assert sorted(modes) == ["drain", "drain", "sse", "sse"]
    numerics = {r["pair"]: r for r in results.rows("numerics", "numerics")}
    assert len(numerics) == 5
    assert all(r["answers"] == 4 and r["tokens"] > 0 for r in numerics.values())
    assert numerics["float32, alone / at once"]["answers_differ"] == 0
    warm = numerics["bfloat16, at once / at once from a warm cache"]
    assert 0 < warm["cached_tokens"] < warm["prompt_tokens"]
    for part in (
        "W2: RAG",
        "steady decoding",
        "64 consumers",
        "What batch and cache change in bfloat16",
        "- w4: OutOfMemoryError",
    ):
        assert part in page.read_text()
        assert part in done.stdout[-6000:]
