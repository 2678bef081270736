"""The operations for CPU in C: native.c, loaded with ctypes, on torch's own pool of threads.

The library is built with the package where there is a C compiler and is found beside this
module. Where it is missing `load` says why, and torch's operations do the same work, slower.
The environment variable `RAGSERVE_NATIVE` switches it off (`0`), or to a lower instruction set
than the processor's best (one of `LEVELS`).

Memory that only this library understands: a layer's *pool* of keys and values (`allocate_pool`)
and a `PackedWeight`. Everything else is plain contiguous tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..paging import PagedBatch
from ..sharing import SharedRun

__all__ = [
    "LEVELS",
    "NativeAttention",
    "NativeDecoder",
    "NativeLayer",
    "NativeOps",
    "NativeUnavailableError",
    "PackedWeight",
    "library_path",
    "load",
]

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16")
"""Instruction sets, from the one that every processor has."""

_TILE = 16
_PANEL = 48
_MAX_GROUPED = 48
_MAX_HEAD_DIM = 256
_SPLIT = 32


class NativeUnavailableError(RuntimeError):
    """The library is not there, is switched off or cannot be loaded; the message says which."""


class _Machine(ctypes.Structure):
    _fields_: ClassVar = [("fork", c_void_p), ("level", c_int32)]


class _Sequences(ctypes.Structure):
    _fields_: ClassVar = [
        ("count", c_int64),
        ("max_blocks", c_int64),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("grouped", c_int64),
        ("query_starts", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("block_starts", c_void_p),
        ("num_runs", c_int64),
        ("run_rows", c_void_p),
        ("run_starts", c_void_p),
        ("run_ends", c_void_p),
    ]


class _Plan(ctypes.Structure):
    _fields_: ClassVar = [
        ("tiles", c_void_p),
        ("items", c_void_p),
        ("tokens", c_void_p),
        ("queries", c_void_p),
        ("unfinished", c_void_p),
        ("first_tiles", c_void_p),
        ("cells", c_void_p),
        ("parts", c_void_p),
        ("num_items", c_int64),
        ("num_parts", c_int64),
    ]


class _Attention(ctypes.Structure):
    _fields_: ClassVar = [
        ("next", c_int64),
        ("done", c_int64),
        ("total", c_int64),
        ("tiles", c_void_p),
        ("items", c_void_p),
        ("tokens", c_void_p),
        ("queries", c_void_p),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("tiles_per_block", c_int32),
        ("scale", c_float),
        ("window", c_int32),
        ("longest", c_int32),
        ("partial", c_void_p),
        ("unfinished", c_void_p),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("output", c_void_p),
        ("pool", c_void_p),
    ]


_LAYER_POINTERS = (
    "attention_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "output",
    "output_bias",
    "mlp_norm",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
    "pool",
)


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [*((name, c_void_p) for name in _LAYER_POINTERS), ("window", c_int64)]


class _Step(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_tokens", c_int64),
        ("hidden_size", c_int64),
        ("inner_size", c_int64),
        ("block_size", c_int64),
        ("angle_stride", c_int64),
        ("eps", c_float),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("hidden", c_void_p),
        ("delta", c_void_p),
        ("normed", c_void_p),
        ("joined", c_void_p),
        ("query", c_void_p),
        ("inner", c_void_p),
    ]


_V, _I, _L, _F = c_void_p, c_int32, c_int64, c_float
_SIGNATURES: dict[str, list[Any]] = {
    "plan_attention": [_V, _V],
    "attend": [_V, _L, _I, _V],
    "rope_and_store": [_V, _L, _I, _L, _I, _I, _I, _I, _V, _V, _V, _L, _V, _V, _F, _V, _V, _V],
    "rms_norm": [_V, _L, _I, _L, _L, _V, _V, _V, _F, _V, _V],
    "silu_and_mul": [_V, _L, _I, _L, _L, _V, _V],
    "linear": [_V, _L, _I, _L, _L, _L, _V, _L, _V, _V, _V, _I],
    "pack_weight": [_I, _L, _L, _V, _V],
    "unpack_rows": [_I, _L, _L, _V, _V, _V],
    "forward": [_V, _L, _I, _V, _V, _L, _V, _V, _V],
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's weight in the order in which it is read.

    :param data: one dimension: `out_features` rounded up to 48, times `in_features`.
    """

    data: Tensor
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """A decoder layer's weights, and its pool of keys and values.

    :param qkv: queries, keys and values joined; `gate_up` likewise.
    :param window: attend to this many positions at most; None: to all.
    """

    attention_norm: Tensor
    qkv: PackedWeight
    output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    pool: Tensor
    window: int | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class NativeAttention:
    """Attention of one step over pools that hold its keys and values already. Made once a step,
    called once a layer; see `NativeOps.plan_attention`."""

    def __init__(
        self,
        ops: NativeOps,
        dtype: torch.dtype,
        batch: PagedBatch,
        plan: Callable[[Sequence[SharedRun]], tuple[_Attention, list[Tensor]]],
    ) -> None:
        self._ops = ops
        self._bf16 = dtype is torch.bfloat16
        self._plan = plan
        self._longest = max(batch.seq_lens)
        # With each job, what its addresses point to.
        self._job = plan(batch.shared_runs)
        self._windowed = None if batch.shared_runs else self._job

    def job(self, window: int | None = None) -> _Attention:
        """The plan for layers with this window: shared runs are for those that see all of it."""
        if window is None or window >= self._longest:
            return self._job[0]
        if self._windowed is None:
            self._windowed = self._plan(())
        return self._windowed[0]

    def __call__(self, query: Tensor, pool: Tensor, *, window: int | None = None) -> Tensor:
        """Attention output, `[T, num_heads, head_dim]`.

        :param query: `[T, num_heads, head_dim]`; tokens may be strided.
        :param window: attend to this many positions at most, the own one included.
        """
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype)
        job = self.job(window)
        job.query, job.query_stride = query.data_ptr(), query.stride(0)
        job.output, job.pool = output.data_ptr(), pool.data_ptr()
        job.window = _NO_WINDOW if window is None else window
        self._ops.attend(self._bf16, job)
        return output


