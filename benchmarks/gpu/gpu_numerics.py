"""What the GPU benchmark's stage `numerics` compares: one model's answers alone, in a batch, from a
warm prefix cache, in bfloat16 and in float32.

The model is trained here for some seconds, on bytes of English, because its answers have to be sure
ones, as a real model's are; those of random weights hang by a hair. Its weights are saved in
bfloat16, so that both dtypes compute with the same numbers.
"""

from __future__ import annotations

import asyncio
import pydoc_data.topics
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_stages import Bench, word_tokenizer

from ragserve import Engine, SamplingParams

__all__ = ["Answer", "compare", "measure"]

VOCAB = 384
"""Bytes, and ids that never come up."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model, its training, and what it is asked."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    steps: int = 400
    rows: int = 32
    """Sequences of a step of training."""
    length: int = 256
    prompts: int = 64
    shortest: int = 100
    longest: int = 400
    output: int = 64
    kv_bytes: int = 512 << 20


TINY = Size(
    hidden=64,
    layers=2,
    steps=2,
    rows=2,
    length=32,
    prompts=4,
    shortest=20,
    longest=40,
    output=6,
    kv_bytes=8 << 20,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Chosen tokens, and their log-probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


async def measure(bench: Bench) -> None:
    """Train, ask in every way, and emit a record for each pair of ways."""
    size = TINY if bench.tiny else Size()
    text = "\n".join(pydoc_data.topics.topics.values()).encode()[:400_000]
    rng = np.random.default_rng(0)
    lengths = rng.integers(size.shortest, size.longest + 1, size=size.prompts).tolist()
    places = rng.integers(0, len(text) - size.longest, size=size.prompts).tolist()
    prompts = [list(text[at : at + n]) for at, n in zip(places, lengths, strict=True)]
    ways: dict[str, dict[str, list[Answer]]] = {}
    cached = {}
    with tempfile.TemporaryDirectory() as name:
        loss = train(Path(name), text, size, bench.device)
        for dtype in ("bfloat16", "float32"):
            ways[dtype], cached[dtype] = await ask(bench, Path(name), dtype, prompts, size)
    pairs = [
        (f"{dtype}, {first} / {second}", ways[dtype][first], ways[dtype][second], hits)
        for dtype in ways
        for first, second, hits in (
            ("alone", "at once", 0),
            ("at once", "at once from a warm cache", cached[dtype]),
        )
    ]
    pairs.append(
        ("alone, bfloat16 / float32", ways["bfloat16"]["alone"], ways["float32"]["alone"], 0)
    )
    for pair, ours, theirs, hits in pairs:
        bench.emit(
            "numerics",
            pair=pair,
            loss=loss,
            cached_tokens=hits,
            prompt_tokens=sum(lengths),
            **compare(ours, theirs),
        )


def train(folder: Path, text: bytes, size: Size, device: str) -> float:
    """Make a model that continues `text`, save it into `folder`, and give its last loss."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    ids = torch.tensor(list(text), device=device)
    window = torch.arange(size.length, device=device)
    for _ in range(size.steps):
        starts = torch.randint(0, len(ids) - size.length, (size.rows, 1), device=device)
        batch = ids[starts + window]
        with torch.autocast(device, torch.bfloat16):
            loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = float(loss.item())
    model.to(torch.bfloat16).save_pretrained(folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    del model, optimizer, loss, ids
    if device == "cuda":
        torch.cuda.empty_cache()
    return last


async def ask(
    bench: Bench, folder: Path, dtype: str, prompts: Sequence[list[int]], size: Size
) -> tuple[dict[str, list[Answer]], int]:
    """Answers to all prompts by the way they were asked, and prompt tokens that the warm cache
    gave."""
    knobs: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "kv_cache_bytes": size.kv_bytes,
        "seed": 0,
        **bench.knobs,
        "dtype": dtype,
        "enable_prefix_caching": True,
    }
    params = SamplingParams.greedy(
        max_tokens=size.output, logprobs=0, ignore_eos=True, detokenize=False
    )
    ways: dict[str, list[Answer]] = {"alone": []}
    async with Engine.open(folder, device=bench.device, **knobs) as engine:

        async def one(prompt: list[int]) -> Answer:
            choice = (await engine.generate(prompt, params)).choices[0]
            return Answer(choice.token_ids, tuple(t.logprob for t in choice.logprobs or ()))

        for prompt in prompts:
            await engine.reset_prefix_cache()
            ways["alone"].append(await one(prompt))
        await engine.reset_prefix_cache()
        ways["at once"] = await asyncio.gather(*map(one, prompts))
        before = engine.statistics().prefix_hit_tokens
        ways["at once from a warm cache"] = await asyncio.gather(*map(one, prompts))
        return ways, engine.statistics().prefix_hit_tokens - before


def compare(ours: Sequence[Answer], theirs: Sequence[Answer]) -> dict[str, Any]:
    """How two ways of asking differ.

    Behind the first token that differs an answer goes on from another text, so that token is the
    last one that is compared, and log-probabilities are compared before it.
    """
    differ = tokens = 0
    apart: list[float] = []
    for mine, other in zip(ours, theirs, strict=True):
        same = 0
        for ours_chose, theirs_chose in zip(mine.tokens, other.tokens, strict=True):
            if ours_chose != theirs_chose:
                differ += 1
                tokens += 1
                break
            same += 1
        tokens += same
        both = zip(mine.logprobs[:same], other.logprobs[:same], strict=True)
        apart += [abs(x - y) for x, y in both]
    return {
        "answers": len(ours),
        "answers_differ": differ,
        "tokens": tokens,
        "flip_share": differ / max(1, tokens),
        "logprob_apart_p50": statistics.median(apart) if apart else None,
        "logprob_apart_max": max(apart, default=None),
    }
