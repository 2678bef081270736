"""Every knob of an engine: its unit, its default, its check."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .errors import InvalidParamsError
from .limits import RequestLimits

__all__ = ["CachePolicy", "DType", "EngineConfig"]

CachePolicy: TypeAlias = Literal["cost_aware", "lru"]
DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


_GPU_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
}
"""A GPU computes a prompt's tokens a hundred times as fast as a CPU, and wants more at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an `Engine`; names are vLLM's where the knob is the same.

    :raises InvalidParamsError: for a value outside its range, at construction.
    """

    dtype: DType = "auto"
    """Of weights, KV and arithmetic; "auto" is the checkpoint's own. Weights in a narrower one
    than the checkpoint's are kept in the user's cache directory when they are first opened."""
    device: str = "cpu"
    """Where it computes: "cpu", "cuda", or "cuda:1" and so on."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None is what the model was trained for."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_cache_bytes: int | None = None
    """Memory for KV, exactly. None on a CPU is the smaller of 1 GiB and a quarter of the free
    memory, but room for one sequence of `max_model_len` at least; on a GPU, what
    `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU memory that is free at open which the engine may take, weights and all,
    if `kv_cache_bytes` does not say how much KV there is to be."""
    enforce_eager: bool = False
    """Run steps kernel by kernel rather than replay CUDA graphs: slower, opens faster."""
    enable_prefix_caching: bool = True
    cache_policy: CachePolicy = "cost_aware"
    """What is done for prompts that share their beginnings. "cost_aware": blocks are evicted by
    what they are worth; waiting requests that find most go first; who needs what another is
    computing waits for it; what waiting requests would find is spared. "lru": none of that, as
    plain automatic prefix caching has it: the block that was unused for longest is evicted, first
    come is first served."""
    swap_space_bytes: int = 0
    """Host memory, pinned, for blocks that are evicted from a GPU's KV pool and may be asked for
    again; 0 is none. On a CPU the pool is host memory already: raise `kv_cache_bytes`."""
    disk_cache: str | Path | None = None
    """Folder for blocks of documents that were warmed, and on a CPU for those that are evicted:
    they are found again after a restart. It holds what the documents say, in the model's words;
    only its owner may read it. None is no such folder."""
    disk_cache_bytes: int = 8 << 30
    """Most bytes of files in `disk_cache`; those that were not used for longest go."""
    max_num_seqs: int = 64
    """Most sequences computed in one step."""
    max_num_batched_tokens: int = 384
    """Most tokens computed in one step, prompts and answers together. Streams get their next
    token once a step, so this bounds how long arriving prompts make them wait."""
    max_num_mixed_tokens: int | None = None
    """Most tokens computed in a step with prompts in which answers go on too: bounds the wait of
    streams more tightly, without making smaller the steps in which nobody waits. None on a GPU is
    as many as it computes in 40 ms, measured at open and without attention, which takes longer the
    longer the prompts are; on a CPU it is no such limit."""
    multi_step_seconds: float = 0.010
    """Most seconds of decode steps that a device takes between two touches of the host, while
    nothing but answers is to be computed: tokens arrive in groups of as many steps. With many
    sequences up to three times as long, 150 µs for each. 0 is one step at a time, as always on a
    CPU."""
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
    limits: RequestLimits = field(default_factory=RequestLimits)
    """Most that each field of a request may hold."""
    stream_interval: float = 0.020
    """Seconds between two deltas of a stream: what comes sooner is joined, so that a fast model
    does not spend the application's time on waking it for every token. A stream's first delta and
    its last are never held back. 0 gives each step's tokens at once."""
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
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(self.device)):
            raise InvalidParamsError("device", self.device, '"cpu", "cuda" or "cuda:<index>"')
        if self.trust_remote_code:
            raise InvalidParamsError(
                "trust_remote_code", True, "only False; code from a model's folder is never run"
            )
        if not isinstance(self.limits, RequestLimits):
            raise InvalidParamsError("limits", self.limits, "a RequestLimits")
        for name, low in (
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_long_partial_prefills", 1),
            ("max_queued_requests", 1),
            ("stream_buffer_tokens", 1),
            ("num_tokenizers", 1),
            ("swap_space_bytes", 0),
            ("disk_cache_bytes", 1),
        ):
            self._check_int(name, low)
        for name, low in (
            ("max_model_len", 2),
            ("kv_cache_bytes", 1),
            ("max_num_mixed_tokens", 1),
            ("long_prefill_token_threshold", 1),
            ("max_queued_tokens", 1),
            ("num_threads", 1),
            ("seed", 0),
        ):
            if getattr(self, name) is not None:
                self._check_int(name, low)
        if self.cache_policy not in ("cost_aware", "lru"):
            raise InvalidParamsError("cache_policy", self.cache_policy, '"cost_aware" or "lru"')
        if self.disk_cache is not None and not isinstance(self.disk_cache, str | Path):
            raise InvalidParamsError("disk_cache", self.disk_cache, "the path of a folder, or None")
        if self.swap_space_bytes and self.device == "cpu":
            raise InvalidParamsError(
                "swap_space_bytes",
                self.swap_space_bytes,
                "0 on a CPU, whose KV pool is host memory already; raise kv_cache_bytes, or keep "
                "documents on disk with disk_cache",
            )
        if (self.swap_space_bytes or self.disk_cache) and not self.enable_prefix_caching:
            raise InvalidParamsError(
                "enable_prefix_caching",
                False,
                "True with swap_space_bytes or disk_cache, which keep cached prefixes",
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidParamsError(
                "gpu_memory_utilization", self.gpu_memory_utilization, "above 0, up to 1"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidParamsError("watermark", self.watermark, "0 <= watermark < 1")
        if not 0.0 <= self.multi_step_seconds < float("inf"):
            raise InvalidParamsError(
                "multi_step_seconds", self.multi_step_seconds, "seconds, at least 0"
            )
        if not 0.0 <= self.stream_interval < float("inf"):
            raise InvalidParamsError("stream_interval", self.stream_interval, "seconds, at least 0")
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

    @classmethod
    def for_device(cls, **knobs: Any) -> EngineConfig:
        """With the defaults of the device named among `knobs`.

        On a GPU: 128 sequences and 8192 tokens in a step.

        :raises InvalidParamsError: for a knob that does not exist, or a value outside its range.
        """
        known = cls.__dataclass_fields__
        for name, value in knobs.items():
            if name not in known:
                raise InvalidParamsError(name, value, f"known knobs are {', '.join(known)}")
        if not str(knobs.get("device", "cpu")).startswith("cuda"):
            return cls(**knobs)
        defaults = dict(_GPU_DEFAULTS)
        # A knob that is given moves the defaults that depend on it.
        budget = knobs.get("max_num_batched_tokens")
        if isinstance(budget, int):
            defaults["max_num_seqs"] = max(1, min(defaults["max_num_seqs"], budget))
        return cls(**{**defaults, **knobs})

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
