"""What decoding sequences share is found, read once, and changes no answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

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
from ragserve.engine.cpu.backend import make_backend, native_operations
from ragserve.engine.cpu.runner import ModelRunner
from ragserve.engine.models.load import load_model
from ragserve.engine.runtime.core import EngineCore
from ragserve.kernels import PagedBatch, SharedRun, Sharing, shared_runs
from ragserve.kernels.cpu import native

pytestmark = pytest.mark.cpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
NAN = float("nan")

try:
    BEST: native.NativeOps | None = native.load()
except native.NativeUnavailableError:
    BEST = None

needs_library = pytest.mark.skipif(BEST is None, reason="the C kernels are off or not built")


def levels() -> list[native.NativeOps]:
    """The C kernels for every instruction set of this processor."""
    if BEST is None:
        return []
    names = native.LEVELS[: native.LEVELS.index(BEST.level) + 1]
    return [native.NativeOps(native.library_path(), level=name) for name in names]


# -- which blocks are shared -------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    """Tables that begin as others do; or of so few blocks that some agree by chance."""
    if draw(st.booleans()):
        return draw(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8))
    result: list[list[int]] = []
    fresh = itertools.count()
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([[], *result]))
        kept = parent[: draw(st.integers(0, len(parent)))]
        result.append(kept + [next(fresh) for _ in range(draw(st.integers(0, 9)))])
    return draw(st.permutations(result))


@given(
    tables=tables(),
    data=st.data(),
    min_rows=st.integers(2, 4),
    min_blocks=st.integers(1, 4),
    min_saved=st.integers(1, 9),
)
@settings(deadline=None, max_examples=150)
def test_runs_are_what_is_shared(
    tables: list[list[int]], data: st.DataObject, min_rows: int, min_blocks: int, min_saved: int
) -> None:
    shareable = [data.draw(st.integers(0, len(table))) for table in tables]
    runs = shared_runs(
        tables,
        shareable,
        min_rows=min_rows,
        min_blocks=min_blocks,
        min_saved_blocks=min_saved,
    )

    def common(a: int, b: int) -> int:
        pairs = zip(tables[a][: shareable[a]], tables[b][: shareable[b]], strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    covered = [0] * len(tables)
    for run in runs:
        assert list(run.rows) == sorted(set(run.rows))
        assert len(run.rows) >= min_rows
        assert run.last - run.first >= min_blocks
        assert (run.last - run.first) * (len(run.rows) - 1) >= min_saved
        first = run.rows[0]
        # Whoever holds all of it is in it, and it goes on to where they part.
        assert set(run.rows) == {
            row
            for row in range(len(tables))
            if shareable[row] >= run.last and common(first, row) >= run.last
        }
        assert min(common(first, row) for row in run.rows) == run.last
        for row in run.rows:
            assert covered[row] == run.first
            covered[row] = run.last
    # Nothing else is worth it: of no row, whatever others it may go on with.
    for row in range(len(tables)):
        for last in range(covered[row] + 1, shareable[row] + 1):
            others = sum(common(row, other) >= last for other in range(len(tables)))
            length = last - covered[row]
            assert others < min_rows or length < min_blocks or length * (others - 1) < min_saved


def test_several_levels() -> None:
    system, first, second = [1, 2], [3, 4, 5], [6, 7]
    rows = [
        [*system, *first, 10],
        [*system, *second, 11],
        [*system, *first, 12, 13],
        [14],
        [*system, *second],
        [*system, 15],
    ]
    runs = shared_runs(rows, [len(row) for row in rows])
    assert sorted(runs, key=lambda run: (run.first, run.rows)) == [
        SharedRun((0, 1, 2, 4, 5), 0, 2),
        SharedRun((0, 2), 2, 5),
        SharedRun((1, 4), 2, 4),
    ]
    # Too short alone, the system prompt begins the documents' runs.
    runs = shared_runs(rows, [len(row) for row in rows], min_blocks=3)
    assert sorted(runs, key=lambda run: run.rows) == [
        SharedRun((0, 2), 0, 5),
        SharedRun((1, 4), 0, 4),
    ]
    assert shared_runs(rows, [len(row) for row in rows], min_rows=5) == [
        SharedRun((0, 1, 2, 4, 5), 0, 2)
    ]
    assert shared_runs(rows, [1, 0, 2, 1, 0, 0]) == [SharedRun((0, 2), 0, 1)]
    assert Sharing(min_tokens=33, min_saved_tokens=0).runs(rows, [6] * 3 + [1, 4, 3], 16) == runs
    assert Sharing(min_tokens=1, min_saved_tokens=129).runs(rows, [6] * 3 + [1, 4, 3], 16) == []


def test_nothing_is_shared_by_nobody() -> None:
    assert shared_runs([], []) == []
    assert shared_runs([[1, 2]], [2]) == []
    assert shared_runs([[], []], [0, 0]) == []


def test_equal_blocks_behind_different_ones_are_no_run() -> None:
    """Two requests that computed the same prefix at the same time, say, and share what follows."""
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 9]]
    assert sorted(shared_runs(rows, [7, 7, 7]), key=lambda run: run.first) == [
        SharedRun((0, 1, 2), 0, 2),
        SharedRun((0, 2), 2, 6),
    ]


# -- attention ---------------------------------------------------------------------------------

Segments = tuple[tuple[int, int], ...]
"""A sequence: names and lengths of its segments. Sequences share those that they begin with."""


class Step:
    """A step over shuffled blocks, whose memory is `poison` where nothing was written.

    :param num_new: of each sequence, how many of its last tokens the step computes; these are in
        segments of their own.
    """

    def __init__(
        self,
        sequences: Sequence[Segments],
        *,
        num_new: Sequence[int] | None = None,
        num_kv_heads: int = 2,
        grouped: int = 3,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        poison: float = NAN,
        min_blocks: int = 1,
        seed: int = 0,
    ) -> None:
        self.num_kv_heads, self.grouped, self.head_dim = num_kv_heads, grouped, head_dim
        self.block_size, self.dtype = block_size, dtype
        num_new = num_new or [1] * len(sequences)
        known: dict[tuple[object, ...], int] = {}
        tables, starts = [], []
        for number, segments in enumerate(sequences):
            own, begins, position = (), [], 0
            blocks = []
            for name, length in (*segments, (~number, num_new[number])):
                own = (*own, name, length)
                for index, begin in enumerate(range(0, length, block_size)):
                    blocks.append(known.setdefault((*own, index), len(known)))
                    begins.append(position + begin)
                position += length
            tables.append(blocks)
            starts.append([*begins, position])
        self.num_blocks = len(known) + 3
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.num_blocks, generator=generator).tolist()
        tables = [[order[block] for block in table] for table in tables]
        lengths = [begins[-1] for begins in starts]
        most = max(map(len, tables))
        slots, positions = [], []
        written: dict[int, None] = {}
        for table, begins, length, new in zip(tables, starts, lengths, num_new, strict=True):
            where = [
                block * block_size + offset
                for block, (begin, end) in zip(table, itertools.pairwise(begins), strict=True)
                for offset in range(end - begin)
            ]
            written.update(dict.fromkeys(where))
            slots += where[length - new :]
            positions += range(length - new, length)
        for slot in slots:
            del written[slot]
        self.past_slots = torch.tensor(list(written), dtype=torch.int64)
        before = [
            sum(begin < length - new for begin in begins[:-1])
            for begins, length, new in zip(starts, lengths, num_new, strict=True)
        ]
        self.runs = shared_runs(
            tables,
            [n if new == 1 else 0 for n, new in zip(before, num_new, strict=True)],
            min_blocks=min_blocks,
        )
        self.batch = PagedBatch(
            query_starts=[0, *itertools.accumulate(num_new)],
            seq_lens=lengths,
            block_tables=torch.tensor([t + [0] * (most - len(t)) for t in tables]),
            block_starts=torch.tensor([b + [b[-1]] * (most + 1 - len(b)) for b in starts]),
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
        )
        self.shared = PagedBatch(
            self.batch.query_starts,
            self.batch.seq_lens,
            self.batch.block_tables,
            self.batch.block_starts,
            self.batch.slots,
            self.batch.positions,
            self.runs,
        )
        heads = (grouped + 2) * num_kv_heads
        self.past, self.new = (
            torch.randn(len(where), heads, head_dim, generator=generator).to(dtype)
            for where in (self.past_slots, self.batch.slots)
        )
        shape = (self.num_blocks, num_kv_heads, block_size, head_dim)
        self.poison = poison
        self.cache = kernels.KVLayer(
            torch.full(shape, poison, dtype=dtype), torch.full(shape, poison, dtype=dtype)
        )
        self.store(self.past, self.past_slots)
        self.query, self.key, self.value = self.split(self.new)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        n = self.num_kv_heads
        return rows.split([n * self.grouped, n, n], dim=1)

    def store(self, rows: Tensor, slots: Tensor) -> None:
        _, key, value = self.split(rows)
        block, offset = slots // self.block_size, slots % self.block_size
        self.cache.keys[block, :, offset] = key
        self.cache.values[block, :, offset] = value

    def expected(self, window: int | None = None) -> Tensor:
        self.store(self.new, self.batch.slots)
        scale = self.head_dim**-0.5
        return kernels.reference.paged_attention(
            self.query, self.cache, self.batch, scale=scale, window=window
        )

    def on_torch(self, batch: PagedBatch, *windows: int | None) -> list[Tensor]:
        attention = kernels.plan_attention(
            batch,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            scale=self.head_dim**-0.5,
        )
        return [
            attention(self.query, self.key, self.value, self.cache, window=window)
            for window in windows
        ]

    def on(self, ops: native.NativeOps, batch: PagedBatch, *windows: int | None) -> list[Tensor]:
        shape = ops.pool_shape(
            self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )
        pool = torch.full(shape, self.poison, dtype=self.dtype)
        for rows, slots in ((self.past, self.past_slots), (self.new, self.batch.slots)):
            query = ops.rope_and_store(
                rows.flatten(1),
                torch.ones(len(rows), self.head_dim // 2, dtype=self.dtype),
                torch.zeros(len(rows), self.head_dim // 2, dtype=self.dtype),
                slots,
                pool,
                num_heads=self.num_kv_heads * self.grouped,
                num_kv_heads=self.num_kv_heads,
                block_size=self.block_size,
            )
        attention = ops.plan_attention(
            batch,
            block_size=self.block_size,
            num_heads=self.num_kv_heads * self.grouped,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            dtype=self.dtype,
        )
        return [attention(query, pool, window=window) for window in windows]

    def check(self, *windows: int | None, on: Sequence[native.NativeOps] | None = None) -> None:
        """Both ways to compute give what the oracle does; the C kernels give the same bits as they
        do without runs."""
        tolerance = TOLERANCE[self.dtype]
        expected = [self.expected(window) for window in windows]
        outputs = [self.on_torch(self.shared, *windows)]
        for ops in ([BEST] if BEST else []) if on is None else on:
            outputs.append(self.on(ops, self.shared, *windows))
            assert all(map(torch.equal, outputs[-1], self.on(ops, self.batch, *windows)))
        for output in outputs:
            for actual, wanted in zip(output, expected, strict=True):
                assert actual.dtype == self.dtype
                torch.testing.assert_close(actual.float(), wanted, rtol=tolerance, atol=tolerance)


@st.composite
def trees(draw: st.DrawFn) -> list[Segments]:
    """Sequences of which some begin as others do, with all of a segment or none of it."""
    length = st.one_of(st.integers(1, 40), st.integers(100, 600))
    result: list[Segments] = []
    for number in range(draw(st.integers(2, 6))):
        parent = draw(st.sampled_from([(), *result]))
        kept = parent[: draw(st.integers(0, len(parent)))]
        own = draw(st.lists(length, max_size=2))
        result.append((*kept, *((100 * number + i, n) for i, n in enumerate(own))))
    return result


@given(
    sequences=trees(),
    data=st.data(),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    grouped=st.sampled_from([1, 3, 7, 20]),
    head_dim=st.sampled_from([2, 18, 64]),
    block_size=st.sampled_from([3, 16, 24, 64]),
    min_blocks=st.integers(1, 9),
    window=st.integers(1, 900),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=12)
def test_any_step_matches_the_oracle(
    sequences: list[Segments],
    data: st.DataObject,
    num_kv_heads: int,
    grouped: int,
    head_dim: int,
    block_size: int,
    min_blocks: int,
    window: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    num_new = [data.draw(st.sampled_from([1, 1, 1, 5, 30])) for _ in sequences]
    Step(
        sequences,
        num_new=num_new,
        num_kv_heads=num_kv_heads,
        grouped=grouped,
        head_dim=head_dim,
        block_size=block_size,
        min_blocks=min_blocks,
        dtype=dtype,
        seed=seed,
    ).check(None, window)


SYSTEM, FIRST, SECOND = (1, 150), (2, 700), (3, 90)
LEVELS: list[Segments] = [
    (SYSTEM, FIRST, (4, 30)),
    (SYSTEM, SECOND, FIRST, (5, 5)),
    (SYSTEM, FIRST, SECOND, (6, 300)),
    ((7, 40),),
    (SYSTEM, SECOND, FIRST),
    (SYSTEM,),
    (SYSTEM, FIRST, SECOND),
]
"""A system prompt that most share, and documents in two orders, with holes between them."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_levels_of_sharing(dtype: torch.dtype) -> None:
    step = Step(LEVELS, dtype=dtype)
    assert len(step.runs) == 4
    step.check(None, 40, 500, on=levels())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grouped", [1, 3, 7, 48])
