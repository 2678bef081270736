"""A scripted model, to drive the whole engine without weights: given tokens, times, failures.

    from ragserve import Engine
    from ragserve.testing import ScriptedModel

    async with Engine.open(ScriptedModel("Paris.")) as engine:
        print((await engine.generate("What is the capital of France?")).text)

Everything but the arithmetic is real: scheduling, blocks, prefix cache, streaming, cancelling.
The model even keeps a KV pool, of token ids, and reads each sequence back from its blocks before
it answers, so a block that is lost, mixed up or shared wrongly changes the text or raises.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .engine import LoadedModel, SampledToken, StepPlan, StepResult, Tokenizer

if TYPE_CHECKING:
    from .engine import EngineConfig, ScheduledChunk

__all__ = ["ScriptedFailure", "ScriptedModel", "byte_tokenizer"]

EOS = 256
"""Token id that ends an answer; ids below are bytes."""
BOS = 257

Reply = Callable[[list[int]], int]
"""The tokens of a sequence so far -> its next token."""


class ScriptedFailure(Exception):
    """What `fail_at_step` raises."""


class ScriptedModel:
    """A `ModelSource` whose answers, step times and failures are given.

    :param reply: the answer, as text or token ids, the same to every prompt; or a function from
        all the tokens so far to the next token; what it raises fails that one request. An
        answer is followed by EOS.
    :param step_seconds: how long a step takes.
    :param fail_at_step: the step, from 0, that raises `ScriptedFailure`.
    :param on_step: called in the engine's thread with each plan, before it is computed; may wait
        or raise.
    :param num_blocks: size of the KV pool.
    :param max_model_len: most tokens of prompt and answer.
    """

    def __init__(
        self,
        reply: str | Sequence[int] | Reply = "Hello.",
        *,
        step_seconds: float = 0.0,
        fail_at_step: int | None = None,
        on_step: Callable[[StepPlan], None] | None = None,
        num_blocks: int = 512,
        max_model_len: int = 4096,
    ) -> None:
        self._script: Sequence[int] | Reply = (
            list(reply.encode()) if isinstance(reply, str) else reply
        )
        self._step_seconds = step_seconds
        self._fail_at_step = fail_at_step
        self._on_step = on_step
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self.plans: list[list[tuple[str, int, int]]] = []
        """What was computed: for each step, (request id, start, number of tokens) of its chunks."""
        self.closed = False

    def load(self, config: EngineConfig) -> LoadedModel:
        """See `ModelSource.load`."""
        self._block_size = config.block_size
        self._kv: list[list[int | None]] = [
            [None] * config.block_size for _ in range(self._num_blocks)
        ]
        return LoadedModel(
            name="scripted",
            runner=self,
            tokenizer=Tokenizer.from_fast(byte_tokenizer(), config.num_tokenizers),
            vocab_size=BOS + 1,
            max_model_len=config.max_model_len or self._max_model_len,
            num_blocks=self._num_blocks,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`."""
        step = len(self.plans)
        self.plans.append([(c.request.request_id, c.start, c.num_tokens) for c in plan.chunks])
        if self._on_step is not None:
            self._on_step(plan)
        if self._step_seconds:
            time.sleep(self._step_seconds)
        if step == self._fail_at_step:
            raise ScriptedFailure(f"step {step} was told to fail")
        for chunk in plan.chunks:
            self._store(chunk)
        result = StepResult([None] * len(plan.chunks))
        for index, chunk in enumerate(plan.chunks):
            if not chunk.sample:
                continue
            tokens = self._read(chunk)
            try:
                result.sampled[index] = SampledToken(self._next(chunk, tokens))
            except Exception as error:
                result.errors[index] = error  # as a real model does with logits of one sequence
        return result

    def close(self) -> None:
        """See `Runner.close`."""
        self.closed = True
        self._kv = []

    def _store(self, chunk: ScheduledChunk) -> None:
        request, layout = chunk.request, chunk.request.layout
        for position, token in enumerate(request.tokens(chunk.start, chunk.end), chunk.start):
            index = layout.block_of(position)
            self._kv[request.blocks[index]][position - layout.start(index)] = token

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        request, layout = chunk.request, chunk.request.layout
        read: list[int | None] = []
        for index in range(layout.num_blocks(chunk.end)):
            filled = min(layout.start(index + 1), chunk.end) - layout.start(index)
            read.extend(self._kv[request.blocks[index]][:filled])
        tokens = request.tokens(0, chunk.end)
        if read != tokens:
            raise RuntimeError(f"{request!r}: its blocks hold {read}, and it is {tokens}")
        return tokens

    def _next(self, chunk: ScheduledChunk, tokens: list[int]) -> int:
        if callable(self._script):
            return self._script(tokens)
        done = len(chunk.request.output_token_ids)
        return self._script[done] if done < len(self._script) else EOS


@functools.cache
def byte_tokenizer() -> Any:
    """A fast tokenizer of bytes: 0 to 255, then EOS and BOS; with a plain chat template."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # The byte-level alphabet of GPT-2: printable bytes stand for themselves.
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|begin|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        bos_token="<|begin|>",
        chat_template=(
            "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
        ),
    )
