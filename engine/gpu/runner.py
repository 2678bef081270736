"""Plans to sampled tokens on a GPU, enqueued ahead of the device.

A step that only decodes is a CUDA graph in which the device feeds itself: it looks up each
sequence's token, position and blocks, runs the layers, samples, and moves the sequence on. The
host replays it as often as the plan has steps, and looks at the tokens when they have come back.
A step with prompts reads arrays that the host lays out; short ones are graphs too, long ones are
enqueued kernel by kernel.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragserve.kernels import KVLayer
from ragserve.kernels import triton as ops

from ..config import EngineConfig
from ..execution.sampler import InvalidLogitsError, Sampler
from ..execution.sampler_inputs import prompt_targets, sampling_state
from ..models.decoder import DecoderModel
from ..offload.tiers import BlockIO
from ..outputs import TokenLogprob
from ..scheduling.plan import ScheduledChunk, StepPlan, StepResult
from ..scheduling.request import Request
from .batch import BatchLayout, BatchTensors, PackedBatch, pack_batch
from .cascade import Cascade
from .decoder import GPUDecoder, Residual
from .graphs import DecodeStep, StepGraphs, batch_sizes, mixed_layouts
from .memory import release_memory, tensor_bytes
from .seats import Seats, samples_on_host
from .stream import DeviceStream, Staging

__all__ = ["GPURunner"]

_MAX_DECODE_STEPS = 32
_STAGING_SIZE = 1 << 18
_WARM_UP_TOKENS = (1, 2, 3, 8, 32, 128, 512, 2048)
"""Sizes of steps that are run once before any request: cuBLAS has kernels for each range."""
_MIXED_SECONDS = 0.040
"""How long a step with prompts may take while streams wait for their next token."""
_GRAPH_SECONDS = 0.016
"""A step that takes longer keeps the GPU busy while the host starts its kernels one by one."""
_TOKENS_MULTIPLE = 256
"""Tokens of a tile of the large products."""
_INVALID = -2
"""What the device's sampler gives for logits that nothing can be chosen from."""