def test_more_rows_than_are_computed_at_once(grouped: int, dtype: torch.dtype) -> None:
    step = Step(
        [(SYSTEM, (2, n)) for n in range(1, 50)], grouped=grouped, num_kv_heads=1, dtype=dtype
    )
    (run,) = step.runs
    assert len(run.rows) == 49
    step.check(None)


def test_a_window_that_hides_nothing_reads_shared_blocks_once() -> None:
    step = Step(LEVELS)
    longest = max(step.batch.seq_lens)
    attention = step.on_torch(step.shared, None, longest, longest - 1)
    assert torch.equal(attention[0], attention[1])
    assert not torch.equal(attention[1], step.on_torch(step.batch, longest)[0])
    step.check(longest - 1, longest)


@pytest.mark.parametrize("poison", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unwritten_slots_never_count(poison: float, dtype: torch.dtype) -> None:
    clean, poisoned = (
        Step(LEVELS, block_size=24, dtype=dtype, poison=value) for value in (0.0, poison)
    )
    assert torch.equal(
        poisoned.on_torch(poisoned.shared, None)[0], clean.on_torch(clean.shared, None)[0]
    )
    for ops in levels():
        assert torch.equal(
            poisoned.on(ops, poisoned.shared, None)[0], clean.on(ops, clean.shared, None)[0]
        )


@needs_library
def test_threads_change_nothing() -> None:
    assert BEST is not None
    before = torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        step = Step(LEVELS * 3)
        results.append(step.on(BEST, step.shared, None, None))
    torch.set_num_threads(before)
    for outputs in results:
        for output in outputs:
            assert torch.equal(output, results[0][0])


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_chunk(dtype: torch.dtype) -> None:
    """Computed alone or as the last tokens of a long chunk: the same bits, windows included."""
    assert BEST is not None
    results = []
    for num_new in (600, 250, 17, 3, 1):
        step = Step([((1, 1000),)], num_new=[600], dtype=dtype, block_size=16)
        batch = step.batch
        cut = len(batch.slots) - num_new
        part = PagedBatch(
            [0, num_new],
            batch.seq_lens,
            batch.block_tables,
            batch.block_starts,
            batch.slots[cut:],
            batch.positions[cut:],
        )
        attention = BEST.plan_attention(
            part, block_size=16, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, dtype=dtype
        )
        pool = stored(BEST, step)
        query = step.query[cut:].contiguous()
        results.append([attention(query, pool, window=window)[-1] for window in (None, 77, 900)])
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


def stored(ops: native.NativeOps, step: Step) -> Tensor:
    """A pool with all of a step's keys and values in it."""
    shape = ops.pool_shape(
        step.num_blocks,
        block_size=step.block_size,
        num_kv_heads=step.num_kv_heads,
        head_dim=step.head_dim,
        dtype=step.dtype,
    )
    pool = torch.full(shape, step.poison, dtype=step.dtype)
    for rows, slots in ((step.past, step.past_slots), (step.new, step.batch.slots)):
        ops.rope_and_store(
            rows.flatten(1),
            torch.ones(len(rows), step.head_dim // 2, dtype=step.dtype),
            torch.zeros(len(rows), step.head_dim // 2, dtype=step.dtype),
            slots,
            pool,
            num_heads=step.num_kv_heads * step.grouped,
            num_kv_heads=step.num_kv_heads,
            block_size=step.block_size,
        )
    return pool


# -- in the engine -----------------------------------------------------------------------------


class Rig(EngineRig):
    """An engine core over a tiny model, whose KV memory starts out as NaN.

    :ivar runs: shared runs of each step so far.
    """

    def __init__(self, folder: Path, sharing: Sharing | None, dtype: torch.dtype) -> None:
        config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256)
        model = load_model(folder, dtype=dtype, device=torch.device("cpu"))
        backend = make_backend(model, native_operations(model), num_blocks=200, block_size=16)
        for memory in backend.pools:
            memory.fill_(NAN)
        self.runs: list[Sequence[SharedRun]] = []
        forward = backend.forward

        def record(token_ids: Tensor, batch: PagedBatch) -> Tensor:
            self.runs.append(batch.shared_runs)
            return forward(token_ids, batch)

        backend.forward = record  # type: ignore[method-assign]
        runner = ModelRunner(backend, num_threads=1)
        runner.sharing = sharing
        super().__init__(EngineCore(config, BlockPool(200), runner), config, num_tokens=12)


def ask_about_documents(rig: Rig) -> list[list[int]]:
    """Questions with a system prompt and one of two documents; one is asked for three answers, and
    a longer prompt without any of that comes while they are decoded."""
    system, documents = make_prompt(150), [make_prompt(140, seed) for seed in (1, 2)]
    answers: list[Answer] = []
    for number, document in enumerate([0, 1, 0, 1, 0]):
        question = make_prompt(3 + number, 3)
        params = SamplingParams.greedy(ignore_eos=True, n=3 if number == 2 else 1)
        prompt = system + documents[document] + question
        answers += rig.add(prompt, params, segments=(150, 140, 3 + number))
        rig.step(answers)
        rig.step(answers)
    answers += rig.add(make_prompt(300, 4))
    return rig.finish(answers)


@pytest.mark.parametrize("family", ["llama", "smollm2", "mistral"])
def test_the_tokens_are_the_same_with_and_without(
    tiny_model: Callable[..., Path], family: str
) -> None:
    folder = tiny_model(family)
    off = Rig(folder, None, torch.float32)
    expected = ask_about_documents(off)
    assert not any(off.runs)
    on = Rig(folder, Sharing(min_tokens=16, min_saved_tokens=0), torch.float32)
    assert ask_about_documents(on) == expected
    rows = [len(run.rows) for runs in on.runs for run in runs]
    assert max(rows) >= 5
    assert max(map(len, on.runs)) >= 3  # the system prompt, and both documents


@needs_library
def test_in_bfloat16_too_with_the_c_kernels(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    off, on = (
        Rig(folder, sharing, torch.bfloat16)
        for sharing in (None, Sharing(min_tokens=16, min_saved_tokens=0))
    )
    assert ask_about_documents(on) == ask_about_documents(off)
    assert any(on.runs)


def test_the_backend_says_from_when_on_it_gains(tiny_model: Callable[..., Path]) -> None:
    rig = Rig(tiny_model("llama"), None, torch.float32)
    runner = ModelRunner(rig.core.runner._backend, num_threads=1)  # type: ignore[attr-defined]
    assert runner.sharing is not None
    assert runner.sharing.runs([[1, 2], [1, 3]], [1, 1], 16) == []
    long = [[*range(1000), 1000 + row] for row in range(8)]
    assert runner.sharing.runs(long, [1000] * 8, 16) == [SharedRun(tuple(range(8)), 0, 1000)]
