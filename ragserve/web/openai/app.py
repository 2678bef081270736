"""OpenAI's routes as an ASGI application, to be mounted in another.

engines: dict[str, rs.Engine | None] = {"smollm2": None}  # not loaded yet

@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with rs.Engine.open("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
        engines["smollm2"] = engine
        yield

app = FastAPI(lifespan=lifespan)
app.mount("/llm", openai_app(engines))

client = openai.OpenAI(base_url="http://localhost:8000/llm/v1", api_key="-")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ragserve.engine import Engine, InvalidParamsError, PromptLike, SamplingParams, TokenizedPrompt
from ragserve.observability.metrics import Metrics
from ragserve.observability.tracing import GenerationTracer
from ragserve.pipeline.rag_pipeline import RagPipeline
from ragserve.prompting import PromptTemplate

from ..bodies import BodyLimits, json_response, off_loop, to_json
from ..limits import ApiKey, Concurrency, Keyring, check_limit, check_priority, check_seconds
from ..problem import Problem, problem_of
from .endpoint import Answer, Asking, Endpoint, Rules
from .generation import EngineGeneration, Generation, RagGeneration, document_prompt
from .models import Engines, Models, Pipelines
from .pages import Pages
from .protocol import ChatRequest, CompletionRequest, read_chat, read_completion
from .responses import ChatFormat, CompletionFormat, Echo

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["openai_app"]

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""A megabyte is some 250,000 tokens of English."""
MAX_BODY_ITEMS: Final = 200_000
"""Token ids of a prompt are the most that a request needs."""
BODY_SECONDS: Final = 10.0
_MAX_LOGPROBS: Final = 1_048_576
"""Most log-probabilities of echoed prompts in an answer; each is some 30 bytes."""