class GPURunner:
    """Runs plans over a model on the device. Used by one thread at a time.

    :param model: its weights, on the device.
    :param config: `max_num_seqs`, `max_num_batched_tokens`, `block_size` and `enforce_eager` count.
    :ivar block_io: moves blocks to host memory and back; None if there is no tier below the pool.
    :ivar cascade: which decode steps read what sequences share once for all.
    :ivar num_bytes: memory of its buffers, without weights and KV.
    :ivar num_mixed_tokens: tokens of a step that takes 40 ms, measured by `prepare`.
    """

    depth = 2
    max_decode_steps = _MAX_DECODE_STEPS

    def __init__(self, model: DecoderModel, stream: DeviceStream, config: EngineConfig) -> None:
        shape, device, max_num_seqs = model.config, stream.device, config.max_num_seqs
        self._stream = stream
        self.pools: list[KVLayer] = []
        self.block_io: BlockIO | None = None
        self._block_size = config.block_size
        self._max_len = model.max_model_len
        self._most_singles = max_num_seqs
        self.num_mixed_tokens = config.max_num_batched_tokens
        self.decoder = GPUDecoder(
            model,
            max_tokens=config.max_num_batched_tokens,
            max_logits=max_num_seqs,
            block_size=config.block_size,
        )
        self._workspace = ops.sampler_workspace(
            max_num_seqs, shape.vocab_size, max_num_seqs, _MAX_DECODE_STEPS, device
        )
        self._staging = Staging(stream, size=_STAGING_SIZE)
        self._seats = Seats(
            max_num_seqs,
            # Every segment starts a block: of one token each, a sequence has as many.
            model.max_model_len,
            self._workspace,
            self._staging,
            device,
        )
        self._attention = ops.decode_workspace(
            max_num_seqs,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            num_sms=stream.num_processors,
            device=device,
        )
        self._prefill = ops.prefill_config(
            shape.head_dim, model.dtype, shared_memory=stream.shared_memory
        )
        # What a decode step reads and writes, always at the same place.
        self._rows = torch.full((max_num_seqs,), max_num_seqs, dtype=torch.int32, device=device)
        self._positions, self._seq_lens, self._block_counts = torch.zeros(
            (3, max_num_seqs), dtype=torch.int32, device=device
        )
        self._kv_slots = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self._known_rows: list[int] = []
        self._cuts: dict[int, tuple[ops.DecodeConfig, int]] = {}
        self._results = [
            stream.host_buffer(self._workspace.out_tokens.numel()) for _ in range(self.depth + 1)
        ]
        self._num_launched = 0
        self._sampler = Sampler(shape.vocab_size)
        self._group = shape.num_heads // shape.num_kv_heads
        self._sizes = batch_sizes(max_num_seqs)
        self.cascade = Cascade(
            shape, model.dtype, self._sizes, config.block_size, stream, self._staging
        )
        self.layouts: list[BatchLayout] = []
        self._inputs: dict[BatchLayout, Tensor] = {}
        """Where the graph of a layout reads its arrays."""
        self._graphs = StepGraphs(stream)
        self._use_graphs = stream.is_cuda and not config.enforce_eager
        self.num_bytes = sum(
            tensor_bytes(part)
            for part in (
                self.decoder,
                self._workspace,
                self._seats.state,
                self._staging,
                self._attention,
                self.cascade.workspace,
                self.cascade.workspace.partials,
            )
        )

    @staticmethod
    def samples_on_host(request: Request) -> bool:
        """See `Runner.samples_on_host`."""
        return samples_on_host(request)

    def close(self) -> None:
        """Wait for the device, then drop everything that is on it."""
        stream = self._stream
        if self.block_io is not None:
            self.block_io.close()
        stream.synchronize()
        self._graphs.clear()
        # Whatever still refers to this object must not keep the device's memory.
        self.__dict__.clear()
        release_memory(stream.device)

    @torch.inference_mode()
    def prepare(self, pools: list[KVLayer]) -> None:
        """Take the KV memory; compile and load all that a request may need, and record graphs.

        :param pools: of each layer.
        """
        self.pools = pools
        if not self._stream.is_cuda:
            return  # nothing is compiled for a CPU
        with self._stream.current():
            self._seats.set_step(0)
            self._seats.flush()
            self._measure_prompts()
            for step in self._decode_steps():
                self._run_decode(step)
            if self._use_graphs:
                self._capture()
            self._stream.synchronize()

    def _measure_prompts(self) -> None:
        """Run steps with prompts of all lengths, and time the longest."""
        most = len(self.decoder.hidden)
        started = 0.0
        for num_tokens in (*(size for size in _WARM_UP_TOKENS if size < most), most, most):
            prompts = min(num_tokens, 2) - 1
            for samples in (min(1 + prompts, self._most_singles), 1):
                layout = BatchLayout(
                    singles=1,
                    tokens=num_tokens,
                    sequences=1 + prompts,
                    tiles=prompts,
                    samples=samples,
                )
                started = time.monotonic()
                self._run_batch(layout.view(self._upload(self._pack([], layout))), layout)
                self._stream.synchronize()
        per_token = (time.monotonic() - started) / most
        tokens = int(_MIXED_SECONDS / per_token) // _TOKENS_MULTIPLE * _TOKENS_MULTIPLE
        self.num_mixed_tokens = min(most, max(tokens, _TOKENS_MULTIPLE))
        self._num_graph_tokens = min(most - self._most_singles, int(_GRAPH_SECONDS / per_token))

    def _capture(self) -> None:
        layouts = mixed_layouts(
            self._most_singles,
            self._num_graph_tokens,
            group=self._group,
            block_m=self._prefill.block_m,
        )
        steps: dict[Hashable, Callable[[], None]] = {}
        for layout in reversed(layouts):
            upload = self._upload(self._pack([], layout))
            self._inputs[layout] = upload.clone()
            views = layout.view(self._inputs[layout])
            self._run_batch(views, layout)
            steps[layout] = partial(self._run_batch, views, layout)
        for step in self._decode_steps():
            steps[step] = partial(self._run_decode, step)
        self._graphs.capture(steps)
        self.layouts = layouts

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See `Runner.launch`."""
        with self._stream.current():
            self._seats.release(plan.released)
            if all(chunk.decode and not chunk.request.samples_on_host for chunk in plan.chunks):
                return self._launch_decode(plan)
            return self._launch_mixed(plan)

    # -- decode steps -----------------------------------------------------------------------

    def _launch_decode(self, plan: StepPlan) -> Callable[[], StepResult]:
        seats = self._seats
        rows = [seats.seat(chunk.request) for chunk in plan.chunks]
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        seats.set_step(-1)
        seats.flush()
        padded = rows + [seats.num_seats] * (size - len(rows))
        if padded != self._known_rows:
            self._rows[:size].copy_(self._staging.upload(np.array(padded, dtype=np.int32)))
            self._known_rows = padded
        step = DecodeStep(size, self.cascade.choose(plan.chunks, rows, size, seats))
        for _ in range(plan.num_steps):
            if step in self._graphs:
                self._graphs.replay(step)
            else:
                self._run_decode(step)
        return self._collect(plan, list(range(len(rows))), plan.num_steps)

    def _decode_steps(self) -> list[DecodeStep]:
        """All that there are, the largest first."""
        steps = [DecodeStep(size, cascade=False) for size in self._sizes]
        steps += [DecodeStep(size, cascade=True) for size in self.cascade.sizes]
        return sorted(steps, reverse=True)

    def _run_decode(self, step: DecodeStep) -> None:
        """One step, all of it on the device."""
        size = step.size
        decoder, state, rows = self.decoder, self._seats.state, self._rows[:size]
        seq_lens, block_counts = self._seq_lens[:size], self._block_counts[:size]
        ops.prepare_decode(
            state,
            rows,
            decoder.model.embedding,
            block_size=self._block_size,
            positions=self._positions[:size],
            kv_slots=self._kv_slots[:size],
            seq_lens=seq_lens,
            block_counts=block_counts,
            hidden=decoder.hidden[:size],
        )

        def attend(layer: int, query: Tensor, out: Tensor) -> None:
            self._attend_singles(
                layer, query, out, rows, seq_lens, block_counts, cascade=step.cascade
            )

        residual = decoder.forward(
            size, self._positions[:size], self._kv_slots[:size], self.pools, attend
        )
        self._sample(decoder.compute_logits(residual), rows, seq_lens)

    def _attend_singles(
        self,
        layer: int,
        query: Tensor,
        out: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        block_counts: Tensor,
        *,
        cascade: bool = False,
    ) -> None:
        shape, state = self.decoder.config, self._seats.state
        config, num_splits = self._cut(len(query))
        window, pool = shape.layer_windows[layer], self.pools[layer]
        shared = None
        if cascade and window is None:
            shared = self.cascade.attend(query, pool, state, shape.attention_scale)
        ops.paged_decode(
            query,
            pool,
            out,
            rows=rows,
            seq_lens=seq_lens,
            block_counts=block_counts,
            block_tables=state.block_tables,
            block_starts=state.block_starts,
            workspace=self._attention,
            num_splits=num_splits,
            scale=shape.attention_scale,
            window=window,
            shared=shared,
            config=config,
        )

    def _cut(self, num_rows: int) -> tuple[ops.DecodeConfig, int]:
        """How attention of so many single tokens is cut up; every layer asks."""
        if num_rows not in self._cuts:
            shape, num_sms = self.decoder.config, self._stream.num_processors
            heads = shape.num_kv_heads
            config = ops.decode_config(num_rows * heads, shape.head_dim, self.decoder.model.dtype)
            splits = ops.choose_splits(num_rows, heads, self._max_len, num_sms, config=config)
            self._cuts[num_rows] = config, splits
        return self._cuts[num_rows]

    # -- steps with prompts -----------------------------------------------------------------

    def _launch_mixed(self, plan: StepPlan) -> Callable[[], StepResult]:
        exact = BatchLayout.of(plan.chunks, group=self._group, block_m=self._prefill.block_m)
        layout, needs_host = exact, any(_needs_host(chunk) for chunk in plan.chunks)
        if not needs_host:
            layout = next((padded for padded in self.layouts if padded.holds(exact)), exact)
        batch = self._pack(plan.chunks, layout)
        self._seats.set_step(0)
        self._seats.flush()
        upload = self._upload(batch)
        result = StepResult([[] for _ in plan.chunks])
        if needs_host:
            self._run_with_host(layout.view(upload), plan, batch, result)
        elif layout in self._graphs:
            self._inputs[layout].copy_(upload)
            self._graphs.replay(layout)
        else:
            self._run_batch(layout.view(upload), layout)
        if not batch.sampled:
            return self._nothing_sampled(result)
        return self._collect(plan, batch.sampled, 1, result)

    def _pack(self, chunks: Sequence[ScheduledChunk], layout: BatchLayout) -> PackedBatch:
        return pack_batch(
            chunks,
            layout,
            self._seats,
            block_size=self._block_size,
            group=self._group,
            block_m=self._prefill.block_m,
        )

    def _upload(self, batch: PackedBatch) -> Tensor:
        return self._staging.upload(batch.upload)

    def _run_batch(self, views: BatchTensors, layout: BatchLayout) -> None:
        """A step that the device does by itself, from the embedding to the seats."""
        residual = self._forward(views, layout, views.sampled_tokens)
        logits = self.decoder.compute_logits(residual)
        self._sample(logits, views.sampled_seats, views.next_positions)

    def _run_with_host(
        self, views: BatchTensors, plan: StepPlan, batch: PackedBatch, result: StepResult
    ) -> None:
        """A step some of whose logits the host looks at."""
        residual = self._forward(views, batch.layout, None)
        self._prompt_logprobs(plan, batch, residual, result)
        logits = self.decoder.compute_logits(residual, views.sampled_tokens)
        self._sample_on_host(plan, batch, logits, result)
        self._sample(logits, views.sampled_seats, views.next_positions)

    def _forward(self, views: BatchTensors, layout: BatchLayout, rows: Tensor | None) -> Residual:
        decoder, state = self.decoder, self._seats.state
        shape, singles = decoder.config, layout.singles
        ops.embed_step(
            state.seats,
            views.token_ids,
            decoder.model.embedding,
            decoder.hidden[: layout.tokens],
        )

        def attend(layer: int, query: Tensor, out: Tensor) -> None:
            if singles:
                self._attend_singles(
                    layer,
                    query[:singles],
                    out[:singles],
                    views.rows[:singles],
                    views.seq_lens[:singles],
                    views.block_counts[:singles],
                )
            if layout.tiles:
                ops.paged_prefill(
                    query,
                    self.pools[layer],
                    out,
                    rows=views.rows,
                    query_starts=views.query_starts,
                    seq_lens=views.seq_lens,
                    tile_rows=views.tile_rows,
                    tile_queries=views.tile_queries,
                    tile_ends=views.tile_ends,
                    block_tables=state.block_tables,
                    block_starts=state.block_starts,
                    scale=shape.attention_scale,
                    window=shape.layer_windows[layer],
                    config=self._prefill,
                )

        return decoder.forward(
            layout.tokens, views.positions, views.kv_slots, self.pools, attend, rows
        )

    def _sample(self, logits: Tensor, rows: Tensor, next_positions: Tensor) -> None:
        state = self._seats.state
        ops.sample(
            logits,
            rows=rows,
            next_positions=next_positions,
            seats=state.seats,
            step=state.step,
            workspace=self._workspace,
        )

    # -- results ----------------------------------------------------------------------------

    def _collect(
        self,
        plan: StepPlan,
        chunks: list[int],
        num_steps: int,
        result: StepResult | None = None,
    ) -> Callable[[], StepResult]:
        """Have the sampled tokens sent to the host; say how to get at them.

        :param chunks: of each row of the sampler, the index of its chunk in the plan.
        """
        result = result or StepResult([[] for _ in plan.chunks])
        source = self._workspace.out_tokens[:num_steps]
        buffer = self._results[self._num_launched % len(self._results)]
        self._num_launched += 1
        tokens = buffer[: source.numel()].view(source.shape)
        tokens.copy_(source, non_blocking=True)
        logprobs = self._collect_logprobs(plan, chunks, num_steps)
        mark = self._stream.mark()

        def wait() -> StepResult:
            mark.wait()
            columns = tokens.numpy()[:, : len(chunks)].T.tolist()
            for row, (index, column) in enumerate(zip(chunks, columns, strict=True)):
                self._take(plan, result, index, row, column)
            if logprobs is not None:
                _add_logprobs(plan, chunks, result, *(part.numpy() for part in logprobs))
            return result

        return wait

    @staticmethod
    def _take(plan: StepPlan, result: StepResult, index: int, row: int, column: list[int]) -> None:
        chunk = plan.chunks[index]
        if index in result.errors or result.sampled[index]:
            return  # the host's
        column = column[: chunk.num_samples]
        if column and column[-1] < 0:
            end = next(i for i, token in enumerate(column) if token < 0)
            if column[end] == _INVALID:
                result.errors[index] = InvalidLogitsError([row])
            column = column[:end]
        result.sampled[index] = column

    def _nothing_sampled(self, result: StepResult) -> Callable[[], StepResult]:
        mark = self._stream.mark()

        def wait() -> StepResult:
            mark.wait()
            return result

        return wait

    def _collect_logprobs(
        self, plan: StepPlan, chunks: list[int], num_steps: int
    ) -> tuple[Tensor, Tensor] | None:
        if all(plan.chunks[index].request.params.logprobs is None for index in chunks):
            return None
        parts = []
        for table in (self._workspace.out_logprobs, self._workspace.out_ids):
            source = table[:num_steps]
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._stream.is_cuda)
            parts.append(host.copy_(source, non_blocking=True))
        return parts[0], parts[1]

    # -- what the host samples itself ---------------------------------------------------------

    def _sample_on_host(
        self, plan: StepPlan, batch: PackedBatch, logits: Tensor, result: StepResult
    ) -> None:
        """Sample for requests whose parameters the device does not know; waits for the logits."""
        for row, index in enumerate(batch.sampled):
            request = plan.chunks[index].request
            if not request.samples_on_host:
                continue
            try:
                (token,) = self._sampler(logits[row : row + 1].float(), [sampling_state(request)])
            except InvalidLogitsError:
                result.errors[index] = InvalidLogitsError([row])
                continue
            result.sampled[index] = [token.token_id]
            if token.logprob is not None:
                result.logprobs[index] = [token.logprob]

    def _prompt_logprobs(
        self, plan: StepPlan, batch: PackedBatch, residual: Residual, result: StepResult
    ) -> None:
        """Log-probabilities of prompt tokens, where asked for; waits for the logits."""
        for index, last in zip(batch.order, batch.last_tokens, strict=True):
            chunk = plan.chunks[index]
            request, start = chunk.request, last + 1 - chunk.num_tokens
            targets = prompt_targets(chunk)
            if not targets:
                continue
            size = len(self.decoder.logits)
            values: list[TokenLogprob] = []
            try:
                for first in range(0, len(targets), size):
                    part = targets[first : first + size]
                    rows = np.arange(start + first, start + first + len(part), dtype=np.int32)
                    logits = self.decoder.compute_logits(residual, self._staging.upload(rows))
                    values += self._sampler.prompt_logprobs(
                        logits.float(), part, request.params.prompt_logprobs or 0
                    )
            except InvalidLogitsError as error:
                result.errors[index] = error
                continue
            result.prompt_logprobs[index] = values


def _needs_host(chunk: ScheduledChunk) -> bool:
    """Whether the host has to look at the logits of a step."""
    return chunk.request.samples_on_host or bool(prompt_targets(chunk))


def _add_logprobs(
    plan: StepPlan,
    chunks: list[int],
    result: StepResult,
    logprobs: NDArray[np.float32],
    ids: NDArray[np.int32],
) -> None:
    """The log-probabilities of the sampled tokens, from what the device wrote.

    :param logprobs: [steps, rows, 1 + n]: of the token, then of the likeliest n.
    :param ids: [steps, rows, 1 + n]: the token's rank, then the likeliest n.
    """
    for row, index in enumerate(chunks):
        width = plan.chunks[index].request.params.logprobs
        if width is None or index in result.logprobs:
            continue
        values = []
        for step, token in enumerate(result.sampled[index]):
            numbers, names = logprobs[step, row].tolist(), ids[step, row].tolist()
            top = [pair for pair in zip(names[1:], numbers[1:], strict=True) if pair[0] >= 0]
            values.append(TokenLogprob(token, numbers[0], names[0], tuple(top[:width])))
        result.logprobs[index] = values
