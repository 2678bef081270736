"""A route that generates: who may ask, what answers, what is told of a failure and logged."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragserve.engine import Engine
from ragserve.observability.tracing import request_context
from ragserve.pipeline.rag_pipeline import RagPipeline

from ..bodies import BodyLimits, json_response, read_json, text_response
from ..limits import Concurrency, Keyring, KeyState, priority_of
from ..problem import Problem, problem_of
from ..sse import SSEResponse, until_disconnect
from .generation import Generation
from .models import Models
from .protocol import Options
from .request_log import RequestLog, logger
from .responses import Format, error_chunk, stream, whole

if TYPE_CHECKING:
    from opentelemetry.context import Context

R = TypeVar("R")

__all__ = ["Answer", "Asking", "Endpoint", "Rules"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all requests that generate. See `openai_app`."""

    keys: Keyring
    concurrency: Concurrency
    bodies: BodyLimits
    min_priority: int
    """Of requests without a key."""
    log_requests: bool
    heartbeat: float | None


class Answer(NamedTuple):
    """What answers a request, and how that is written down."""

    generation: Generation
    form: Format


class Asking:
    """One request on its way: who asks, and what for."""

    options: Options
    """Set when it is admitted."""

    def __init__(
        self, key: KeyState | None, parent: Context | None, log: RequestLog, min_priority: int
    ) -> None:
        self.parent = parent
        self.namespace: str | None = None
        self.priority = 0
        self._min_priority = min_priority if key is None else key.min_priority
        self.log = log
        self._key = key

    def admit(self, options: Options, models: Models) -> Engine | RagPipeline:
        """The model that is asked.

        :raises Problem: if there is none of that name, the namespace is another's, or the
            priority is not for this client.
        """
        self.options = options
        self.log.stream = options.stream
        asked = options.namespace
        self.namespace = asked if self._key is None else self._key.namespace_of(asked)
        self.priority = priority_of(options.priority, self._min_priority)
        model = models.find(options.model)
        self.log.model = options.model
        return model


class Endpoint(Generic[R]):
    """A route that generates: from a request to its log.

    :param rules: for all requests.
    :param read: makes a request of a body's JSON, mostly in a thread; raises what is wrong.
    :param answer: makes of a request what answers it.
    :param prefix: what ids of its answers begin with.
    :param prompt: the field of the body that the prompt is in.
    """

    def __init__(
        self,
        rules: Rules,
        read: Callable[[object], R],
        answer: Callable[[R, Asking], Awaitable[Answer]],
        *,
        path: str,
        prefix: str,
        prompt: str,
    ) -> None:
        self._rules = rules
        self._read = read
        self._answer = answer
        self.path = path
        self._prefix = prefix
        self._prompt = prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Returns when the response has ended, or its client has left."""
        log = RequestLog(self.path, f"{self._prefix}-{secrets.token_hex(12)}")
        try:
            # The places of a request among those under way are its own until the response ends.
            with contextlib.ExitStack() as places:
                try:
                    response = await self._respond(Headers(scope=scope), receive, places, log)
                except Exception as error:
                    response = self._refuse(log, error)
                    if log.status == 500:
                        logger.exception("a request failed: %s", log.request_id)
                await response(scope, receive, send)
        finally:
            if self._rules.log_requests:
                log.write()

    async def _respond(
        self, headers: Headers, receive: Receive, places: contextlib.ExitStack, log: RequestLog
    ) -> Response:
        rules = self._rules
        key = rules.keys.find(headers.get("authorization"))
        if key is not None:
            log.key = key.name
            key.count()
        limited = [rules.concurrency] if key is None else [key.concurrency, rules.concurrency]
        for concurrency in limited:
            concurrency.check()  # no body need be read for what would be refused
        request = await read_json(headers, receive, rules.bodies, self._read)
        # Not before: a client that never ends its body would hold a place.
        for concurrency in limited:
            places.enter_context(concurrency.slot())
        asking = Asking(key, request_context(headers), log, rules.min_priority)
        answer = await self._answer(request, asking)
        if asking.options.stream:
            return self._stream(answer, asking)
        try:
            await until_disconnect(receive, _run(answer.generation))
        finally:
            await self._end(answer.generation, log)
        body = await whole(
            answer.generation, answer.form, answer_id=log.request_id, model=asking.options.model
        )
        log.status = 200
        return text_response(body, headers={"x-request-id": log.request_id})

    def _stream(self, answer: Answer, asking: Asking) -> Response:
        log, generation = asking.log, answer.generation

        def succeed() -> None:
            log.status = 200

        def fail(error: Exception) -> bytes:
            return error_chunk(self._problem(log, error))

        events = stream(
            generation,
            answer.form,
            answer_id=log.request_id,
            model=asking.options.model,
            include_usage=asking.options.include_usage,
            on_end=succeed,
        )
        return SSEResponse(
            events,
            close=partial(self._end, generation, log),
            heartbeat=self._rules.heartbeat,
            headers={"x-request-id": log.request_id},
            on_error=partial(self._refuse, log),
            error_event=fail,
        )

    async def _end(self, generation: Generation, log: RequestLog) -> None:
        with anyio.CancelScope(shield=True):
            await generation.aclose()
        log.note(generation.completions)

    def _problem(self, log: RequestLog, error: Exception) -> Problem:
        problem = problem_of(error, prompt=self._prompt)
        log.status, log.error = problem.status, type(error).__name__
        return problem

    def _refuse(self, log: RequestLog, error: Exception) -> Response:
        problem = self._problem(log, error)
        headers = {**problem.headers, "x-request-id": log.request_id}
        return json_response(problem.body(), problem.status, headers)


async def _run(generation: Generation) -> None:
    await generation.start()
    async for _ in generation:
        pass
