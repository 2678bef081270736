"""What the GPU benchmark runs: model dimensions, workloads, floors, targets, figures of a run.

Prompts are random token ids from `numpy.random.default_rng(0)`, drawn in a fixed order, so that
two engines that are given one workload are given the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "DIMS",
    "WORKS",
    "BenchRequest",
    "Ceilings",
    "Goal",
    "Seen",
    "Work",
    "floor",
    "one_long",
    "rag",
    "shared_tokens",
    "summarize",
    "uniform",
    "varied",
    "write_config",
]

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}

DIMS: dict[str, dict[str, Any]] = {
    "7b": {
        **_QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "0.5b": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "0.6b": {
        **_QWEN2,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **_QWEN2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
}
"""Name -> Hugging Face config: Qwen2.5-7B's, Qwen2.5-0.5B's and Qwen3-0.6B's dimensions, and a
model for trying the benchmark itself."""

_IDS = (1000, 150_000)
_TINY_IDS = (2, 512)


def write_config(dims: str, folder: Path) -> Path:
    """Write a `config.json` of these dimensions into `folder`, and give the folder back."""
    (folder / "config.json").write_text(json.dumps(DIMS[dims]))
    return folder


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: a prompt in segments (system, documents, question), and how much to answer."""

    segments: tuple[tuple[int, ...], ...]
    output_tokens: int

    @property
    def prompt(self) -> list[int]:
        """All token ids."""
        return [token for segment in self.segments for token in segment]


# -- the workloads: each draws from its generator in the order in which it stands here ----------


def _tokens(rng: np.random.Generator, count: int, ids: tuple[int, int]) -> tuple[int, ...]:
    return tuple(rng.integers(*ids, size=count).tolist())


def uniform(
    count: int = 256,
    prompt: int = 1024,
    output: int = 256,
    *,
    ids: tuple[int, int] = _IDS,
    seed: int = 0,
) -> list[BenchRequest]:
    """Requests of one length that share nothing."""
    rng = np.random.default_rng(seed)
    return [BenchRequest((_tokens(rng, prompt, ids),), output) for _ in range(count)]


def rag(
    count: int = 256,
    system: int = 512,
    documents: int = 100,
    document: int = 512,
    chosen: int = 5,
    question: int = 32,
    output: int = 128,
    *,
    zipf: float = 1.1,
    ids: tuple[int, int] = _IDS,
) -> list[BenchRequest]:
    """A system prompt that all share, `chosen` of the `documents` by Zipf popularity and in the
    order of their numbers, and a question of one's own."""
    rng = np.random.default_rng(0)
    shared = _tokens(rng, system, ids)
    corpus = [_tokens(rng, document, ids) for _ in range(documents)]
    popularity = 1 / np.arange(1, documents + 1) ** zipf
    popularity /= popularity.sum()
    requests = []
    for _ in range(count):
        numbers = rng.choice(documents, size=chosen, replace=False, p=popularity)
        found = [corpus[number] for number in sorted(numbers.tolist())]
        requests.append(BenchRequest((shared, *found, _tokens(rng, question, ids)), output))
    return requests


def one_long(
    prompt: int = 3000, output: int = 300, *, ids: tuple[int, int] = _IDS
) -> list[BenchRequest]:
    """A single request."""
    return uniform(1, prompt, output, ids=ids)


def varied(
    count: int = 256, low: int = 100, high: int = 1024, *, ids: tuple[int, int] = _IDS
) -> list[BenchRequest]:
    """Requests whose prompts and answers are of any length between two, ends included."""
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(count):
        prompt = _tokens(rng, int(rng.integers(low, high + 1)), ids)
        requests.append(BenchRequest((prompt,), int(rng.integers(low, high + 1))))
    return requests


def shared_tokens(requests: Sequence[BenchRequest], block_size: int = 16) -> float:
    """Share of the prompt tokens that an unbounded cache of prefixes gives, one request after the
    other. A hit is of whole blocks, and leaves a token to compute."""
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}  # (its parent, a block) -> a prefix
    hits = total = 0
    for request in requests:
        prompt, node = request.prompt, 0
        total += len(prompt)
        for end in range(block_size, len(prompt), block_size):
            key = (node, tuple(prompt[end - block_size : end]))
            hits += block_size * (key in nodes)
            node = nodes.setdefault(key, len(nodes) + 1)
    return hits / total


