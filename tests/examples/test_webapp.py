"""The example web app as a person meets it: its real page in a real browser, a scripted model."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from chromium import PATIENCE, Browser, Page, find_chromium
from opentelemetry.sdk.trace import TracerProvider
from servers import ServerThread

from ragserve import Chunk, Engine, FaissIndex, PromptTemplate, RagPipeline, SamplingParams
from ragserve.testing import EOS, ScriptedModel

WEBAPP = Path(__file__).parents[2] / "examples" / "webapp" / "app.py"
STAGES = ["embedding", "retrieval", "context", "queue", "prefill", "decode"]
OPENING = "Well"
INJECTION = '<img src="/nothing" onerror="document.title=\'owned\'"><script>boom()</script>'


class LetterEmbedder:
    """Counts letters."""

    model_name = "letters"
    dimension: int | None = 26

    async def embed(self, texts: Sequence[str], *, kind: str = "document") -> Any:
        vectors = np.array(
            [[1e-3 + text.lower().count(chr(97 + i)) for i in range(26)] for text in texts],
            np.float32,
        )
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class Talk:
    """What the model says: an opening, dots for as long as it is held, and then the rest.

    :param rest: the question -> the end of its answer.
    """

    def __init__(self, rest: Callable[[str], str], *, held: bool = True) -> None:
        self._rest = rest
        self.go_on = threading.Event()
        if not held:
            self.go_on.set()

    def wait(self, seconds: float) -> None:
        """Does nothing when it is not held."""
        self.go_on.wait(seconds)

    def __call__(self, tokens: list[int]) -> int:
        text = bytes(token for token in tokens if token < EOS)
        prompt, _, said = text.rpartition(b"assistant\n")
        if len(said) < len(OPENING):
            return ord(OPENING[len(said)])
        said = said[len(OPENING) :]
        after = said.lstrip(b".")
        if not after and not self.go_on.is_set():
            return ord(".")
        rest = self._rest(prompt.rpartition(b"user\n")[2].decode().strip()).encode()
        return rest[len(after)] if len(after) < len(rest) else EOS


@dataclass
class Served:
    """A running app."""

    url: str
    engine: Engine
    talk: Talk


@contextmanager
def served(
    rest: Callable[[str], str] = lambda question: f" so {question}",
    *,
    held: bool = True,
    documents: Sequence[tuple[str, str]] = (("Alpha", "alpha document"), ("Beta", "beta document")),
    **knobs: Any,
) -> Iterator[Served]:
    """The app on a free port; documents are (title, text)."""
    talk = Talk(rest, held=held)
    engines: list[Engine] = []

    @asynccontextmanager
    async def open_pipeline() -> AsyncIterator[RagPipeline]:
        index = FaissIndex(LetterEmbedder(), name="kb")
        await index.add(
            [Chunk(f"c{i}", f"d{i}", d[1], 0, {"title": d[0]}) for i, d in enumerate(documents)]
        )
        # While it is held, slow enough never to come to the end of its dots.
        model = ScriptedModel(talk, on_step=lambda plan: talk.wait(0.01))
        async with Engine.open(model, **knobs) as engine:
            engines.append(engine)
            yield RagPipeline(
                engine=engine,
                index=index,
                template=PromptTemplate(order="relevance"),
                top_k=2,
                params=SamplingParams(max_tokens=3000),
                tracer_provider=TracerProvider(),
            )

    app = webapp().make_app(open_pipeline, examples=["An example?"])
    with ServerThread(app, timeout_graceful_shutdown=5) as server:
        try:
            yield Served(server.url, engines[0], talk)
        finally:
            talk.go_on.set()


def webapp() -> Any:
    spec = importlib.util.spec_from_file_location("webapp_example", WEBAPP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("there is no chromium on the PATH")
    with Browser(path, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


def open_page(browser: Browser, app: Served, **options: Any) -> Page:
    page = browser.open(app.url, **options)
    page.until("document.querySelector('#about').textContent.includes('kb')")
    return page


def ask(page: Page, question: str) -> None:
    """Write a question over what is in the box, and press Enter."""
    page.evaluate("document.querySelector('#question').select()")
    page.type(question)
    page.press("Enter")


def is_answering(page: Page) -> str:
    """Wait until a part of the answer is shown, and return it."""
    return str(
        page.until(
            "document.querySelector('#stop').disabled === false &&"
            f" document.querySelector('#answer').textContent.startsWith('{OPENING}.') &&"
            " document.querySelector('#answer').textContent"
        )
    )


def has_answered(page: Page) -> str:
    """Wait until the answer is complete, and return it."""
    page.until("document.querySelector('#stop').disabled && !measured.hidden")
    return page.text("#answer")


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_idle(engine: Engine) -> bool:
    statistics = engine.statistics()
    return not (statistics.num_running or statistics.num_waiting or statistics.blocks_used)


def visible(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).checkVisibility()"


def test_an_answer_streams_and_shows_where_it_came_from_and_where_its_time_went(
    browser: Browser,
) -> None:
    with served(lambda question: " it is beta [1], not [7] or [2") as app:
        page = open_page(browser, app)
        assert page.texts("#examples button") == ["An example?"]
        ask(page, "beta?")
        first = is_answering(page)
        # Two frames later the part is on the screen, while the answer goes on.
        painted = page.evaluate(
            """new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(
                () => resolve(document.querySelector('#answer').textContent))))"""
        )
        page.until(f"document.querySelector('#answer').textContent.length > {len(painted)}")
        app.talk.go_on.set()
        answer = has_answered(page)
        assert len(first) <= len(painted) < len(answer)
        assert re.fullmatch(r"Well\.+ it is beta \[1\], not \[7\] or \[2", answer)
        assert page.text("#asked") == "beta?"

        # The sources, closed at first; a citation opens its own.
        assert page.texts("#answer a") == ["[1]"]
        assert page.texts("#sources pre") == ["beta document", "alpha document"]
        assert page.text("#sources summary").startswith("[1] Beta score ")
        assert not page.evaluate("document.querySelector('#source-1').open")
        page.click("#answer a")
        assert page.until("document.querySelector('#source-1').open")
        assert page.evaluate("document.activeElement.parentElement.id") == "source-1"
        page.click("#source-2 summary")
        page.until("document.querySelector('#source-2').open")

        # The waterfall: six stages without gaps, which sum to the total.
        assert page.texts("#stages th") == STAGES
        times = [float(text.removesuffix(" ms")) for text in page.texts("#waterfall .number")]
        *stages, total = times
        assert sum(stages) == pytest.approx(total, rel=0.01, abs=1)
        bars = page.evaluate(
            """[...document.querySelectorAll('.bar')].map(
                (bar) => [parseFloat(bar.style.left), parseFloat(bar.style.width)])"""
        )
        end = 0.0
        for left, width in bars:
            assert left == pytest.approx(end, abs=0.01)
            end = left + width
        assert end == pytest.approx(100, abs=0.1)
        drawn = page.evaluate(
            """[...document.querySelectorAll('.bar')].map(
                (bar) => 100 * bar.offsetWidth / bar.parentElement.offsetWidth)"""
        )
        assert drawn == pytest.approx([width for _, width in bars], abs=1)

        assert int(page.text("#prompt-tokens")) > 0
        assert page.text("#cached-tokens") == "0"
        # All tokens are single bytes; the one that ends the answer is counted, too.
        assert int(page.text("#generated-tokens")) == len(answer) + 1
        assert re.fullmatch("[0-9a-f]{32}", page.text("#trace"))

        # Once more: cached now, and the history grows and outlives a reload.
        page.click("#ask")
        page.until("document.querySelectorAll('#rows tr').length === 2")
        assert int(page.text("#cached-tokens")) > 0
        page.evaluate("window.isOld = true")
        page.command("Page.reload")
        page.until("!window.isOld && document.querySelector('#rows tr') !== null")
        rows = page.texts("#rows tr")
        assert len(rows) == 2
        assert all(re.fullmatch(r"beta\?[\d.]+ ms[\d.]+ ms\d+", row) for row in rows)
        assert page.errors() == []


@pytest.mark.parametrize("how", ["button", "Escape", "leaving"])
def test_stopping_frees_the_engine(browser: Browser, how: str) -> None:
    with served() as app:
        page = open_page(browser, app)
        ask(page, "beta?")
        is_answering(page)
        assert app.engine.statistics().num_running == 1
        match how:
            case "button":
                page.click("#stop")
            case "Escape":
                page.press("Escape")
            case _:
                page.command("Page.navigate", url="about:blank")
        eventually(lambda: is_idle(app.engine))
        assert app.engine.statistics().num_finished["abort"] == 1
        anyio.run(app.engine.check_integrity)
        if how == "leaving":
            return
        page.until("document.querySelector('#status').textContent === 'Stopped.'")
        assert page.evaluate("document.querySelector('#stop').disabled")
        assert page.text("#answer").startswith(OPENING)
        assert page.texts("#rows td") == ["beta?", "stopped", "–", "–"]
        assert not page.evaluate(visible("#error"))
        app.talk.go_on.set()
        ask(page, "again?")
        assert has_answered(page).endswith("so again?")


def test_a_new_question_takes_the_place_of_a_running_one(browser: Browser) -> None:
    with served() as app:
        page = open_page(browser, app)
        ask(page, "first?")
        is_answering(page)
        ask(page, "second?")
        eventually(lambda: app.engine.statistics().num_finished["abort"] == 1)
        assert app.engine.statistics().num_running <= 1
        is_answering(page)
        app.talk.go_on.set()
        assert re.fullmatch(r"Well\.+ so second\?", has_answered(page))
        assert page.text("#asked") == "second?"


def test_two_pages_at_once(browser: Browser) -> None:
    with served() as app:
        pages = {question: open_page(browser, app) for question in ("alpha?", "beta?")}
        for question, page in pages.items():
            ask(page, question)
        for page in pages.values():
            is_answering(page)
        assert app.engine.statistics().num_running == 2
        app.talk.go_on.set()
        for question, page in pages.items():
            assert re.fullmatch(rf"Well\.+ so {re.escape(question)}", has_answered(page))
            assert len(page.texts("#rows tr")) == 1


def test_what_looks_like_html_stays_text(browser: Browser) -> None:
    with served(
        lambda question: f" {INJECTION}", held=False, documents=[(INJECTION, INJECTION)]
    ) as app:
        page = open_page(browser, app)
        ask(page, INJECTION)
        assert has_answered(page) == f"Well {INJECTION}"
        for selector in ("#asked", "#sources pre", "#rows td"):
            assert page.text(selector) == INJECTION
        assert INJECTION in page.text("#sources summary")
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.scripts.length") == 1
        assert page.evaluate("document.title") == "ragserve: ask the corpus"
        # Even if it did become HTML, nothing in it would run.
        page.evaluate(
            f"""new Promise((resolve) => {{
                document.addEventListener('securitypolicyviolation', () => resolve());
                document.querySelector('#answer').innerHTML = {json.dumps(INJECTION)};
            }})"""
        )
        assert page.evaluate("document.title") == "ragserve: ask the corpus"


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser) -> None:
    word = "x" * 200
    with served(
        lambda question: f" {word} [1]", held=False, documents=[(word, word), ("b", "b" * 300)]
    ) as app:
        page = open_page(browser, app, width=360, height=740, mobile=True)
        ask(page, f"{word}?")
        has_answered(page)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert page.evaluate("innerWidth") == 360
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        wide = page.evaluate(
            """[...document.querySelectorAll('body *')]
                .filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > 360.5)
                .map((e) => e.outerHTML.slice(0, 80))"""
        )
        assert wide == []
        # The bars still have room to tell something.
        assert page.evaluate("document.querySelector('.track').clientWidth") > 80


def test_a_full_queue_is_told_and_can_be_tried_again(browser: Browser) -> None:
    with served(max_num_seqs=1, max_queued_requests=1) as app:
        pages = [open_page(browser, app) for _ in range(3)]
        ask(pages[0], "one?")
        is_answering(pages[0])
        ask(pages[1], "two?")
        eventually(lambda: app.engine.statistics().num_waiting == 1)
        ask(pages[2], "three?")
        pages[2].until(visible("#error"))
        assert "Too many questions are waiting" in pages[2].text("#error-text")
        assert pages[2].text("#retry").startswith("Try again (best in ")
        app.talk.go_on.set()
        has_answered(pages[1])
        eventually(lambda: is_idle(app.engine))
        pages[2].click("#retry")
        assert has_answered(pages[2]).endswith(" so three?")
        assert not pages[2].evaluate(visible("#error"))


def test_a_server_that_shuts_down_says_so(browser: Browser) -> None:
    with served(held=False) as app:
        page = open_page(browser, app)
        assert httpx.get(f"{app.url}/health").status_code == 200
        app.engine.begin_drain()
        ask(page, "beta?")
        page.until(visible("#error"))
        assert "takes no questions now" in page.text("#error-text")
        assert "shutting down" in page.text("#error-text")
        assert page.evaluate(visible("#retry"))
        assert page.evaluate("document.querySelector('#stop').disabled")
        assert httpx.get(f"{app.url}/health").status_code == 503


def test_an_answer_that_fails_half_way_keeps_what_came(browser: Browser) -> None:
    def fail(question: str) -> str:
        raise ValueError("secret")

    with served(fail) as app:
        page = open_page(browser, app)
        ask(page, "beta?")
        is_answering(page)
        app.talk.go_on.set()
        page.until(visible("#error"))
        assert page.text("#error-text").startswith("The answer failed.")
        assert "secret" not in page.text("body")
        assert page.text("#answer").startswith(OPENING)


def test_what_comes_in_pieces_is_put_together(browser: Browser) -> None:
    def send(event: str, data: Any) -> None:
        wire = f"event: {event}\ndata: {json.dumps(data)}\n\n"
        page.evaluate(f"send({json.dumps(wire)})")

    with served() as app:
        page = open_page(browser, app)
        page.evaluate(
            """(() => {
                let body;
                window.fetch = async (url, { signal }) => new Response(new ReadableStream({
                    start(controller) {
                        body = controller;
                        signal.addEventListener("abort", () => controller.error(signal.reason));
                    },
                }));
                window.send = (text) => body.enqueue(new TextEncoder().encode(text));
                window.finish = () => body.close();
            })()"""
        )
        sources = [{"number": n, "id": f"c{n}", "score": 0.5} for n in (1, 2)]
        ask(page, "one?")
        send("retrieval", {"sources": sources, "dropped": 0})
        for text in ("see [", "2", "], not [1", "2] or [1"):
            send("delta", {"text": text})
        # What may become a citation is held back.
        page.until("document.querySelector('#answer').textContent === 'see [2], not [12] or '")
        assert page.texts("#answer a") == ["[2]"]
        # Nothing of it gets into the next answer.
        ask(page, "two?")
        send("retrieval", {"sources": sources, "dropped": 0})
        send("delta", {"text": "new"})
        page.until("document.querySelector('#answer').textContent === 'new'")
        page.evaluate("finish()")
        page.until(visible("#error"))
        assert "ended before the answer was complete" in page.text("#error-text")


def test_events_are_the_same_however_they_are_cut(browser: Browser) -> None:
    wire = (
        ': a comment\n\nevent: delta\r\ndata: {"text": "ä€𝄞"}\r\n\r\ndata:one\ndata\ndata:  two\n\n'
        "event: ignored\n\n: keep-alive\n\nid: 7\rdata: three\r\rdata: cut short"
    )
    with served() as app:
        page = open_page(browser, app)
        parsed = page.evaluate(
            f"""(async () => {{
                const {{ events }} = await import("/page/sse.js");
                const bytes = new TextEncoder().encode({json.dumps(wire)});
                const parse = async (chunks) => {{
                    const stream = new ReadableStream({{
                        start(controller) {{
                            for (const chunk of chunks) controller.enqueue(chunk);
                            controller.close();
                        }},
                    }});
                    const found = [];
                    for await (const event of events(stream)) found.push(event);
                    return JSON.stringify(found);
                }};
                const all = new Set([await parse(Array.from(bytes, (b) => Uint8Array.of(b)))]);
                for (let i = 0; i <= bytes.length; i++)
                    all.add(await parse([bytes.subarray(0, i), bytes.subarray(i)]));
                return [...all];
            }})()"""
        )
    assert len(parsed) == 1
    assert json.loads(parsed[0]) == [
        {"event": "delta", "data": '{"text": "ä€𝄞"}'},
        {"event": "message", "data": "one\n\n two"},
        {"event": "message", "data": "three"},
    ]


def test_the_other_routes() -> None:
    with served(held=False) as app, httpx.Client(base_url=app.url, trust_env=False) as client:
        question = {"question": "beta?"}
        answer = client.post("/ask", json=question)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith("event: retrieval\n")
        # Other sites' pages may send this type without asking first.
        plain = client.post(
            "/ask", content=json.dumps(question), headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 415
        assert client.post("/ask", json={"question": "x" * 20_000}).status_code == 413
        for wrong in ([], {}, {"question": " "}, {"question": 7}):
            refused = client.post("/ask", json=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"]
        assert client.get("/about").json() == {
            "model": "scripted",
            "corpus": "kb",
            "examples": ["An example?"],
        }
        assert client.get("/health").json() == {"status": "ready"}
        assert "ragserve" in client.get("/metrics").text
        models = client.get("/llm/v1/models").json()["data"]
        assert {model["id"] for model in models} == {"rag", "scripted"}
