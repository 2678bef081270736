"""Every knob of an engine: its unit, its default, its check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .errors import InvalidParamsError

__all__ = ["DType", "EngineConfig"]

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an `Engine`; names are vLLM's where the knob is the same.

    :raises InvalidParamsError: for a value outside its range, at construction.
    """

    dtype: DType = "auto"
    """Of weights, KV and arithmetic; "auto" is the checkpoint's own. Weights in a narrower one
    than the checkpoint's are kept in the user's cache directory when they are first opened."""
    device: str = "cpu"
    """Where it computes; only "cpu" so far."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None is what the model was trained for."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_cache_bytes: int | None = None
    """Memory for KV, exactly; None is the smaller of 1 GiB and a quarter of the free memory,
    but room for one sequence of `max_model_len` at least."""
    enable_prefix_caching: bool = True
    max_num_seqs: int = 64
    """Most sequences computed in one step."""
    max_num_batched_tokens: int = 384
    """Most tokens computed in one step, prompts and answers together. Streams get their next
    token once a step, so this bounds how long arriving prompts make them wait."""
    long_prefill_token_threshold: int | None = None
    """A prompt with more tokens than this left to compute is long: it takes at most half of a
    step that shorter prompts want too; None is twice `max_num_batched_tokens`."""
    max_long_partial_prefills: int = 1
    """Most long prompts under way at once; shorter ones overtake those that wait."""
    watermark: float = 0.01
    """Share of the blocks that admitting a request must leave for those that run."""
    max_queued_requests: int = 1024
    """Most requests waiting to be started; one more is refused with QueueFullError."""
    max_queued_tokens: int | None = None
    """Most prompt tokens waiting to be started; None is no limit."""
    queue_timeout: float | None = None
    """Seconds a request may wait to be started; None is for ever."""
    stream_buffer_tokens: int = 256
    """A stream with this many tokens unread is paused until its consumer reads."""
    num_tokenizers: int = 2
    """Threads, and clones of the tokenizer, that encode prompts."""
    num_threads: int | None = None
    """CPU threads of a step; None is torch's default."""
    seed: int | None = None
    """Base of the random numbers of requests without a seed; None is fresh at each open."""
    trust_remote_code: bool = False
    """Must be False: models run on our own code. Present so that True is refused aloud."""
    revision: str | None = None
    """Branch, tag or commit on the model hub."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise InvalidParamsError("dtype", self.dtype, "one of auto, float32, bfloat16, float16")
        if self.device != "cpu":
            raise InvalidParamsError("device", self.device, '"cpu"; GPUs are not supported yet')
        if self.trust_remote_code:
            raise InvalidParamsError(
                "trust_remote_code", True, "only False; code from a model's folder is never run"
            )
        for name, low in (
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_long_partial_prefills", 1),
            ("max_queued_requests", 1),
            ("stream_buffer_tokens", 1),
            ("num_tokenizers", 1),
        ):
            self._check_int(name, low)
        for name, low in (
            ("max_model_len", 2),
            ("kv_cache_bytes", 1),
            ("long_prefill_token_threshold", 1),
            ("max_queued_tokens", 1),
            ("num_threads", 1),
            ("seed", 0),
        ):
            if getattr(self, name) is not None:
                self._check_int(name, low)
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidParamsError("watermark", self.watermark, "0 <= watermark < 1")
        if self.queue_timeout is not None and not 0.0 < self.queue_timeout < float("inf"):
            raise InvalidParamsError(
                "queue_timeout", self.queue_timeout, "seconds greater than 0, or None"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidParamsError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs={self.max_num_seqs}, so that every running sequence "
                "gets its next token in each step",
            )

    def _check_int(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InvalidParamsError(name, value, f"an integer of at least {low}")

    @property
    def long_threshold(self) -> int:
        """`long_prefill_token_threshold` with its default filled in."""
        if self.long_prefill_token_threshold is not None:
            return self.long_prefill_token_threshold
        return 2 * self.max_num_batched_tokens