# -- what is asked for ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that has a target."""

    metric: str
    """Key of `summarize`."""
    label: str
    target: float
    vllm: float
    """What vLLM 0.26 took on another machine of the same kind."""
    at_most: bool = False
    """Less is better."""

    def met(self, value: float) -> bool:
        """Whether a value reaches the target."""
        return value <= self.target if self.at_most else value >= self.target


@dataclass(frozen=True, slots=True)
class Work:
    """A workload at a model's dimensions."""

    name: str
    title: str
    dims: str
    build: Callable[..., list[BenchRequest]]
    tiny: dict[str, int]
    """Arguments of `build` for trying the benchmark."""
    goals: tuple[Goal, ...]
    knobs: dict[str, Any] = field(default_factory=dict)
    """Of the engine, on top of those all have."""
    concurrency: int | None = None
    """Clients in a closed loop; None submits all at once."""
    repeat: int | None = None
    """Runs, where the default will not do."""

    def requests(self, *, tiny: bool = False) -> list[BenchRequest]:
        """Its requests, the same every time."""
        return self.build(**self.tiny, ids=_TINY_IDS) if tiny else self.build()

    def warm_up(self, *, tiny: bool = False) -> list[BenchRequest]:
        """Requests that touch what these touch, and share no prefix with them."""
        if tiny:
            return uniform(2, 20, 4, ids=_TINY_IDS, seed=99)
        return uniform(24, 1024, 16, seed=99) + uniform(1, 1024, 32, seed=98)


_SMALL = {"count": 6, "prompt": 40, "output": 8}
_OFF = {"enable_prefix_caching": False}
_RAG = {
    "count": 8,
    "system": 16,
    "documents": 6,
    "document": 16,
    "chosen": 2,
    "question": 4,
    "output": 8,
}

WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        Work(
            "w1",
            "256 × (1024 in, 256 out) at once, 7B",
            "7b",
            uniform,
            _SMALL,
            (Goal("output_tok_s", "output tok/s", 7400, 7045),),
            _OFF,
        ),
        Work(
            "w3",
            "one request, 3000 in, 300 out, 7B",
            "7b",
            one_long,
            {"prompt": 60, "output": 12},
            (
                Goal("ttft_p50_ms", "TTFT ms", 63, 63.3, at_most=True),
                Goal("tpot_p50_ms", "TPOT ms", 4.2, 4.73, at_most=True),
            ),
            _OFF,
            repeat=3,
        ),
        Work(
            "w2-off",
            "RAG, prefix cache off, 7B",
            "7b",
            rag,
            _RAG,
            (Goal("output_tok_s", "output tok/s", 1450, 1404),),
            _OFF,
            concurrency=32,
        ),
        Work(
            "w2",
            "RAG, prefix cache on, 7B",
            "7b",
            rag,
            _RAG,
            (
                Goal("output_tok_s", "output tok/s", 2550, 2426),
                Goal("itl_p99_ms", "ITL p99 ms", 60, 157, at_most=True),
            ),
            {"enable_prefix_caching": True},
            concurrency=32,
        ),
        Work(
            "w1-small",
            "256 × (1024 in, 256 out) at once, 0.5B",
            "0.5b",
            uniform,
            _SMALL,
            (Goal("output_tok_s", "output tok/s", 40_000, 20_656),),
            _OFF,
        ),
        Work(
            "w3-small",
            "one request, 3000 in, 300 out, 0.5B",
            "0.5b",
            one_long,
            {"prompt": 60, "output": 12},
            (
                Goal("ttft_p50_ms", "TTFT ms", 10, 17.7, at_most=True),
                Goal("tpot_p50_ms", "TPOT ms", 0.75, 1.53, at_most=True),
            ),
            _OFF,
            repeat=3,
        ),
        Work(
            "w4",
            "256 requests, 100–1024 in and out, Qwen3-0.6B",
            "0.6b",
            varied,
            {"count": 6, "low": 5, "high": 30},
            (Goal("output_tok_s", "output tok/s", 28_000, 24_945),),
            {**_OFF, "max_num_seqs": 512, "max_num_batched_tokens": 16384},
        ),
    )
}
"""In the order that opens the fewest engines."""


