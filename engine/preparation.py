"""From a call to requests that can be queued: check, encode, hash.

What costs the same for every prompt is checked at once, in the caller's event loop. All the rest
grows with the prompt and is done by the encoders' threads, where other callers take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TypeVar

import anyio

from .cache.block_hash import BlockHash, block_hashes
from .cache.layout import BlockLayout
from .config import EngineConfig
from .errors import InvalidParamsError, PromptTooLongError, QueueTimeoutError
from .prompt import Prompt, PromptLike, TokenizedPrompt
from .runtime.driver import Driver, Place
from .runtime.encoders import Encoders, Encoding
from .runtime.loading import LoadedModel
from .sampling_params import SamplingParams
from .scheduling.request import Request
from .scheduling.timeline import Timeline
from .text.tokenizer import Tokenizer

__all__ = ["Call", "Preparation"]

T = TypeVar("T")

_PRIORITIES = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Call:
    """What a caller asks for."""

    prompt: PromptLike | TokenizedPrompt
    params: SamplingParams
    priority: int
    namespace: str
    prefill_only: bool = False
    speculative: bool = False
    persist: bool = False


class Preparation:
    """Makes the requests of one engine.

    :param config: with everything filled in.
    :param driver: says whether requests are taken.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, driver: Driver) -> None:
        self._loaded = loaded
        self._config = config
        self._driver = driver
        self._random = random.Random(config.seed)
        self.encoders = Encoders(config.num_tokenizers)

    def check(self, call: Call) -> None:
        """Check all but the prompt.

        :raises InvalidParamsError: for what has the wrong type, is too large, or does not fit the
            model.
        """
        params = call.params
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError("params", params, "a SamplingParams, or None")
        self._config.limits.check_params(params)
        params.check_vocab(self._loaded.vocab_size)
        priority = call.priority
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidParamsError("priority", priority, "an integer; lower goes first")
        if priority not in _PRIORITIES:
            raise InvalidParamsError("priority", priority, "an integer of 64 bits, -2^63 to 2^63-1")
        self._config.limits.check_name("namespace", call.namespace)

    async def tokenize(
        self, prompt: PromptLike | TokenizedPrompt, namespace: str
    ) -> TokenizedPrompt:
        """Encode a prompt, whether or not it leaves room for an answer.

        :raises InvalidParamsError: if it is no valid prompt, or larger than `config.limits`.
        :raises QueueFullError: if too much waits already.
        :raises QueueTimeoutError: if it was not encoded within `config.queue_timeout`.
        """
        return await self._work(prompt, namespace, lambda tokenizer: tokenizer.tokenize(prompt))

    async def block_hashes(
        self, prompt: PromptLike | TokenizedPrompt, namespace: str
    ) -> tuple[TokenizedPrompt, list[BlockHash]]:
        """Encode a prompt, and name its blocks as if another segment followed. Raises the same."""

        def work(tokenizer: Tokenizer) -> tuple[TokenizedPrompt, list[BlockHash]]:
            tokenized = tokenizer.tokenize(prompt)
            layout = BlockLayout(tokenized.segment_lengths, self._config.block_size, closed=True)
            return tokenized, block_hashes(tokenized.packed(), layout, namespace)

        return await self._work(prompt, namespace, work)

    async def requests(
        self, call: Call, request_id: str, timeline: Timeline
    ) -> tuple[Place, list[Request]]:
        """Take a place in the queue, encode a prompt, and make the choices of its request.

        :param timeline: with the time of arrival; gets that of the encoding.
        :returns: the place, to be given to `Driver.submit` or `Driver.release`, and the choices.
        :raises InvalidParamsError: if it is no valid prompt, or larger than `config.limits`.
        :raises PromptTooLongError: if it leaves no room for an answer.
        :raises QueueFullError: if too much waits already.
        :raises QueueTimeoutError: if it was not encoded within `config.queue_timeout`.
        """
        self._driver.check_open()
        # First what no other time would change.
        size = self._check_prompt(call.prompt) + sum(map(len, call.params.bad_words or ()))
        place = self._driver.reserve(call.params.n, speculative=call.speculative)
        try:
            requests = await self._encode(
                call.namespace,
                size,
                timeline.arrived or time.monotonic_ns(),
                lambda encoding: self._make(call, request_id, timeline, encoding),
            )
        except BaseException:
            self._driver.release(place)
            raise
        return place, requests

    def _check_prompt(self, prompt: PromptLike | TokenizedPrompt) -> int:
        """Check a prompt's size before any work that grows with it.

        :returns: it, in characters and token ids.
        """
        size = self._config.limits.check_prompt(prompt)
        num_tokens = _num_known_tokens(prompt)
        if num_tokens >= self._loaded.max_model_len:
            raise self._too_long(num_tokens)
        return size

    async def _work(
        self,
        prompt: PromptLike | TokenizedPrompt,
        namespace: str,
        work: Callable[[Tokenizer], T],
    ) -> T:
        """Do what is no request, in a place of the queue all the same."""
        self._driver.check_open()
        self._config.limits.check_name("namespace", namespace)
        size, now = self._check_prompt(prompt), time.monotonic_ns()
        place = self._driver.reserve(0)
        try:
            return await self._encode(
                namespace, size, now, lambda encoding: work(self._tokenizer(encoding, None))
            )
        finally:
            self._driver.release(place)

    async def _encode(
        self, namespace: str, size: int, arrived: int, work: Callable[[Encoding[T]], T]
    ) -> T:
        timeout = self._config.queue_timeout
        try:
            with anyio.move_on_after(timeout):
                return await self.encoders.run(namespace, size, work)
        except (RuntimeError, CancelledError):
            # What the encoders raise if they are closed before, or while, this waits.
            self._driver.check_open()
            raise
        raise QueueTimeoutError((time.monotonic_ns() - arrived) / 1e9, timeout or 0.0)

    def _tokenizer(self, encoding: Encoding[T], limit: int | None) -> Tokenizer:
        """The tokenizer, which gives up when nobody waits any more, or the prompt cannot fit."""

        def check(num_tokens: int) -> None:
            encoding.check()
            if limit is not None and num_tokens >= limit:
                raise self._too_long(num_tokens, "at least ")

        return self._loaded.tokenizer.watched(check)

    # -- in the encoders' threads ---------------------------------------------------------

    def _make(
        self,
        call: Call,
        request_id: str,
        timeline: Timeline,
        encoding: Encoding[list[Request]],
    ) -> list[Request]:
        params = call.params
        tokenizer = self._tokenizer(encoding, self._loaded.max_model_len)
        prompt = tokenizer.tokenize(call.prompt)
        bad_words = tokenizer.bad_word_ids(params.bad_words or ())
        timeline.tokenized = time.monotonic_ns()
        max_tokens = self._check_fits(prompt, params)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        text = None
        if params.detokenize:
            text = tokenizer.detokenizer(
                prompt.token_ids,
                stop=params.stop or (),
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        requests: list[Request] = []
        for index in range(params.n):
            encoding.check()
            # Each choice copies the prompt's block hashes with the interpreter held: without this
            # the engine's thread waits for it up to 5 ms at a time, the switch interval.
            time.sleep(0)
            request = Request(
                request_id,
                prompt,
                params,
                block_size=self._config.block_size,
                max_tokens=0 if call.prefill_only else max_tokens,
                eos_token_ids=tokenizer.eos_token_ids,
                bad_word_ids=bad_words,
                seed=seed,
                priority=call.priority,
                namespace=call.namespace,
                text=text if text is None or index == 0 else text.twin(),
                index=index,
                leader=requests[0] if requests else None,
                prefill_only=call.prefill_only,
                speculative=call.speculative,
                persist=call.persist,
            )
            request.timeline.arrived = timeline.arrived
            request.timeline.tokenized = timeline.tokenized
            requests.append(request)
        return requests

    def _check_fits(self, prompt: TokenizedPrompt, params: SamplingParams) -> int:
        """How many tokens may be generated.

        :raises PromptTooLongError: if not even one.
        """
        length, limit = len(prompt.token_ids), self._loaded.max_model_len
        if length >= limit:
            raise self._too_long(length)
        layout = BlockLayout(prompt.segment_lengths, self._config.block_size)
        # Holes take slots but no positions: the pool may be full before max_model_len is.
        tail = layout.num_blocks(length) - 1
        capacity = layout.start(tail) + (self._loaded.num_blocks - tail) * self._config.block_size
        if length >= capacity:
            raise PromptTooLongError(
                length,
                capacity - 1,
                f"its {len(prompt.segment_lengths)} segments need {tail + 1} blocks and the KV "
                f"pool has {self._loaded.num_blocks}; use fewer or fuller segments, or raise "
                "kv_cache_bytes",
            )
        room = min(limit, capacity) - length
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _too_long(self, num_tokens: int, at_least: str = "") -> PromptTooLongError:
        limit = self._loaded.max_model_len
        return PromptTooLongError(
            num_tokens,
            limit - 1,
            f"max_model_len={limit} is for prompt and answer together; shorten the prompt "
            "or raise max_model_len",
            at_least=at_least,
        )


def _num_known_tokens(prompt: PromptLike | TokenizedPrompt) -> int:
    """Token ids that a prompt has before it is encoded."""
    match prompt:
        case TokenizedPrompt():
            return len(prompt.token_ids)
        case Prompt():
            return sum(len(segment.token_ids or ()) for segment in prompt.segments)
        case str() | bytes() | bytearray():
            return 0
        case list() | tuple() if prompt and isinstance(prompt[0], Mapping):
            return 0
        case Sequence():
            return len(prompt)
        case _:
            return 0
