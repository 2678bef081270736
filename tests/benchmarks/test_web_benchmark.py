"""The web benchmarks in small: they run to their end, and notice what they are there to notice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

ROOT = Path(__file__).parents[2]
PAGE = "before\n<!-- {0}:begin -->\nold\n<!-- {0}:end -->\nafter\n"


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """The benchmarks' modules, which find each other by the folder they lie in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.syspath_prepend(ROOT / "benchmarks" / "web")
        import soak
        import soak_app
        import soak_clients
        import web
        import web_client

        class Modules:
            main, app, clients, tax, client = soak, soak_app, soak_clients, web, web_client

        yield Modules


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "web" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_tax_is_measured_with_clients_in_another_process(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(PAGE.format("web"))
    options = "--models device --step-ms 5 --intervals 0.02 --streams 4 --tokens 16 --repeat 1"
    done = run(
        "web.py",
        *options.split(),
        *("--seconds", 0.4, "--warm-up", 0.1, "--json", figures, "--write", page),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(figures.read_text())["rows"]
    assert row["case"]["interval"] == 0.02
    assert row["kept"] > 0
    assert row["served"]["tokens_per_second"] > 0
    assert row["served"]["events_per_second"] > 0
    assert row["served"]["client_cpu"] > 0
    assert row["alone"]["lag_max_ms"] >= row["alone"]["lag_p50_ms"]
    text = page.read_text()
    assert text.startswith("before\n<!-- web:begin -->\nMeasured on ")
    assert text.endswith("|\n<!-- web:end -->\nafter\n")
    assert "| device | 5 | 0.02 |" in text
    assert "| device | 5 | 0.02 |" in done.stdout


def test_a_soak_of_seconds_finds_no_fault(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(PAGE.format("soak"))
    done = run(
        "soak.py",
        *("--minutes", 0.02, "--workers", 21, "--every", 0.2, "--max-growth-mib", 100),
        *("--json", figures, "--write", page),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(figures.read_text())
    assert result["faults"] == []
    assert len(result["counts"]) == 21  # each behaviour, once at least
    assert not any(counts.get("lost") for counts in result["counts"].values())
    assert result["state"]["blocks_used"] == 0
    assert result["closed"]
    assert "Faults: none." in page.read_text()


def test_the_soak_names_every_fault(modules: Any) -> None:
    soak = modules.main

    def sample(rss: float, files: int, threads: int) -> Any:
        return soak.Sample(0.0, rss, files, threads)

    result = soak.Result(
        seconds=1.0,
        before=sample(50, 7, 5),
        samples=[sample(100, 20, 8)] * 4 + [sample(100, 20, 8), sample(150, 20, 8)],
        after=sample(150, 30, 50),
        state={"blocks_used": 3, "broken": "2 blocks are nobody's"},
        closed=False,
        log="Traceback (most recent call last):",
    )
    result.count("chat", "lost")
    faults = "; ".join(result.faults(max_growth_mib=20))
    for words in ("1 requests were lost", "nothing was answered", "grew by 50.0", "30 files"):
        assert words in faults
    for words in ("50 threads", "pool is broken", "3 blocks", "SIGTERM", "traceback"):
        assert words in faults


def test_an_answer_that_is_wrong_or_not_whole_is_lost(modules: Any) -> None:
    clients = modules.clients
    task = clients.Task("[[2:9]]", 4, "fox ", "length", False)
    good = (
        b'event: delta\ndata: {"text":"fox "}\n\nevent: done\ndata: {"finish_reason":"length"}\n\n'
    )
    task.check_sse(b": keep-alive\n\n" + good)
    for bad in (good[:-1], good.replace(b"fox", b"dog"), good[: good.index(b"event: done")]):
        with pytest.raises(clients.Lost):
            task.check_sse(bad)
    chunk = b'data: {"choices":[{"index":0,"text":"fox ","finish_reason":"length"}]}\n\n'
    task.check_chunks(chunk + b"data: [DONE]\n\n", chat=False)
    with pytest.raises(clients.Lost):
        task.check_chunks(chunk, chat=False)
    whole = {
        "choices": [{"message": {"content": "fox "}, "finish_reason": "length"}],
        "usage": {"completion_tokens": 3},
    }
    with pytest.raises(clients.Lost):
        task.check_whole(json.dumps(whole).encode(), chat=True)


def test_clients_expect_what_the_model_is_told_to_say(modules: Any) -> None:
    from ragserve import Engine, SamplingParams
    from ragserve.testing import ScriptedModel

    async def main() -> None:
        chance = random.Random(7)
        async with Engine.open(ScriptedModel(modules.app.reply)) as engine:
            for number in range(8):
                task = modules.clients.Task.make(chance, most=40)
                prompt: Any = task.prompt
                if number % 2:
                    prompt = json.loads(task.chat())["messages"]
                params = SamplingParams(max_tokens=task.max_tokens)
                completion = await engine.generate(prompt, params)
                task.check(completion.text, completion.finish_reason)

    anyio.run(main)


def test_the_lean_client_takes_responses_apart(modules: Any) -> None:
    check = modules.client.check
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    delta = b'event: delta\ndata: {"text":"aa"}\n\n'
    done = b'event: done\ndata: {"finish_reason":"length"}\n\n'

    def chunks(*parts: bytes) -> bytes:
        return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))

    # A response after another, the second cut off; events need not begin where chunks do.
    data = head + chunks(delta[:9], delta[9:] + delta, done) + head + chunks(delta, done)
    assert check(data) == {"deltas": 3, "answers": 2, "characters": ["a"]}
    assert check(data[:-20]) == {"deltas": 3, "answers": 1, "characters": ["a"]}
    for bad in (head + chunks(delta), head + chunks(b"event: error\ndata: {}\n\n", done)):
        with pytest.raises(ValueError, match="event"):
            check(bad)
    with pytest.raises(ValueError, match="not a stream"):
        check(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