# -- what the chip cannot beat --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of a chip; the defaults were measured on an H200."""

    read_bytes_s: float = 4.405e12
    flops_s: float = 785e12
    """Dense bfloat16 products."""


def floor(work: Work, ceilings: Ceilings) -> dict[str, float]:
    """The best figures that the chip's rates allow, by metric.

    Every prompt token that no cache gives is computed once; every decode step reads all weights
    once and each sequence's keys and values once; nothing overlaps. A roofline, so nothing
    real reaches it.
    """
    c = DIMS[work.dims]
    hidden, layers, heads = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"]
    kv_heads, head_dim = c["num_key_value_heads"], c.get("head_dim", hidden // heads)
    attention = 2 * (heads + kv_heads) * head_dim * hidden
    products = layers * (attention + 3 * hidden * c["intermediate_size"])
    last = c["vocab_size"] * hidden
    kv_bytes = 2 * 2 * layers * kv_heads * head_dim

    requests = work.requests()
    lengths = [(len(request.prompt), request.output_tokens) for request in requests]
    seats = min(work.concurrency or len(requests), work.knobs.get("max_num_seqs", 128))
    prompts, outputs = (sum(part) for part in zip(*lengths, strict=True))
    longest = max(output for _, output in lengths)
    steps = max(longest, -(-outputs // seats)) if seats < len(requests) else longest
    computed = 1.0
    if work.knobs.get("enable_prefix_caching"):
        computed -= shared_tokens(requests)

    causal = sum(2 * prompt**2 * heads * head_dim * layers for prompt, _ in lengths)
    prefill = computed * (2 * products * prompts + causal) / ceilings.flops_s
    read = kv_bytes * sum(output * prompt + output**2 / 2 for prompt, output in lengths)
    decode = max(
        (steps * 2 * (products + last) + read) / ceilings.read_bytes_s,
        2 * outputs * (products + last) / ceilings.flops_s,
    )
    figures = {"output_tok_s": outputs / (prefill + decode)}
    if len(requests) == 1:
        figures |= {"ttft_p50_ms": 1e3 * prefill, "tpot_p50_ms": 1e3 * decode / steps}
    return figures


# -- what was seen --------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What the consumer of one stream saw. Seconds of `time.perf_counter`."""

    submitted: float
    times: list[float] = field(default_factory=list)
    """When each delta came."""
    counts: list[int] = field(default_factory=list)
    """Tokens in each."""


def summarize(seen: Sequence[Seen], wall: float) -> dict[str, float]:
    """Reduce one run to its figures, in tokens per second and milliseconds.

    TTFT is from before submitting to the first delta; TPOT is, per request, the time from the
    first delta to the last over the tokens after the first delta; ITL is a gap between two
    deltas of one stream, however many tokens they carry.
    """
    tokens = sum(sum(one.counts) for one in seen)
    ttft = [one.times[0] - one.submitted for one in seen]
    tpot = [
        (one.times[-1] - one.times[0]) / (sum(one.counts) - one.counts[0])
        for one in seen
        if sum(one.counts) > one.counts[0]
    ]
    itl = [gap for one in seen for gap in np.diff(one.times).tolist()]

    def ms(values: list[float], percent: float) -> float:
        return 1e3 * float(np.percentile(values, percent)) if values else float("nan")

    return {
        "wall_s": wall,
        "output_tok_s": tokens / wall,
        "requests_s": len(seen) / wall,
        "ttft_p50_ms": ms(ttft, 50),
        "ttft_p90_ms": ms(ttft, 90),
        "ttft_p99_ms": ms(ttft, 99),
        "tpot_p50_ms": ms(tpot, 50),
        "tpot_p99_ms": ms(tpot, 99),
        "itl_p50_ms": ms(itl, 50),
        "itl_p99_ms": ms(itl, 99),
        "itl_max_ms": ms(itl, 100),
        "output_tokens": tokens,
        "deltas": sum(len(one.times) for one in seen),
    }
