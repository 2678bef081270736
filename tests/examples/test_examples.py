"""The examples do what they say: each is run, and what it shows is looked at."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import trio
from servers import ServerThread

from ragserve import demo
from ragserve.engine import Engine, ModelLoadError, SamplingParams
from ragserve.testing import ScriptedModel

pytestmark = pytest.mark.timeout(600)  # processes that import everything anew

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    """An example as a module; what stands under `__main__` is not run."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where annotations are looked up when they are needed, as FastAPI does.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def command(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-P", str(EXAMPLES / f"{name}.py"), *map(str, arguments)]


def run(name: str, *arguments: object) -> str:
    """What an example prints; it ends well, and has nothing to complain about."""
    result = subprocess.run(
        command(name, *arguments), capture_output=True, encoding="utf-8", timeout=500, env=offline()
    )
    assert result.stderr == ""
    assert result.returncode == 0
    return result.stdout


def offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("smollm2")


@pytest.fixture(scope="module")
def embedder() -> Path:
    try:
        return demo.embedder_model()
    except ModelLoadError as error:
        pytest.skip(str(error))


def greedy(model: Path, prompts: list[Any], max_tokens: int) -> list[str]:
    """What the model says."""

    async def ask() -> list[str]:
        async with Engine.open(model, max_model_len=2048) as engine:
            params = SamplingParams.greedy(max_tokens=max_tokens)
            return [(await engine.generate(prompt, params)).text for prompt in prompts]

    return anyio.run(ask)


class Hashes:
    """Embeds without a model: texts that share words are close."""

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        vectors = np.zeros((len(texts), 256), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                vector[zlib.crc32(word.encode()) % len(vector)] += 1
        return vectors


def test_all_examples_are_listed() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


# ---- programs


def test_script(model: Path, embedder: Path) -> None:
    out = run("script", "--model", model, "--embedder", embedder)
    script = load("script")
    best = ("hours", "returns", "delivery")
    for question, document in zip(script.QUESTIONS, best, strict=True):
        answer = out.partition(f"\n{question}\n")[2].partition("RagTimings(embedding=")[0]
        assert f"] {document}, score 0." in answer
        assert "\n  [2] " in answer
        assert re.search(r"\n  Usage\(prompt_tokens=\d+, completion_tokens=\d+, ", answer)
    assert "ready [running 0, waiting 0 | blocks 0/" in out


def test_notebook(model: Path) -> None:
    out = run("notebook", "--model", model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = greedy(model, [question], 48)
    assert out.count(f"{answer}\nUsage(prompt_tokens=") == 2
    cached = [int(count) for count in re.findall(r"cached_tokens=(\d+)", out)]
    assert cached[0] == 0 < cached[1]
    assert "Health(status='closed', error=None)" in out
    prompts = [f"The capital of {country} is" for country in ("France", "Italy", "Japan")]
    for prompt, text in zip(prompts, greedy(model, prompts, 8), strict=True):
        assert f"{prompt}{text!r}\n" in out


def test_trio_program(model: Path) -> None:
    out = run("trio_program", "--model", model)
    assert len(re.findall(r"^  \((stop|length)\)$", out, re.MULTILINE)) == 3
    assert all(f"{question}\n" in out for question in load("trio_program").QUESTIONS)
    assert "closed [running 0, waiting 0 | blocks 0/" in out


def test_answers_of_the_trio_program_have_a_time_limit(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trio.run(load("trio_program").main, str(model), 0.0)
    out = capsys.readouterr().out
    assert out.count("(out of time)") == 3
    assert "closed [running 0, waiting 0 | blocks 0/" in out


# ---- web applications

ANSWER = "From 9 to 18 o'clock [1]."


@pytest.fixture(scope="module")
def fastapi_url() -> Iterator[str]:
    """The FastAPI application, with a model that always says the same."""
    app = load("fastapi_app").create_app(ScriptedModel(ANSWER), Hashes())
    with ServerThread(app) as server:
        yield server.url


def events_of(body: str) -> list[tuple[str, dict[str, Any]]]:
    """Type and data of server-sent events, without comments."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    fields = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
    return [(field["event"], json.loads(field["data"])) for field in fields]


def text_of(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(data["text"] for kind, data in events if kind == "delta")


def curl(name: str, url: str) -> list[str]:
    """What the commands give that stand in an example's first lines."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    lines = [line for line in (load(name).__doc__ or "").splitlines() if line.startswith("curl")]
    return [
        subprocess.run(
            ["curl", "--silent", *shlex.split(line.replace("localhost:8000", url))[1:]],
            stdout=subprocess.PIPE,
            encoding="utf-8",
            check=True,
            timeout=500,
            env={**os.environ, "NO_PROXY": "*"},
        ).stdout
        for line in lines
    ]


def test_fastapi_app(fastapi_url: str) -> None:
    asked, answered, models = curl("fastapi_app", fastapi_url)
    events = events_of(asked)
    assert events[0][0] == "retrieval"
    assert events[0][1]["sources"][0]["document_id"] == "hours"
    assert {kind for kind, _ in events[1:-1]} == {"delta"}
    assert text_of(events) == ANSWER
    kind, done = events[-1]
    assert kind == "done"
    assert done["finish_reason"] == "stop"
    assert done["usage"]["completion_tokens"] == len(ANSWER) + 1  # the scripted model's are bytes

    answer = json.loads(answered)
    assert answer["text"] == ANSWER
    assert answer["sources"][0] == "hours"
    assert answer["usage"]["prompt_tokens"] == done["usage"]["prompt_tokens"]

    assert json.loads(models)["data"][0]["object"] == "model"


def test_errors_of_the_fastapi_app_have_a_status(fastapi_url: str) -> None:
    with httpx.Client(base_url=fastapi_url, trust_env=False, timeout=300) as client:
        for path in ("/ask", "/answer"):
            response = client.post(path, json={"question": "why " * 2000})
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "PromptTooLongError"
            assert client.post(path, json={"answer": "?"}).status_code == 422


def test_langchain_client(fastapi_url: str) -> None:
    out = run("langchain_client", "--url", f"{fastapi_url}/llm/v1")
    assert out.count(ANSWER) == 2  # as a whole, and streamed
    assert "'output_tokens': " in out


def test_starlette_sse_and_how_it_ends(model: Path) -> None:
    server = subprocess.Popen(
        command("starlette_sse", "--model", model, "--port", 0),
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=offline(),
    )
    assert server.stderr is not None
    try:
        log = ""
        while (started := re.search(r"running on (http://127\.0\.0\.1:\d+)", log)) is None:
            line = server.stderr.readline()
            assert line, log
            log += line
        url = started[1]
        (body,) = curl("starlette_sse", url)
        events = events_of(body)
        (expected,) = greedy(model, [[{"role": "user", "content": "Why is the sky blue?"}]], 64)
        assert text_of(events) == expected
        assert events[-1][0] == "done"

        # The server is told to stop while an answer is under way: it goes on to its end.
        with (
            httpx.Client(base_url=url, trust_env=False, timeout=300) as client,
            client.stream("GET", "/generate", params={"q": "And?"}) as response,
        ):
            pieces = response.iter_text()
            body = next(pieces)
            server.terminate()
            body += "".join(pieces)
        assert events_of(body)[-1][0] == "done"
        log += server.communicate(timeout=300)[1]
    finally:
        server.kill()
        server.wait()
    assert "Application shutdown complete" in log
    assert {line.split(":")[0] for line in log.splitlines()} == {"INFO"}
    # uvicorn has ended in order, and then gives the signal to itself, as is good manners.
    assert server.returncode in (0, -signal.SIGTERM)