_NO_WINDOW = 2**31 - 1


class NativeOps:
    """The library's operations, on contiguous float32 and bfloat16 tensors.

    Each call uses as many threads as torch would in the calling thread.

    :param path: the library.
    :param level: the instruction set; None takes the processor's best.
    :raises NativeUnavailableError: if it cannot be loaded, or the processor lacks the level.
    """

    def __init__(self, path: Path, *, level: str | None = None) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            for name, types in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, None
            self._library.best_level.restype = c_int32
            self._library.program_bytes.argtypes = [c_int64]
            self._library.program_bytes.restype = c_int64
        except (OSError, AttributeError) as error:
            raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from error
        best = int(self._library.best_level())
        if level is not None and level not in LEVELS[: best + 1]:
            raise NativeUnavailableError(
                f"the instruction set {level!r} is not one of this processor's: "
                f"{', '.join(LEVELS[: best + 1])}"
            )
        chosen = best if level is None else LEVELS.index(level)
        self.level = LEVELS[chosen]
        fork = _find_fork()
        self.threaded = fork is not None
        self._machine = _Machine(fork, chosen)
        self._address = ctypes.addressof(self._machine)

    def __repr__(self) -> str:
        threads = "torch's threads" if self.threaded else "one thread"
        return f"<NativeOps [{self.level}, {threads}]>"

    @staticmethod
    def refusal(
        *,
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        sizes: Sequence[int] = (),
    ) -> str | None:
        """Why a model of these shapes cannot use the library; None if it can.

        :param sizes: inner dimensions of its products: hidden size, inner size of the MLP.
        """
        if dtype not in (torch.float32, torch.bfloat16):
            return f"{dtype} is neither float32 nor bfloat16"
        if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
            return f"head_dim={head_dim} is not an even number up to {_MAX_HEAD_DIM}"
        if num_heads % num_kv_heads or num_heads // num_kv_heads > _MAX_GROUPED:
            return (
                f"{num_heads} heads on {num_kv_heads} KV heads are not whole groups of "
                f"{_MAX_GROUPED} at most"
            )
        if dtype == torch.bfloat16 and any(size % 2 for size in sizes):
            return f"not all of {list(sizes)} are even"
        return None

    # ---- the pool ----

    @staticmethod
    def pool_shape(
        num_blocks: int, *, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[int, int, int, int]:
        """Blocks, KV heads, tiles of 16 tokens, elements of a tile: `16 * 2 * head_dim`, with
        the values' head_dim rounded up to 16. A block size that is no multiple of 16 wastes the
        rest of its last tile."""
        width = -(-head_dim // 16) * 16
        return num_blocks, num_kv_heads, -(-block_size // _TILE), _TILE * (head_dim + width)

    @staticmethod
    def allocate_pool(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a pool: touched when first written, given back to the system when freed, in
        huge pages where the system has them (attention reads it all over)."""
        count = 1
        for size in shape:
            count *= size
        size = max(count * dtype.itemsize, mmap.PAGESIZE)
        if os.name == "posix":
            # Private: a forked child must not write into it; and only so is it in huge pages.
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            buffer = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: ordinary pages do
                buffer.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(tuple(shape))

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        pool: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Norm (if there are weights) and rotate queries and keys, store keys and values.

        :param qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`.
        :param cos: `[T, head_dim / 2]` in the dtype of `qkv`, rows may be strided; `sin` likewise.
        :param slots: `[T]` int64, block * block_size + offset.
        :param pool: changed.
        :returns: queries, `[T, num_heads, head_dim]`.
        """
        num_tokens = qkv.shape[0]
        head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype)
        self._library.rope_and_store(
            self._address,
            torch.get_num_threads(),
            qkv.dtype is torch.bfloat16,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            _address(q_norm),
            _address(k_norm),
            eps,
            slots.data_ptr(),
            query.data_ptr(),
            pool.data_ptr(),
        )
        return query

    # ---- attention ----

    def plan_attention(
        self,
        batch: PagedBatch,
        *,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
    ) -> NativeAttention:
        """Lay out the work of a step's attention: once a step, for all layers.

        :param scale: factor of the scores, usually 1 / sqrt(head_dim).
        """

        def plan(runs: Sequence[SharedRun]) -> tuple[_Attention, list[Tensor]]:
            return self._plan_attention(
                batch, runs, block_size, num_heads, num_kv_heads, head_dim, scale
            )

        return NativeAttention(self, dtype, batch, plan)

    def _plan_attention(
        self,
        batch: PagedBatch,
        runs: Sequence[SharedRun],
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
    ) -> tuple[_Attention, list[Tensor]]:
        """The job of a layer, and the memory that it refers to."""
        tables, starts = batch.block_tables.contiguous(), batch.block_starts.contiguous()
        num_sequences, max_blocks = tables.shape
        num_tokens = batch.query_starts[-1]
        run_rows = torch.tensor([row for run in runs for row in run.rows], dtype=torch.int64)
        sizes = itertools.accumulate((len(run.rows) for run in runs), initial=0)
        run_starts = torch.tensor(list(sizes))
        run_ends = torch.tensor([run.last for run in runs], dtype=torch.int64)
        query_starts = torch.tensor(batch.query_starts)
        seq_lens = torch.tensor(batch.seq_lens)
        sequences = _Sequences(
            count=num_sequences,
            max_blocks=max_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            grouped=num_heads // num_kv_heads,
            query_starts=query_starts.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
            block_starts=starts.data_ptr(),
            num_runs=len(runs),
            run_rows=run_rows.data_ptr(),
            run_starts=run_starts.data_ptr(),
            run_ends=run_ends.data_ptr(),
        )
        tiles_per_block = -(-block_size // _TILE)
        most_tiles = num_sequences * max_blocks * tiles_per_block
        # A sequence, and a run for each of its rows, may begin and end within a split.
        most_items = num_tokens + 2 * num_sequences + most_tiles // _SPLIT
        for run in runs:
            pieces = (run.last - run.first) * tiles_per_block // _SPLIT + 2
            most_items += len(run.rows) * pieces
        tiles = torch.empty(most_tiles, 3, dtype=torch.int32)
        items = torch.empty(most_items, 8, dtype=torch.int32)
        tokens = torch.empty(num_tokens + len(run_rows), dtype=torch.int32)
        queries = torch.empty(num_tokens, 2, dtype=torch.int32)
        unfinished = torch.empty(num_tokens * num_kv_heads, dtype=torch.int32)
        room = torch.empty(3, num_sequences + 1, dtype=torch.int64)
        plan = _Plan(
            tiles=tiles.data_ptr(),
            items=items.data_ptr(),
            tokens=tokens.data_ptr(),
            queries=queries.data_ptr(),
            unfinished=unfinished.data_ptr(),
            first_tiles=room[0].data_ptr(),
            cells=room[1].data_ptr(),
            parts=room[2].data_ptr(),
        )
        self._library.plan_attention(ctypes.addressof(sequences), ctypes.addressof(plan))
        width = -(-head_dim // 16) * 16
        record = num_heads // num_kv_heads * (width + 2) + 1
        partial = torch.empty(plan.num_parts * num_kv_heads * record + _TILE)
        job = _Attention(
            tiles=tiles.data_ptr(),
            items=items.data_ptr(),
            tokens=tokens.data_ptr(),
            queries=queries.data_ptr(),
            total=plan.num_items * num_kv_heads,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tiles_per_block=tiles_per_block,
            scale=scale,
            window=_NO_WINDOW,
            longest=max(batch.seq_lens),
            partial=partial.data_ptr(),
            unfinished=unfinished.data_ptr(),
        )
        return job, [tiles, items, tokens, queries, partial, unfinished]

    def attend(self, bf16: int, job: _Attention) -> None:
        """Run one layer of a plan; `NativeAttention` calls it."""
        self._library.attend(self._address, torch.get_num_threads(), bf16, ctypes.addressof(job))

    def forward(
        self,
        bf16: int,
        step: _Step,
        layers: Any,
        job: _Attention,
        windowed: _Attention,
        room: Tensor,
    ) -> None:
        """Run a decoder's step; `NativeDecoder` calls it."""
        self._library.forward(
            self._address,
            torch.get_num_threads(),
            bf16,
            ctypes.addressof(step),
            ctypes.addressof(layers),
            len(layers),
            ctypes.addressof(job),
            ctypes.addressof(windowed),
            room.data_ptr(),
        )

    def program_bytes(self, num_layers: int) -> int:
        """Memory that `forward` needs for what it tells the threads."""
        return int(self._library.program_bytes(num_layers))

    # ---- row by row ----

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `ragserve.kernels.rms_norm`; `x` contiguous."""
        output = torch.empty_like(x)
        self._norm(x, None, weight, eps, output)
        return output

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` in place, and return the sum's norm."""
        output = torch.empty_like(hidden)
        self._norm(hidden, delta, weight, eps, output)
        return output

    def _norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, output: Tensor
    ) -> None:
        size = x.shape[-1]
        self._library.rms_norm(
            self._address,
            torch.get_num_threads(),
            x.dtype is torch.bfloat16,
            x.numel() // size,
            size,
            x.data_ptr(),
            _address(delta),
            weight.data_ptr(),
            eps,
            x.data_ptr(),
            output.data_ptr(),
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `ragserve.kernels.silu_and_mul`; `gate_up` contiguous."""
        size = gate_up.shape[-1] // 2
        output = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
        self._library.silu_and_mul(
            self._address,
            torch.get_num_threads(),
            gate_up.dtype is torch.bfloat16,
            output.numel() // size,
            size,
            gate_up.data_ptr(),
            output.data_ptr(),
        )
        return output

    # ---- linear layers ----

    def pack(self, weight: Tensor) -> PackedWeight:
        """A copy of a weight `[out_features, in_features]` in the order in which it is read.

        :raises ValueError: if it is bfloat16 and `in_features` is odd.
        """
        out_features, in_features = weight.shape
        if weight.dtype is torch.bfloat16 and in_features % 2:
            raise ValueError(f"in_features={in_features} is odd; bfloat16 goes in pairs")
        rows = -(-out_features // _PANEL) * _PANEL
        weight = weight.contiguous()
        data = self.allocate_pool((rows * in_features,), weight.dtype)
        self._library.pack_weight(
            weight.dtype is torch.bfloat16,
            in_features,
            out_features,
            weight.data_ptr(),
            data.data_ptr(),
        )
        return PackedWeight(data, out_features, in_features)

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`x W^T + b` of `[M, in_features]`, summed in float32.

        :param dtype: of the result: that of `x` (None), or float32, not rounded in between.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        dtype = x.dtype if dtype is None else dtype
        output = torch.empty(rows, weight.out_features, dtype=dtype)
        self._library.linear(
            self._address,
            torch.get_num_threads(),
            x.dtype is torch.bfloat16,
            rows,
            weight.in_features,
            weight.out_features,
            x.data_ptr(),
            x.stride(0),
            weight.data.data_ptr(),
            _address(bias),
            output.data_ptr(),
            dtype is torch.float32,
        )
        return output

    def embedding(self, token_ids: Tensor, weight: PackedWeight) -> Tensor:
        """Rows of a packed weight: so a tied embedding needs no second copy.

        :param token_ids: `[T]` int64.
        """
        output = torch.empty(len(token_ids), weight.in_features, dtype=weight.data.dtype)
        self._library.unpack_rows(
            output.dtype is torch.bfloat16,
            weight.in_features,
            len(token_ids),
            token_ids.data_ptr(),
            weight.data.data_ptr(),
            output.data_ptr(),
        )
        return output


class NativeDecoder:
    """The layers of a decoder and its last norm, a step of them in one call. Used by one thread.

    :param norm: weight of the last norm.
    :param block_size: slots per block of the layers' pools.
    """

    def __init__(
        self,
        ops: NativeOps,
        layers: Sequence[NativeLayer],
        *,
        norm: Tensor,
        block_size: int,
        eps: float,
    ) -> None:
        first = layers[0]
        self._ops = ops
        self._dtype = norm.dtype
        self._kept = list(layers), norm  # what the addresses below point to
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        windows = [layer.window for layer in layers if layer.window is not None]
        self._window = min(windows, default=None)
        inner_size, q_size = first.down.in_features, first.output.in_features
        self._widths = {
            "delta": len(norm),
            "joined": max(first.qkv.out_features, first.gate_up.out_features),
            "query": q_size,
            "inner": max(q_size, inner_size),
        }
        self._step = _Step(
            hidden_size=len(norm),
            inner_size=inner_size,
            block_size=block_size,
            eps=eps,
            norm=norm.data_ptr(),
        )
        self._program = torch.empty(ops.program_bytes(len(layers)), dtype=torch.uint8)
        self._room: dict[str, Tensor] = {}

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, attention: NativeAttention
    ) -> Tensor:
        """Hidden states after the last norm, `[T, hidden_size]`.

        :param hidden: `[T, hidden_size]` contiguous, the embedded tokens; changed.
        :param cos: `[T, head_dim / 2]`, rows may be strided; `sin` likewise.
        :param slots: `[T]` int64, block * block_size + offset.
        :param attention: the step's plan.
        """
        step, num_tokens = self._step, len(hidden)
        normed = torch.empty_like(hidden)
        step.num_tokens, step.angle_stride = num_tokens, cos.stride(0)
        step.slots, step.cos, step.sin = slots.data_ptr(), cos.data_ptr(), sin.data_ptr()
        step.hidden, step.normed = hidden.data_ptr(), normed.data_ptr()
        for name, width in self._widths.items():
            room = self._room.get(name)
            # Kept for the next step: fresh memory would cost page faults every time.
            if room is None or room.numel() < num_tokens * width:
                room = self._room[name] = torch.empty(num_tokens * width, dtype=self._dtype)
            setattr(step, name, room.data_ptr())
        self._ops.forward(
            self._dtype is torch.bfloat16,
            step,
            self._layers,
            attention.job(),
            attention.job(self._window),
            self._program,
        )
        return normed


def _layer(layer: NativeLayer) -> _Layer:
    result = _Layer(window=_NO_WINDOW if layer.window is None else layer.window)
    for name in _LAYER_POINTERS:
        value = getattr(layer, name)
        setattr(result, name, _address(value.data if isinstance(value, PackedWeight) else value))
    return result


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def load() -> NativeOps:
    """The library, loaded once.

    :raises NativeUnavailableError: if it is switched off, was not built or cannot be loaded.
    """
    choice = os.environ.get("RAGSERVE_NATIVE", "")
    if choice == "0":
        raise NativeUnavailableError("switched off by RAGSERVE_NATIVE=0")
    if choice not in ("", "1", *LEVELS):
        raise NativeUnavailableError(
            f"RAGSERVE_NATIVE={choice!r} is none of 0, 1, {', '.join(LEVELS)}"
        )
    return NativeOps(library_path(), level=choice if choice in LEVELS else None)


def library_path() -> Path:
    """Where the library that was built with the package is; `RAGSERVE_NATIVE_LIBRARY` names
    another one, such as a build with a sanitizer.

    :raises NativeUnavailableError: if there is none.
    """
    if other := os.environ.get("RAGSERVE_NATIVE_LIBRARY"):
        return Path(other)
    names = [f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    for name in names:
        path = Path(__file__).with_name(name)
        if path.exists():
            return path
    raise NativeUnavailableError(
        f"not built: {Path(__file__).parent} has no {names[0]}; install the package where there "
        "is a C compiler"
    )


def _find_fork() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch uses: that runtime's pool of
    threads is then ours too. None where there is none: everything runs on the calling thread."""
    mode: int | None = getattr(os, "RTLD_NOLOAD", None)
    folder = Path(torch.__file__).parent / "lib"
    found = sorted(folder.glob("libgomp*")) + sorted(folder.glob("lib*omp5*"))
    libraries: list[ctypes.CDLL] = []
    for path in found:
        if mode is None:
            break
        try:
            libraries.append(ctypes.CDLL(str(path), mode=mode | os.RTLD_NOW))
        except OSError:
            continue  # bundled and not the one in use
    if os.name == "posix":
        libraries.append(ctypes.CDLL(None))  # a system's torch shares the system's runtime
    for library in libraries:
        try:
            return ctypes.cast(library.GOMP_parallel, c_void_p).value
        except AttributeError:
            continue
    return None