def openai_app(
    engines: Engine | Engines,
    rag: RagPipeline | Pipelines | None = None,
    *,
    served_model_name: str | None = None,
    api_keys: Sequence[ApiKey | str] = (),
    template: PromptTemplate | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_body_items: int = MAX_BODY_ITEMS,
    body_timeout: float = BODY_SECONDS,
    min_priority: int = 0,
    max_concurrent_requests: int | None = None,
    metrics: Metrics | None = None,
    log_requests: bool = False,
    tracer_provider: TracerProvider | None = None,
    capture_content: bool = False,
    heartbeat: float | None = 15.0,
) -> Starlette:
    """An ASGI application with OpenAI's routes: mount it in an application, at any prefix.

    It has `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health` and `/metrics`. It
    opens and closes nothing: engines are the caller's.

    Beyond OpenAI's, requests may have vLLM's sampling parameters, `priority` (lower goes first),
    `namespace` (the tenant, for the cache) and, in a chat, `documents`: strings, or objects of
    `text`, `id` and `title`. Those are laid out by `template` and the question is answered from
    them. Messages are then one question, and before it, if need be, a system message that takes
    the place of the template's. Fields that are not understood are refused; see
    `ragserve.web.openai.protocol`.

    Each pipeline of `rag` is a model, too. It is asked the last message, which must be the
    user's. Earlier messages, of whatever role, are left out: neither retrieval nor the prompt
    sees them, since a `PromptTemplate` lays out one question. An application that wants
    follow-up questions understood rewrites them into one first. Sampling parameters that a
    request leaves out are the pipeline's. A namespace keeps caches apart, not documents: a tenant
    with documents of its own needs a pipeline of its own, and all keys may ask all models.

    Answers from documents have more fields than OpenAI's: `sources` (`number`, as citations have
    it, `id`, `document_id`, `title`, `text`, and the `score` of those that were retrieved),
    `dropped` (how many more did not fit) and `timings`. They are in the body, or in a stream's
    first chunk, and `timings` in the one before `[DONE]`.

    :param engines: an engine, or engines by the name that requests have as their `model`. A
        mapping is looked at anew for each request, so it may be filled later, by a lifespan:
        None is an engine that is still loading, and its requests are a 503.
    :param rag: a pipeline, called by its `name`; or pipelines by name, likewise.
    :param served_model_name: what a single engine is called. Default: its `model_name`.
    :param api_keys: without any, everybody may ask. `/health` needs no key.
    :param template: for `documents`.
    :param max_body_bytes: most bytes of a request's body; more is a 413.
    :param max_body_items: most values in a body's lists and objects, all together; more is a 400.
        Each list and each object counts as 8 more. What each field may hold is
        `EngineConfig.limits`'.
    :param body_timeout: seconds in which a body must have come and be read; then it is a 408.
    :param min_priority: least `priority` that requests may ask for where there are no keys; lower
        goes first. Keys have their own, `ApiKey(min_priority=...)`.
    :param max_concurrent_requests: most requests under way at a time; more is a 429. A request is
        under way from when its body is there, a stream until its end. None leaves it to the
        engines' queues.
    :param metrics: what `/metrics` shows. Default: the engines and pipelines here. With
        `api_keys` only a key with `metrics=True` may read it; without, everybody.
    :param log_requests: log each request at INFO, by the logger `ragserve.web`, with what it
        cost as attributes of the record; never the text or the key.
    :param tracer_provider: for requests to engines; pipelines have their own. None is the one
        that the application has installed. Spans are made under the framework's, or what the
        request's `traceparent` says.
    :param capture_content: put prompts and answers into spans.
    :param heartbeat: seconds without an event after which a stream is kept alive by a comment.
    :raises InvalidParamsError: if names, keys or limits cannot be.
    """
    check_limit("max_body_bytes", max_body_bytes)
    check_limit("max_body_items", max_body_items)
    check_seconds("body_timeout", body_timeout)
    check_priority("min_priority", min_priority)
    check_limit("max_concurrent_requests", max_concurrent_requests)
    if served_model_name is not None and not isinstance(engines, Engine):
        raise InvalidParamsError(
            "served_model_name", served_model_name, "None with a mapping, which has the names"
        )
    if isinstance(engines, Engine):
        engines = {served_model_name or engines.model_name: engines}
    if isinstance(rag, RagPipeline):
        rag = {rag.name: rag}
    # An empty mapping is kept: it may be filled later.
    models = Models(engines, {} if rag is None else rag)
    rules = Rules(
        keys=Keyring(api_keys),
        concurrency=Concurrency(max_concurrent_requests, "this server"),
        bodies=BodyLimits(max_body_bytes, max_body_items, body_timeout),
        min_priority=min_priority,
        log_requests=log_requests,
        heartbeat=heartbeat,
    )
    api = _Api(
        models,
        template=template or PromptTemplate(),
        tracer=GenerationTracer(tracer_provider, capture_content=capture_content),
    )
    chat = Endpoint(
        rules,
        api.read_chat,
        api.chat,
        path="/v1/chat/completions",
        prefix="chatcmpl",
        prompt="messages",
    )
    completion = Endpoint(
        rules,
        api.read_completion,
        api.completion,
        path="/v1/completions",
        prefix="cmpl",
        prompt="prompt",
    )
    pages = Pages(models, rules.keys, metrics)
    return Starlette(
        routes=[
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/health", pages.health),
            Route("/metrics", pages.metrics),
            Route(chat.path, chat, methods=["POST"]),
            Route(completion.path, completion, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _on_error, Problem: _on_error},
    )


class _Api:
    """Makes of a request what answers it."""

    def __init__(
        self,
        models: Models,
        *,
        template: PromptTemplate,
        tracer: GenerationTracer,
    ) -> None:
        self._models = models
        self._template = template
        self._tracer = tracer

    def read_chat(self, data: object) -> ChatRequest:
        """The body of a chat, within the limits of the model that it names."""
        return read_chat(data, self._models.bounds)

    def read_completion(self, data: object) -> CompletionRequest:
        """The body of a completion, likewise."""
        return read_completion(data, self._models.bounds)

    async def chat(self, request: ChatRequest, asking: Asking) -> Answer:
        """What answers a chat."""
        model = asking.admit(request.options, self._models)
        if isinstance(model, RagPipeline):
            return self._ask_pipeline(model, request, asking)
        params = request.options.params()
        prompts: Any = [request.messages]
        if request.documents is not None:
            system, question = _system_and_question(request)
            prompts = partial(
                document_prompt,
                question,
                request.documents,
                self._template if system is None else replace(self._template, system=system),
                model,
                params,
            )
        form = ChatFormat(model.tokenizer if params.logprobs is not None else None)
        return Answer(self._ask_engine(model, prompts, params, asking), form)

    async def completion(self, request: CompletionRequest, asking: Asking) -> Answer:
        """What continues texts."""
        model = asking.admit(request.options, self._models)
        if isinstance(model, RagPipeline):
            raise Problem(
                400,
                f"{request.options.model!r} answers questions, at /v1/chat/completions",
                param="model",
            )
        params = request.options.params()
        prompts: Sequence[PromptLike | TokenizedPrompt] = request.prompts
        echo: list[Echo] = []
        if request.echo:
            prompts, echo = await _echoed(model, request)
        form = CompletionFormat(
            params.n,
            model.tokenizer if params.logprobs is not None else None,
            echo,
            skip_special_tokens=params.skip_special_tokens,
        )
        return Answer(self._ask_engine(model, prompts, params, asking), form)

    def _ask_engine(
        self, engine: Engine, prompts: Any, params: SamplingParams, asking: Asking
    ) -> Generation:
        return EngineGeneration(
            engine,
            prompts,
            params,
            request_id=asking.log.request_id,
            priority=asking.priority,
            namespace=asking.namespace or "",
            tracer=self._tracer,
            parent=asking.parent,
        )

    def _ask_pipeline(self, rag: RagPipeline, request: ChatRequest, asking: Asking) -> Answer:
        if request.documents is not None:
            raise Problem(
                400, f"{request.options.model!r} finds documents itself", param="documents"
            )
        params = request.options.params(rag.params)
        answer = rag.stream(
            request.question,
            params=params,
            priority=asking.priority,
            namespace=asking.namespace,
            trace_context=asking.parent,
        )
        tokens = rag.engine.tokenizer if params.logprobs is not None else None
        return Answer(RagGeneration(answer), ChatFormat(tokens))


def _system_and_question(request: ChatRequest) -> tuple[str | None, str]:
    """What a chat about documents may hold.

    :raises Problem: if it holds more: a template lays out one question.
    """
    *before, _ = request.messages
    if len(before) > 1 or any(message["role"] != "system" for message in before):
        raise Problem(
            400,
            "with documents, messages are one question of the user's, and at most one system "
            "message before it",
            param="messages",
        )
    return before[0]["content"] if before else None, request.question


async def _echoed(
    engine: Engine, request: CompletionRequest
) -> tuple[list[TokenizedPrompt], list[Echo]]:
    """The prompts, and what of them is to be given back."""
    prompts = [await engine.tokenize(prompt) for prompt in request.prompts]
    params = request.options.params()
    if params.prompt_logprobs is not None:
        told = params.n * sum(len(prompt.token_ids) for prompt in prompts)
        told *= 1 + params.prompt_logprobs
        if told > _MAX_LOGPROBS:
            raise Problem(
                400,
                f"echo with logprobs gives {told} log-probabilities back, n times the prompts' "
                f"tokens times 1 + logprobs, and at most {_MAX_LOGPROBS}",
                param="logprobs",
            )

    def write() -> list[Echo]:
        echoes = []
        for given, prompt in zip(request.prompts, prompts, strict=True):
            if not isinstance(given, str):
                given = engine.tokenizer.decode(
                    prompt.token_ids, skip_special_tokens=params.skip_special_tokens
                )
            echoes.append(Echo(given, prompt.token_ids, to_json(given)))
        return echoes

    return prompts, await off_loop(write)


async def _on_error(request: Request, error: Exception) -> Response:
    """What Starlette says by itself: that there is no such route, or not with this method."""
    problem = problem_of(error)
    return json_response(problem.body(), problem.status, problem.headers)
