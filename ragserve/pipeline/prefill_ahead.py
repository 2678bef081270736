"""The beginning of a prompt is computed while its documents are still being looked for.

What it will probably be is known before: the system prompt for certain, the first document where
the same question was asked before, or where a retriever gives provisional results. The engine works
on it only in steps in which nothing else is to be done. The answer never waits for it: before its
own request is submitted, the guess is ended, and what was computed until then is in the cache.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import anyio

from ragserve.engine import Engine, Stream, TokenizedPrompt

from ..observability.records import AheadRecord, error_type
from ..workers import Workers

__all__ = ["PrefillAhead", "Recent", "beginning", "beside", "normalized"]

T = TypeVar("T")

logger = logging.getLogger("ragserve")


def beginning(prompt: TokenizedPrompt, num_documents: int) -> TokenizedPrompt | None:
    """A prompt's system segment and first documents; None if it has none of those.

    :param num_documents: at most so many.
    """
    count = int(prompt.kinds[:1] == ("system",))
    last = count + num_documents
    while count < last and prompt.kinds[count : count + 1] == ("document",):
        count += 1
    if not count:
        return None
    return replace(
        prompt,
        token_ids=prompt.token_ids[: sum(prompt.segment_lengths[:count])],
        segment_lengths=prompt.segment_lengths[:count],
        retentions=prompt.retentions[:count],
        kinds=prompt.kinds[:count],
        retention_seconds=prompt.retention_seconds[:count],
    )


class Recent(Generic[T]):
    """What was noted last, under a key in a namespace. From any thread.

    Keys are kept as digests, so that what was asked is not.

    :param capacity: most entries; those noted longest ago are forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, namespace: str, key: str, entry: T) -> None:
        """Remember it in place of what was there."""
        digest = _digest(namespace, key)
        with self._lock:
            self._entries[digest] = entry
            self._entries.move_to_end(digest)
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def get(self, namespace: str, key: str) -> T | None:
        """None if it was never noted, or is forgotten."""
        return self._entries.get(_digest(namespace, key))


def normalized(question: str) -> str:
    """A question without what often differs: case, white space, and the marks at its end."""
    words = unicodedata.normalize("NFKC", question).casefold().split()
    return " ".join(words).rstrip(" ?!.…。")


def _digest(namespace: str, key: str) -> bytes:
    tenant, text = (part.encode("utf-8", "surrogatepass") for part in (namespace, key))
    parts = len(tenant).to_bytes(8, "little") + tenant + text
    return hashlib.blake2b(parts, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A guess that the engine was given."""

    prompt: TokenizedPrompt
    key: bytes
    stream: Stream


class PrefillAhead:
    """Guesses how one answer's prompt begins, and has that computed until `stop`.

    Nothing that goes wrong here reaches the answer.

    :param workers: make the guesses.
    :param under_way: what is being computed for others in the same namespaces, by key; shared by
        all answers of a pipeline, so that none computes what another one does already.
    """

    def __init__(
        self, engine: Engine, namespace: str, workers: Workers, under_way: set[bytes]
    ) -> None:
        self.error: str | None = None
        """What kind of error kept a guess from being computed, the last if there were several."""
        self._engine = engine
        self._namespace = namespace
        self._workers = workers
        self._under_way = under_way
        self._attempts: list[_Attempt] = []
        self._running: _Attempt | None = None
        self._make: Callable[[], TokenizedPrompt | None] | None = None
        self._guessed: anyio.Event | None = None

    def guess(self, make: Callable[[], TokenizedPrompt | None]) -> None:
        """Compute this from now on, instead of what was guessed before.

        :param make: the guess, or None for none; called by the workers.
        """
        self._make = make
        if self._guessed is not None:
            self._guessed.set()

    async def run(self) -> None:
        """Follow the guesses until cancelled. Raises nothing else."""
        while True:
            while (make := self._make) is None:
                self._guessed = anyio.Event()
                await self._guessed.wait()
            self._make = None
            try:
                await self._follow(make)
            except Exception as error:
                # A full queue, an engine that closes, a template that fails: the answer will meet
                # what concerns it by itself.
                self.error = error_type(error)
                # Not the error itself, whose message may quote what was asked.
                logger.debug("nothing is computed ahead of an answer: %s", self.error)

    def stop(self) -> None:
        """End what runs. It is submitted when this returns, so that a request that is submitted
        afterwards finds it ended. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.stream.abort()
            self._under_way.discard(running.key)

    def records(self, prompt: TokenizedPrompt | None, cached_tokens: int) -> list[AheadRecord]:
        """How each guess came out.

        :param prompt: the answer's own; None if it never came to be.
        :param cached_tokens: of it, found in the cache.
        """
        return [
            AheadRecord.of(attempt.prompt, attempt.stream.timeline, prompt, cached_tokens)
            for attempt in self._attempts
        ]

    async def _follow(self, make: Callable[[], TokenizedPrompt | None]) -> None:
        prompt, key = await self._workers.run(self._look, make)
        last = self._attempts[-1] if self._attempts else None
        if last is not None and last.key == key:
            return
        self.stop()
        if prompt is None or key in self._under_way:
            return
        stream = self._engine.prefill(prompt, namespace=self._namespace, speculative=True)
        self._under_way.add(key)
        self._running = attempt = _Attempt(prompt, key, stream)
        await stream.__aenter__()
        self._attempts.append(attempt)

    def _look(
        self, make: Callable[[], TokenizedPrompt | None]
    ) -> tuple[TokenizedPrompt | None, bytes]:
        """A guess and its key; None if there is nothing to compute for it."""
        prompt = make()
        probe = self._engine.probe(self._namespace)
        key, missing = probe.root, 0
        if prompt is not None:
            for start, end in pairwise(accumulate(prompt.segment_lengths, initial=0)):
                key, resident = probe.extend(key, prompt.token_ids[start:end])
                missing += end - start - resident
        return prompt if missing else None, key


async def beside(
    work: Callable[[], Awaitable[T]], other: Callable[[], Coroutine[Any, Any, None]]
) -> T:
    """What `work()` gives; meanwhile `other()` runs, and is cancelled when that is over.

    Errors of `work` come out as they are, not in groups; `other` raises none.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        try:
            results.append(await work())
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            errors.append(error)
        tasks.cancel_scope.cancel()
    if errors:
        raise errors[0]
    return results[0]
