"""Cascade attention in Triton against the float32 oracle: in Triton's interpreter, or on a GPU.

The interpreter multiplies bfloat16 matrices wrongly, so it runs float32 and float16.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Answer, EngineRig, make_prompt
from torch import Tensor

from ragserve import kernels
from ragserve.engine import SamplingParams
from ragserve.engine.cache.block_pool import BlockPool
from ragserve.engine.config import EngineConfig
from ragserve.engine.cpu.backend import make_backend
from ragserve.engine.runtime.core import EngineCore
from ragserve.kernels import SharedRun, shared_runs

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
if not (ON_GPU or INTERPRETED):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from ragserve.engine.cpu.runner import ModelRunner  # noqa: E402
from ragserve.engine.gpu import build_gpu  # noqa: E402
from ragserve.engine.models.load import load_model  # noqa: E402
from ragserve.kernels.triton import attention, cascade  # noqa: E402

pytestmark = pytest.mark.triton

DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [*TOLERANCE] if ON_GPU else [torch.float32, torch.float16]

# Small tiles, so that small cases have many of them; the second has tiles larger than a block.
CONFIGS = [
    cascade.CascadeConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, split_tokens=16),
    cascade.CascadeConfig(block_m=32, block_n=64, num_warps=4, num_stages=2, split_tokens=64),
]
DECODE = [
    attention.DecodeConfig(block_n=16, num_warps=2, num_stages=2, split_tokens=16, fused=True),
    attention.DecodeConfig(block_n=32, num_warps=4, num_stages=3, split_tokens=32, fused=False),
]


@dataclass(frozen=True)
class Node:
    """A stretch of blocks, by the tokens in each, and what follows: other stretches, or own
    blocks of sequences (of each the tokens in its blocks)."""

    filled: tuple[int, ...] = ()
    children: tuple[Node, ...] = ()
    own: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Case:
    """Decoding sequences over a pool whose unwritten slots are NaN."""

    query: Tensor
    cache: kernels.KVLayer
    tables: list[list[int]]
    starts: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [starts[-1] for starts in self.starts]

    def runs(self, **limits: int) -> list[SharedRun]:
        return shared_runs(self.tables, [len(table) - 1 for table in self.tables], **limits)

    def expected(self, soft_cap: float | None = None) -> Tensor:
        width = max(map(len, self.tables))
        count = len(self.tables)
        batch = kernels.PagedBatch(
            query_starts=list(range(count + 1)),
            seq_lens=self.lengths,
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in self.tables]),
            block_starts=torch.tensor([s + s[-1:] * (width + 1 - len(s)) for s in self.starts]),
            slots=torch.empty(0, dtype=torch.int64),
            positions=torch.tensor(self.lengths) - 1,
        )
        return kernels.reference.paged_attention(
            self.query, self.cache, batch, scale=self.scale, soft_cap=soft_cap
        )

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def run(
        self,
        runs: Sequence[SharedRun],
        *,
        config: cascade.CascadeConfig = CONFIGS[0],
        decode: attention.DecodeConfig = DECODE[0],
        num_splits: int = 2,
        programs: int = 3,
        soft_cap: float | None = None,
        padding: int = 0,
        stopped: Sequence[int] = (),
    ) -> Tensor:
        """The kernels, on tables whose rows are shuffled and whose unused entries are wild.

        :param padding: rows of the batch that belong to nobody.
        :param stopped: rows that have length 0, though they are in the runs.
        """
        count = len(self.tables)
        block_size = self.cache.keys.shape[2]
        num_heads, head_dim = self.query.shape[1:]
        num_kv_heads = self.cache.keys.shape[1]
        width = max(map(len, self.tables))
        seats = list(range(count, 0, -1))
        tables = np.full((count + 2, width), 1 << 30, dtype=np.int32)
        starts = np.full((count + 2, width + 1), 1 << 30, dtype=np.int32)
        for seat, table, begins in zip(seats, self.tables, self.starts, strict=True):
            tables[seat, : len(table)] = table
            starts[seat, : len(begins)] = begins
            starts[seat, len(table)] += block_size  # where the next block will start
        query = torch.full((count + padding, num_heads, head_dim), math.nan, device=DEVICE)
        query = query.to(self.query.dtype)
        query[:count] = self.query
        workspace = cascade.cascade_workspace(
            count + padding + 3, num_heads, head_dim, num_sms=8, device=DEVICE
        )
        plan = cascade.plan_cascade(
            runs,
            seats,
            starts,
            workspace,
            block_size=block_size,
            group=num_heads // num_kv_heads,
            programs=programs,
            config=config,
        )
        assert plan is not None
        workspace.plan.copy_(torch.from_numpy(plan))
        workspace.partials.outputs.fill_(math.nan)
        workspace.partials.logs.fill_(math.nan)
        lengths, counts = self.lengths, list(map(len, self.tables))
        for row in stopped:
            lengths[row] = counts[row] = 0
        out = torch.full_like(query, math.nan)
        own = attention.decode_workspace(
            count + padding, num_heads, num_kv_heads, head_dim, num_sms=64, device=DEVICE
        )
        cache = kernels.KVLayer(self.cache.keys.to(DEVICE), self.cache.values.to(DEVICE))
        common: dict[str, Any] = {
            "block_tables": _device(tables),
            "block_starts": _device(starts),
            "scale": self.scale,
            "soft_cap": soft_cap,
        }
        attention.paged_decode(
            query,
            cache,
            out,
            rows=_device(seats + [count + 1] * padding),
            seq_lens=_device(lengths + [0] * padding),
            block_counts=_device(counts + [0] * padding),
            workspace=own,
            num_splits=num_splits,
            shared=cascade.paged_shared(
                query, cache, workspace=workspace, programs=programs, config=config, **common
            ),
            config=decode,
            **common,
        )
        assert not own.arrivals.any()
        assert not out[count:].any()
        return out[:count].cpu().float()

    def check(self, runs: Sequence[SharedRun] | None = None, **options: Any) -> None:
        runs = self.runs() if runs is None else runs
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(
            self.run(runs, **options),
            self.expected(options.get("soft_cap")),
            rtol=tolerance,
            atol=tolerance,
        )


def _device(values: Any) -> Tensor:
    """An int32 tensor that is not aligned to 16 bytes, as a piece of a larger buffer."""
    values = torch.as_tensor(values)
    buffer = torch.zeros(values.numel() + 1, dtype=torch.int32, device=DEVICE)
    buffer[1:] = values.to(DEVICE).flatten()
    return buffer[1:].view(values.shape)


def make_case(
    root: Node,
    *,
    num_kv_heads: int = 1,
    group: int = 3,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Fill a pool with the tree's blocks, scattered; a sequence for each `own`, in random order."""
    leaves: list[tuple[list[int], list[int]]] = []
    filled: list[int] = []

    def extend(path: tuple[list[int], list[int]], stretch: Sequence[int]) -> Any:
        table, starts = path
        blocks = range(len(filled), len(filled) + len(stretch))
        filled.extend(stretch)
        ends = starts[-1] + np.cumsum(stretch, dtype=int)
        return table + list(blocks), starts + ends.tolist()

    def visit(node: Node, path: tuple[list[int], list[int]]) -> None:
        path = extend(path, node.filled)
        for child in node.children:
            visit(child, path)
        leaves.extend(extend(path, own) for own in node.own)

    visit(root, ([], [0]))
    shuffle = random.Random(seed)
    shuffle.shuffle(leaves)
    numbers = list(range(len(filled) + 2))
    shuffle.shuffle(numbers)
    generator = torch.Generator().manual_seed(seed)
    shape = (len(numbers), num_kv_heads, block_size, head_dim)
    cache = kernels.KVLayer(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(2)))
    for block, number in enumerate(numbers):
        count = filled[block] if block < len(filled) else 0
        cache.keys[number, :, count:] = cache.values[number, :, count:] = math.nan
    query = torch.randn(len(leaves), num_kv_heads * group, head_dim, generator=generator)
    return Case(
        query.to(dtype),
        cache,
        [[numbers[block] for block in table] for table, _ in leaves],
        [starts for _, starts in leaves],
    )


