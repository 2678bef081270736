"""One sequence on its way through the engine: its tokens, its blocks, its state, its timeline."""

from __future__ import annotations

import enum
import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..cache.block_hash import BlockHash, block_hashes, next_hash
from ..cache.layout import BlockLayout
from ..cache.retention import NO_RETENTION, RetentionPolicy
from ..outputs import FinishReason, TokenLogprob
from ..prompt import RETENTION_OF, SegmentKind, TokenizedPrompt
from ..sampling_params import SamplingParams
from .timeline import Timeline

__all__ = ["PromptSegment", "Request", "RequestState", "TextSink"]


if TYPE_CHECKING:
    from ..offload.tiers import Transfer


class RequestState(enum.Enum):
    """Where a request is. Preemption moves it from RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """One segment of a request's prompt: tokens `start` to `end`.

    :param digest: of its tokens alone.
    """

    kind: SegmentKind
    start: int
    end: int
    keep: RetentionPolicy
    digest: bytes


class TextSink(Protocol):
    """Turns one sequence's token ids into text (see `text.Detokenizer`)."""

    stop_reason: str | None
    """The stop string that was met, if one was."""
    num_tokens: int
    """Tokens taken; if a stop string was met, up to and with the one that completed it."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens, give the text that may be shown now."""

    def finish(self) -> str:
        """Give what was held back."""


