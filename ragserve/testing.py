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

from .engine import LoadedModel, StepPlan, StepResult, Tokenizer

if TYPE_CHECKING:
    from .engine import EngineConfig, Request

__all__ = ["ScriptedFailure", "ScriptedModel", "byte_tokenizer"]

EOS = 256
"""Token id that ends an answer; ids below are bytes."""
BOS = 257

Reply = Callable[[list[int]], int]
"""The tokens of a sequence so far -> its next token."""


class ScriptedFailure(Exception):
    """What `fail_at_step` raises."""


class _Seat:
    """What the device knows of a sequence: all its tokens, whether or not the host does."""

    def __init__(self, request: Request) -> None:
        self.token_ids = request.tokens(0, request.num_tokens)
        self.decodes = self.stopped = False


class ScriptedModel:
    """A `ModelSource` whose answers, step times and failures are given.

    Like a device that computes by itself it can have several plans under way, and several steps in
    each; the tokens in flight are its own then, and are not read from the host.

    :param reply: the answer, as text or token ids, the same to every prompt; or a function from
        all the tokens so far to the next token; what it raises fails that one request. An
        answer is followed by EOS.
    :param step_seconds: how long a step takes.
    :param fail_at_step: the plan, from 0, whose result is `ScriptedFailure`.
    :param on_step: called in the engine's thread with each plan, when it is launched; may wait
        or raise.
    :param depth: plans that may be under way at once.
    :param max_decode_steps: most decode steps in a plan.
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
        depth: int = 1,
        max_decode_steps: int = 1,
        num_blocks: int = 512,
        max_model_len: int = 4096,
    ) -> None:
        self._script: Sequence[int] | Reply = (
            list(reply.encode()) if isinstance(reply, str) else reply
        )
        self._step_seconds = step_seconds
        self._fail_at_step = fail_at_step
        self._on_step = on_step
        self.depth = depth
        self.max_decode_steps = max_decode_steps
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self.plans: list[list[tuple[str, int, int]]] = []
        """What was computed: for each plan, (request id, start, number of tokens) of its chunks."""
        self.closed = False

    def load(self, config: EngineConfig) -> LoadedModel:
        """See `ModelSource.load`."""
        self._num_seats = config.max_num_seqs
        self._seats: dict[Request, _Seat] = {}
        self._ready = 0.0
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

    def samples_on_host(self, request: Request) -> bool:
        """See `Runner.samples_on_host`."""
        return False

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See `Runner.launch`. Computes now, which nobody can tell from doing so in order later."""
        number = len(self.plans)
        self.plans.append([(c.request.request_id, c.start, c.num_tokens) for c in plan.chunks])
        if self._on_step is not None:
            self._on_step(plan)
        # What is launched after a failure is not computed either.
        fails = self._fail_at_step is not None and number >= self._fail_at_step
        result = None if fails else self._compute(plan)
        self._ready = max(self._ready, time.monotonic()) + plan.num_steps * self._step_seconds
        ready = self._ready

        def wait() -> StepResult:
            if self._step_seconds:
                time.sleep(max(0.0, ready - time.monotonic()))
            if result is None:
                raise ScriptedFailure(f"step {number} was told to fail")
            return result

        return wait

    def close(self) -> None:
        """See `Runner.close`."""
        self.closed = True
        self._kv = []
        self._seats = {}

    def _compute(self, plan: StepPlan) -> StepResult:
        for request in plan.released:
            self._seats.pop(request, None)
        for chunk in plan.chunks:
            if chunk.request not in self._seats:
                self._seats[chunk.request] = _Seat(chunk.request)
            seat = self._seats[chunk.request]
            if chunk.decode != seat.decodes:
                raise RuntimeError(f"{chunk} and its seat disagree whether it decodes")
            seat.decodes = chunk.sample
        if len(self._seats) > self._num_seats:
            raise RuntimeError(f"{len(self._seats)} sequences in {self._num_seats} seats")
        result = StepResult([()] * len(plan.chunks))
        for step in range(plan.num_steps):
            # What this step computes: (index, request, start, end). A stopped sequence is idle.
            rows = [
                (index, c.request, c.start + step, c.start + step + 1 if c.decode else c.end)
                for index, c in enumerate(plan.chunks)
                if step < max(1, c.num_samples) and not self._seats[c.request].stopped
            ]
            # All is stored before anything is read, as in every layer of a model.
            for _, request, start, end in rows:
                self._store(request, start, end)
            for index, request, _, end in rows:
                if plan.chunks[index].sample:
                    self._sample(request, end, index, result)
        return result

    def _sample(self, request: Request, end: int, index: int, result: StepResult) -> None:
        seat = self._seats[request]
        tokens = self._read(request, end)
        try:
            token_id = self._next(request, tokens)
        except Exception as error:
            result.errors[index] = error  # as a real model does with logits of one sequence
            seat.stopped = True
            return
        seat.token_ids.append(token_id)
        result.sampled[index] = (*result.sampled[index], token_id)
        count = len(seat.token_ids) - request.num_prompt_tokens
        seat.stopped = token_id in request.stop_token_ids and count >= request.params.min_tokens

    def _store(self, request: Request, start: int, end: int) -> None:
        layout, tokens = request.layout, self._seats[request].token_ids
        for position in range(start, end):
            index = layout.block_of(position)
            self._kv[request.blocks[index]][position - layout.start(index)] = tokens[position]

    def _read(self, request: Request, end: int) -> list[int]:
        layout = request.layout
        read: list[int | None] = []
        for index in range(layout.num_blocks(end)):
            filled = min(layout.start(index + 1), end) - layout.start(index)
            read.extend(self._kv[request.blocks[index]][:filled])
        tokens = self._seats[request].token_ids
        if read != tokens:
            raise RuntimeError(f"{request!r}: its blocks hold {read}, and it is {tokens}")
        return list(tokens)

    def _next(self, request: Request, token_ids: list[int]) -> int:
        if callable(self._script):
            return self._script(token_ids)
        done = len(token_ids) - request.num_prompt_tokens
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