LEVELS = Node(
    (16, 16, 5),
    (
        Node((16, 16, 16, 16, 1), (Node((3,), own=((4,), (16, 9))),), own=((7,),)),
        Node((9, 16), own=((1,), (16, 16, 2))),
    ),
    own=((11,),),
)
"""A system prompt, documents that some hold, one of them with another behind; holes throughout."""


@st.composite
def trees(draw: st.DrawFn, block_size: int, depth: int = 2) -> Node:
    sizes = st.one_of(st.just(block_size), st.integers(1, block_size))
    stretch = st.lists(sizes, min_size=1, max_size=4).map(tuple)
    children = draw(st.lists(trees(block_size, depth - 1), max_size=2)) if depth else []
    own = draw(st.lists(stretch, min_size=0 if children else 1, max_size=2))
    return Node(draw(st.one_of(st.just(()), stretch)), tuple(children), tuple(own))


@given(
    data=st.data(),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 7)]),
    head_dim=st.sampled_from([16, 24]),
    block_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from(DTYPES),
    soft_cap=st.sampled_from([None, None, 2.0]),
    min_blocks=st.integers(1, 3),
    num_splits=st.integers(1, 3),
    programs=st.integers(1, 8),
    config=st.sampled_from(CONFIGS),
    decode=st.sampled_from(DECODE),
    seed=st.integers(0, 1 << 30),
)
# Each example of a GPU waits for a compiler.
@settings(deadline=None, max_examples=4)
def test_any_tree_matches_the_oracle(
    data: st.DataObject,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    soft_cap: float | None,
    min_blocks: int,
    num_splits: int,
    programs: int,
    config: cascade.CascadeConfig,
    decode: attention.DecodeConfig,
    seed: int,
) -> None:
    case = make_case(
        data.draw(trees(block_size)),
        num_kv_heads=heads[0],
        group=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    case.check(
        case.runs(min_blocks=min_blocks),
        soft_cap=soft_cap,
        num_splits=num_splits,
        programs=programs,
        config=config,
        decode=decode,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_runs_behind_runs(config: cascade.CascadeConfig, dtype: torch.dtype) -> None:
    case = make_case(LEVELS, dtype=dtype)
    assert {len(run.rows) for run in case.runs()} == {2, 3, 6}
    case.check(config=config, decode=DECODE[CONFIGS.index(config)], programs=20)


def test_without_runs_it_is_the_plain_kernel() -> None:
    case = make_case(LEVELS)
    torch.testing.assert_close(case.run([]), case.expected(), rtol=2e-5, atol=2e-5)


def test_rows_without_a_run_are_not_touched_by_others() -> None:
    case = make_case(Node((16, 16), own=((3,), (9, 4), (16,), (1,))))
    some = SharedRun((1, 3), 0, 1)
    case.check([some])
    assert torch.equal(case.run([some])[::2], case.run([])[::2])


def test_padding_and_stopped_rows_give_zeros() -> None:
    case = make_case(LEVELS)
    expected = case.expected()
    stopped = [0, 4]
    output = case.run(case.runs(), padding=3, stopped=stopped)
    assert not output[stopped].any()
    keep = [row for row in range(len(expected)) if row not in stopped]
    torch.testing.assert_close(output[keep], expected[keep], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [(128, 7, torch.float32), (80, 1, torch.float16), (256, 2, torch.float16)]
    + [(head_dim, 7, torch.bfloat16) for head_dim in (64, 80, 128, 256) if ON_GPU],
)
def test_head_sizes_with_the_default_configs(head_dim: int, group: int, dtype: torch.dtype) -> None:
    case = make_case(LEVELS, num_kv_heads=1, group=group, head_dim=head_dim, dtype=dtype)
    rows = len(case.tables) * group
    case.check(
        config=cascade.cascade_config(rows, head_dim, dtype),
        decode=attention.decode_config(len(case.tables), head_dim, dtype),
    )


@pytest.mark.skipif(not ON_GPU, reason="takes long when interpreted")
@pytest.mark.parametrize("count", [6, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_runs(dtype: torch.dtype, count: int) -> None:
    documents = [
        Node((16,) * 60 + (3,), own=((16, 5), (2,), (16,) * 20)) for _ in range(count // 6)
    ]
    root = Node((16,) * 100 + (9,), tuple(documents), own=((16,) * 9,) * (count // 2))
    case = make_case(root, num_kv_heads=4, group=7, head_dim=128, dtype=dtype)
    config = cascade.cascade_config(len(case.tables) * 7, 128, dtype)
    decode = attention.decode_config(len(case.tables) * 4, 128, dtype)
    for programs in (3, 66):
        case.check(config=config, decode=decode, programs=programs)


# -- the host's part ---------------------------------------------------------------------------


@given(
    data=st.data(),
    group=st.integers(1, 8),
    programs=st.integers(1, 80),
    config=st.sampled_from(
        [*CONFIGS, cascade.cascade_config(1 << 20, 128, torch.bfloat16)],
    ),
)
def test_items_cover_every_key_of_every_member_once(
    data: st.DataObject, group: int, programs: int, config: cascade.CascadeConfig
) -> None:
    case = make_case(data.draw(trees(16)), num_kv_heads=1, group=1, head_dim=1)
    runs = case.runs()
    count = len(case.tables)
    starts = np.zeros((count, max(map(len, case.starts))), dtype=np.int32)
    for row, begins in enumerate(case.starts):
        starts[row, : len(begins)] = begins
    workspace = cascade.cascade_workspace(count, group, 1, num_sms=4, device="cpu")
    plan = cascade.plan_cascade(
        runs,
        range(count),
        starts,
        workspace,
        block_size=16,
        group=group,
        programs=programs,
        config=config,
    )
    if plan is None:  # deeper than the workspace allows for
        assert sum(len(run.rows) for run in runs) > workspace.max_lines
        return
    workspace.plan.copy_(torch.from_numpy(plan))
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    lines = set()
    for item in workspace.items[: int(workspace.num_items)].tolist():
        seat, first, blocks, begin, whole, end, members, num_members, query, part = item
        assert begin <= whole <= end
        assert begin < end
        for slot in range(begin * config.block_n, whole * config.block_n):
            block = first + slot // 16
            assert block < first + blocks
            assert starts[seat, block + 1] - starts[seat, block] == 16
        for packed in range(query, min(query + config.block_m, num_members * group)):
            member = members + packed // group
            row = int(workspace.member_rows[member])
            assert case.tables[row][first : first + blocks] == case.tables[seat][first:][:blocks]
            line = int(workspace.member_lines[member]) + part
            own = int(workspace.partials.firsts[row])
            assert own <= line < own + int(workspace.partials.counts[row])
            assert (line, packed % group) not in lines
            lines.add((line, packed % group))
            covered.setdefault((row, packed % group), []).append(
                (
                    first * 16 + begin * config.block_n,
                    first * 16 + min(end * config.block_n, blocks * 16),
                )
            )
    for (row, _), parts in covered.items():
        parts.sort()
        assert parts[0][0] == 0
        assert all(one[1] == other[0] for one, other in pairwise(parts))
        assert parts[-1][1] == int(workspace.partials.block_counts[row]) * 16
    assert len(lines) == group * int(workspace.partials.counts.sum())
    sharing = {row for run in runs for row in run.rows}
    assert {row for row, _ in covered} == sharing
    for row in set(range(count)) - sharing:
        assert int(workspace.partials.block_counts[row]) == 0


def test_saved_tokens_are_those_not_read_again() -> None:
    case = make_case(Node((16, 4), (Node((16,), own=((1,), (2,))),), own=((3,), (9,), (9,))))
    starts = np.zeros((5, 5), dtype=np.int32)
    for row, begins in enumerate(case.starts):
        starts[row, : len(begins)] = begins
    assert cascade.saved_tokens(case.runs(), range(5), starts) == 4 * 20 + 16
    assert cascade.saved_tokens([], range(5), starts) == 0


def test_more_runs_than_there_is_room_for_are_refused() -> None:
    runs = [SharedRun((0, 1), first, first + 1) for first in range(20)]
    workspace = cascade.cascade_workspace(2, 128, 16, num_sms=1, device="cpu")
    starts = np.arange(0, 16 * 23, 16, dtype=np.int32)[None].repeat(2, 0)
    options: dict[str, Any] = {"block_size": 16, "group": 1, "programs": 9, "config": CONFIGS[0]}
    plan: Callable[..., Any] = cascade.plan_cascade
    assert plan(runs, [0, 1], starts, workspace, **options) is None
    assert plan(runs[:2], [0, 1], starts, workspace, **options) is not None


def test_work_is_cut_for_the_programs_there_are() -> None:
    """One long run on few rows: as many items as programs, and no more."""
    workspace = cascade.cascade_workspace(8, 28, 128, num_sms=132, device="cpu")
    starts = np.arange(0, 16 * 300, 16, dtype=np.int32)[None].repeat(8, 0)
    config = replace(CONFIGS[1], block_m=64)
    plan = cascade.plan_cascade(
        [SharedRun(tuple(range(8)), 0, 256)],
        range(8),
        starts,
        workspace,
        block_size=16,
        group=7,
        programs=33,
        config=config,
    )
    assert plan is not None
    assert 28 <= plan[0] <= 33


def test_a_window_and_shared_blocks_are_refused() -> None:
    query = torch.zeros(1, 2, 16, device=DEVICE)
    cache = kernels.KVLayer(*(torch.zeros(1, 1, 16, 16, device=DEVICE) for _ in range(2)))
    workspace = cascade.cascade_workspace(1, 2, 16, num_sms=1, device=DEVICE)
    with pytest.raises(ValueError, match="a window of 9 positions and shared"):
        attention.paged_decode(
            query,
            cache,
            torch.empty_like(query),
            rows=_device([0]),
            seq_lens=_device([1]),
            block_counts=_device([1]),
            block_tables=_device([[0]]),
            block_starts=_device([[0, 16]]),
            workspace=attention.decode_workspace(1, 2, 1, 16, num_sms=1, device=DEVICE),
            num_splits=1,
            scale=1.0,
            window=9,
            shared=workspace.partials,
        )


# -- in the engine -------------------------------------------------------------------------------


def make_rig(folder: Path, always: bool | None, *, on_cpu: bool = False) -> EngineRig:
    """An engine core over a tiny model, whose KV memory starts out as NaN.

    :param on_cpu: with the CPU's runner instead.
    """
    device = torch.device("cpu" if on_cpu else DEVICE)
    model = load_model(folder, dtype=torch.float32, device=device)
    shape, num_blocks = model.config, 40
    size = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4 * 16
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=96,
        watermark=0.0,
        multi_step_seconds=100.0,
        kv_cache_bytes=num_blocks * size,
    )
    runner: Any
    if on_cpu:
        backend = make_backend(model, None, num_blocks=num_blocks, block_size=16)
        runner = ModelRunner(backend, num_threads=1)
    else:
        runner, built, _ = build_gpu(model, config)
        assert built == num_blocks
        for pool in runner.pools:
            pool.keys.fill_(math.nan)
            pool.values.fill_(math.nan)
        runner.cascade.always = always
        runner.max_decode_steps = 3
    core = EngineCore(config, BlockPool(num_blocks), runner)
    return EngineRig(core, config, num_tokens=5)


def ask_about_documents(rig: EngineRig, stop: int | None = None) -> list[list[int]]:
    """Questions with a system prompt and one of two documents, with holes, more of them than there
    are seats.

    :param stop: a token that ends the fourth answer, so that the host hears of it late: the fifth
        takes its seat and row in the batch, with another document.
    """
    system, documents = make_prompt(18), [make_prompt(20, seed) for seed in (1, 2)]
    answers: list[Answer] = []
    for number, (document, max_tokens) in enumerate([(0, 12), (0, 11), (1, 12), (1, 9), (0, 3)]):
        question = make_prompt(2 + number, 3)
        params = SamplingParams.greedy(
            ignore_eos=True,
            max_tokens=max_tokens,
            stop_token_ids=[stop] if stop is not None and number == 3 else None,
        )
        tokens = system + documents[document] + question
        answers += rig.add(tokens, params, segments=(18, 20, 2 + number))
        if number in (0, 2):
            rig.step(answers)  # what the next ones share is in the cache when they come
    return rig.finish(answers)


def test_the_tokens_are_the_same_with_and_without(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=64)
    expected = ask_about_documents(make_rig(folder, None, on_cpu=True))
    stop = expected[3][2]
    expected[3] = expected[3][: expected[3].index(stop) + 1]
    # Without, the interpreter only repeats what tests/engine/gpu/test_gpu_runner.py has.
    for always in (True, False) if ON_GPU else (True,):
        rig = make_rig(folder, always)
        assert ask_about_documents(rig, stop) == expected
        assert (rig.core.runner.cascade.num_plans > 1) == always


def test_little_that_is_shared_is_read_as_before(tiny_model: Callable[..., Path]) -> None:
    rig = make_rig(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=64), None)
    params = SamplingParams.greedy(n=4, ignore_eos=True, max_tokens=2)
    rig.finish(rig.add(make_prompt(20), params))
    assert rig.core.runner.cascade.num_plans == 0


def test_a_window_in_every_layer_leaves_nothing_to_share(tiny_model: Callable[..., Path]) -> None:
    rig = make_rig(tiny_model("mistral", num_hidden_layers=1, max_position_embeddings=64), True)
    assert rig.core.runner.cascade.sizes == []
    rig.finish(rig.add(make_prompt(20), SamplingParams.greedy(n=4, max_tokens=2)))
    assert rig.core.runner.cascade.num_plans == 0