class Request:
    """One sequence. A caller's request for `n` choices is `n` of these, one leading the others.

    Owned by the engine thread once it is added. The region map of its tokens:

        | prompt ...................... | output .......... | in flight |
        | planned: KV is in `blocks`, or will be .......... | to compute next |
        | shared (found or published) | own |

    Tokens in flight are being sampled by plans whose results the host has not seen: their number
    is known, their ids are not.

    :param request_id: the caller's; choices of one request share it.
    :param prompt: its tokens and segments.
    :param params: how to sample.
    :param block_size: of the pool it will live in.
    :param max_tokens: output tokens after which it ends, resolved and limited.
    :param eos_token_ids: end it, when sampled, unless the parameters say to ignore them.
    :param bad_word_ids: token sequences that must not be completed.
    :param seed: of the request's random numbers; `index` makes those of each choice differ.
    :param text: turns its tokens into text and finds stop strings; None if nobody reads text.
    :param index: which of the choices it is.
    :param leader: the choice that computes the shared prompt, if this one is not it.
    :param prefill_only: it ends when its prompt's KV is computed, and all of that can be shared.
    :param speculative: it runs only while nothing else has anything to compute, and nobody waits
        for what it computes.
    :param persist: its blocks go to the slowest tier at once.
    """

    __slots__ = (
        "bad_word_ids",
        "blocks",
        "bypass_count",
        "capacity",
        "eos_token_ids",
        "finish_reason",
        "index",
        "keys",
        "layout",
        "leader",
        "length",
        "loading",
        "max_length",
        "max_tokens",
        "namespace",
        "next_published",
        "num_computed",
        "num_known",
        "num_prompt_tokens",
        "num_published",
        "number",
        "output_token_ids",
        "owns_until",
        "params",
        "paused",
        "persist",
        "prefill_only",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "protected",
        "request_id",
        "retains",
        "sampler_state",
        "samples_on_host",
        "seed",
        "segments",
        "sort_key",
        "speculative",
        "state",
        "stop_reason",
        "stop_token_ids",
        "text",
        "timeline",
        "waited_from",
        "waits_for",
    )

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        block_size: int,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        seed: int = 0,
        priority: int = 0,
        namespace: str = "",
        text: TextSink | None = None,
        index: int = 0,
        leader: Request | None = None,
        prefill_only: bool = False,
        speculative: bool = False,
        persist: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt.token_ids
        self.output_token_ids: list[int] = []
        self.num_prompt_tokens = len(prompt.token_ids)
        self.params = params
        self.max_tokens = max_tokens
        self.eos_token_ids = eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else eos_token_ids
        )
        self.bad_word_ids = bad_word_ids
        self.seed = seed
        self.priority = priority
        self.namespace = namespace
        self.text = text
        self.index = index
        self.leader = leader
        self.prefill_only = prefill_only
        self.speculative = speculative
        self.persist = persist
        self.layout: BlockLayout
        self.segments: tuple[PromptSegment, ...]
        self.keys: list[BlockHash]
        if leader is None:
            packed = prompt.packed()
            self.layout = BlockLayout(prompt.segment_lengths, block_size, closed=prefill_only)
            self.segments = _segments(prompt, packed)
            self.keys = block_hashes(packed, self.layout, namespace)
        else:
            # The same prompt: it is hashed once, however many choices there are.
            self.layout, self.segments = leader.layout, leader.segments
            self.keys = list(leader.keys)
        self.retains = any(retention is not None for retention in prompt.retentions)
        """Whether some segment's class is another than its kind's."""
        self.state = RequestState.WAITING
        self.number = 0
        """In order of arrival; set when it is queued."""
        self.sort_key = (speculative, priority, 0, 0)
        """Who goes first: lower priority value, then earlier arrival. The last number is for who
        was lent another's place: it goes just before. No two are equal."""
        self.blocks: list[int] = []
        self.capacity = 0
        """Tokens that the blocks have room for."""
        self.length = self.num_prompt_tokens
        """Tokens of prompt and output, those in flight included."""
        self.max_length = self.num_prompt_tokens + max_tokens
        self.num_known = self.num_prompt_tokens
        """Tokens it had when it was seated last: it decodes from there on."""
        self.num_computed = 0
        """Tokens whose KV is stored, or will be by the plans under way."""
        self.num_published = 0
        """Blocks that others may find."""
        self.next_published = 0
        """Tokens with which one more is complete."""
        self.owns_until = 0
        """It owns its blocks from `num_published` to this (see `InflightPrefixes`)."""
        self.protected: Sequence[BlockHash] = ()
        """Keys of blocks that are spared while it waits for them."""
        self.bypass_count = 0
        """How often one that came later was started before it."""
        self.waits_for: tuple[Request, int] | None = None
        """The owner of the blocks that it waits for, and the index of the last of them."""
        self.waited_from: int | None = None
        """Tokens that were cached when it began to wait for others to compute more."""
        self.loading: Transfer | None = None
        """Its blocks that are on their way from another tier; until they are there it rests."""
        self.samples_on_host = False
        """Whether the runner must see each token before it can sample the next."""
        self.paused = False
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.timeline = Timeline()
        self.sampler_state: object = None  # the sampler's own, made and read by it alone

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id}/{self.index} [{self.state.value} | "
            f"{self.num_computed}/{self.num_tokens} computed, {len(self.blocks)} blocks]>"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, as far as the ids are known."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_in_flight(self) -> int:
        """Tokens that plans under way sample."""
        return self.length - self.num_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens without KV yet; the last of them gives the next token."""
        return self.length - self.num_computed

    @property
    def num_shareable(self) -> int:
        """Blocks that it may find in the cache. What is to be continued is computed in part."""
        if self.prefill_only:
            return self.layout.num_complete(self.num_tokens)
        return self.layout.num_complete(self.num_tokens - 1)

    def find_end(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the next tokens belong to the answer, and what ends it there, if it ends."""
        count, before = len(token_ids), len(self.output_token_ids)
        if not self.stop_token_ids.isdisjoint(token_ids):
            for place, token_id in enumerate(token_ids, 1):
                if token_id in self.stop_token_ids and before + place >= self.params.min_tokens:
                    return place, "stop"
        room = self.max_tokens - before
        return (room, "length") if count >= room else (count, None)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions `start` to `end`, which must be known."""
        n = self.num_prompt_tokens
        if end <= n:
            return self.prompt_token_ids[start:end]
        if start >= n:
            return self.output_token_ids[start - n : end - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - n]

    def retention_of(self, block: int) -> RetentionPolicy:
        """How long the sequence's `block`-th block is kept."""
        start = self.layout.start(block)
        for segment in self.segments:
            if start < segment.end:
                return segment.keep
        return NO_RETENTION

    def extend_keys(self) -> None:
        """Name the blocks that generated tokens have completed."""
        keys, layout = self.keys, self.layout
        complete = layout.num_complete(self.num_tokens)
        if complete > 0 and not keys:
            # The first block was completed by the answer.
            tokens = self.tokens(0, self.num_tokens)
            keys.extend(block_hashes(tokens, layout, self.namespace))
        for index in range(len(keys), complete):
            tokens = self.tokens(layout.start(index), layout.start(index + 1))
            keys.append(next_hash(keys[-1], tokens))

    def stamp(self) -> int:
        """Now, on the timeline's clock."""
        return time.monotonic_ns()


def _segments(prompt: TokenizedPrompt, packed: array[int]) -> tuple[PromptSegment, ...]:
    lengths = prompt.segment_lengths
    turns: tuple[SegmentKind, ...] = tuple("turn" for _ in lengths)
    kinds = prompt.kinds or turns
    retentions = prompt.retentions or (None,) * len(lengths)
    seconds = prompt.retention_seconds or (None,) * len(lengths)
    segments: list[PromptSegment] = []
    end, after = len(prompt.token_ids), NO_RETENTION
    for length, kind, retention, lease in zip(
        reversed(lengths), reversed(kinds), reversed(retentions), reversed(seconds), strict=True
    ):
        own = RETENTION_OF[kind]
        keep = RetentionPolicy(own) if retention is None else RetentionPolicy(retention, lease, own)
        # What comes after is found only through this.
        if after.retention > keep.retention:
            keep = RetentionPolicy(after.retention, after.seconds, keep.otherwise)
        after = keep
        start = end - length
        digest = hashlib.blake2b(packed[start:end], digest_size=16).digest()
        segments.append(PromptSegment(kind, start, end, keep, digest))
        end = start
    return tuple(reversed(segments))
