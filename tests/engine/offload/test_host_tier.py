"""The tier in the host's memory: what it promises to whoever saves and loads blocks; and copies
between it and a GPU's pool, on a GPU or, for their logic, on a CPU."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from on_gpu import MEDIUM, SMALL_ENGINE
from rig import make_prompt

from ragserve.engine import Engine, InvalidParamsError, OutOfMemoryError, SamplingParams
from ragserve.engine.offload.host_tier import HostTier
from ragserve.engine.offload.tiers import Tiers

BLOCK_BYTES = 48
NUM_KEYS = 12
KEYS = [bytes([number]) * 32 for number in range(NUM_KEYS)]


def content(key: bytes) -> NDArray[np.uint8]:
    """What the block of a key holds."""
    return np.random.default_rng(key[0]).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


class NumpyIO:
    """A `BlockIO` over a pool of numpy's.

    :ivar failing: fail transfers half-way.
    :ivar while_reading: called when half of a read has been done.
    """

    block_bytes = BLOCK_BYTES
    layout = "numpy"

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = np.zeros((num_blocks, BLOCK_BYTES), dtype=np.uint8)
        self.failing = False
        self.while_reading: Callable[[], object] = lambda: None
        self.log: list[tuple[str, int, object]] = []

    def mark(self) -> object:
        return "mark"

    def allocate(self, num_rows: int) -> NDArray[np.uint8]:
        return np.zeros((num_rows, BLOCK_BYTES), dtype=np.uint8)

    def read(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        self.log.append(("read", len(blocks), after))
        assert len(set(rows)) == len(rows) == len(blocks)
        half = len(rows) // 2
        memory[rows[:half]] = self.pool[blocks[:half]]
        memory[rows[half:]] = 0xEE
        self.while_reading()
        if self.failing:
            raise RuntimeError("the device is gone")
        memory[rows[half:]] = self.pool[blocks[half:]]

    def write(
        self, blocks: Sequence[int], memory: NDArray[np.uint8], rows: Sequence[int], after: object
    ) -> None:
        self.log.append(("write", len(blocks), after))
        if self.failing:
            raise RuntimeError("the device is gone")
        self.pool[list(blocks)] = memory[list(rows)]

    def close(self) -> None:
        pass


class Model:
    """Which keys a tier of so many rows has to hold, by the letter of its contract."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.keys: list[int] = []
        """The least recently used first."""

    def touch(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.keys.remove(key)
            self.keys.append(key)

    def save(self, keys: Sequence[int], *, failing: bool) -> None:
        keys = keys[::-1]  # the end of a prefix is the first to go
        known = [key for key in keys if key in self.keys]
        new = [key for key in keys if key not in self.keys]
        self.touch(known)
        while len(known) + len(new) > self.num_rows:
            del new[0]
        while len(self.keys) + len(new) > self.num_rows:
            del self.keys[0]
        if not failing:
            self.keys += new

    def load(self, keys: Sequence[int]) -> int:
        count = next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))
        self.touch(keys[:count][::-1])
        return count


operations = st.tuples(
    st.sampled_from(("save", "save", "load")),
    st.lists(st.integers(0, NUM_KEYS - 1), max_size=8, unique=True),
    st.sampled_from((False, False, False, True)),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(num_rows=st.integers(1, 8), steps=st.lists(operations, max_size=25))
def test_what_was_saved_comes_back_bit_for_bit_or_not_at_all(
    num_rows: int, steps: list[tuple[str, list[int], bool]]
) -> None:
    """Whatever fails in between; and what goes is what was used least recently, no more of it than
    the bound asks for."""
    io, model = NumpyIO(), Model(num_rows)
    tier = HostTier(io, num_rows * BLOCK_BYTES + BLOCK_BYTES - 1)
    for name, numbers, io.failing in steps:
        keys, blocks = [KEYS[number] for number in numbers], list(range(len(numbers)))
        before = tier.statistics()
        if name == "save":
            for block, key in enumerate(keys):
                io.pool[block] = content(key)
            new = [key for key in keys if key not in tier]

            def check(new: list[bytes] = new) -> None:
                # What is being copied is not there yet.
                assert not any(key in tier for key in new)

            io.while_reading = check
            calls = len(io.log)
            if io.failing and new and len(new) > len(keys) - num_rows:
                with pytest.raises(RuntimeError, match="gone"):
                    tier.save(keys, blocks, io, "after")
            else:
                tier.save(keys, blocks, io, "after")
            model.save(numbers, failing=io.failing)
            assert [call[2] for call in io.log[calls:]] in ([], ["after"])
        else:
            io.pool[:] = 0
            count = model.load(numbers)
            if io.failing and count:
                with pytest.raises(RuntimeError, match="gone"):
                    tier.load(keys, blocks, io, "after")
            else:
                assert tier.load(keys, blocks, io, "after") == count
                for block, key in enumerate(keys[:count]):
                    assert np.array_equal(io.pool[block], content(key))
                assert not io.pool[count:].any()
                assert tier.statistics().loaded == before.loaded + count
        assert [number for number in range(NUM_KEYS) if KEYS[number] in tier] == sorted(model.keys)
        after = tier.statistics()
        assert after.blocks == len(model.keys) <= num_rows
        assert after.bytes == after.blocks * BLOCK_BYTES <= after.capacity_bytes
        assert after.saved - after.evicted == after.blocks
    io.failing = False
    for number in model.keys:
        assert tier.load([KEYS[number]], [0], io, "after") == 1
        assert np.array_equal(io.pool[0], content(KEYS[number]))


def test_what_goes_first_is_the_oldest_and_of_one_prefix_its_end() -> None:
    io = NumpyIO()
    tier = HostTier(io, 6 * BLOCK_BYTES)

    def held() -> list[int]:
        return [number for number, key in enumerate(KEYS) if key in tier]

    tier.save(KEYS[:6], range(6), io, "after")
    tier.save(KEYS[6:8], range(2), io, "after")
    assert held() == [0, 1, 2, 3, 6, 7]
    assert tier.load(KEYS[:2], range(2), io, "after") == 2
    tier.save(KEYS[8:10], range(2), io, "after")
    assert held() == [0, 1, 6, 7, 8, 9]
    tier.save(KEYS[10:12], range(2), io, "after")
    assert held() == [0, 1, 8, 9, 10, 11]
    tier.save(KEYS[2:3], range(1), io, "after")
    assert held() == [0, 2, 8, 9, 10, 11]


def test_a_batch_larger_than_the_tier_keeps_its_beginning() -> None:
    io = NumpyIO()
    tier = HostTier(io, 3 * BLOCK_BYTES)
    tier.save(KEYS[:5], range(5), io, "after")
    assert [key in tier for key in KEYS[:5]] == [True, True, True, False, False]
    tier.save(KEYS[:5], range(5), io, "after")  # none of them goes for the others
    assert [key in tier for key in KEYS[:5]] == [True, True, True, False, False]
    assert tier.statistics().evicted == 0


def test_a_key_that_is_named_twice_is_kept_once() -> None:
    io = NumpyIO()
    tier = HostTier(io, 3 * BLOCK_BYTES)
    tier.save([KEYS[0], KEYS[0], KEYS[1]], [0, 0, 1], io, "after")
    tier.save([KEYS[0], KEYS[2], KEYS[0]], [0, 2, 0], io, "after")
    assert tier.statistics().blocks == tier.statistics().saved == 3


def test_a_tier_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(InvalidParamsError, match=r"swap_space_bytes=47 .* 48 bytes of one block"):
        HostTier(NumpyIO(), BLOCK_BYTES - 1)


def test_measuring_changes_no_block_and_tells_a_time() -> None:
    io = NumpyIO(num_blocks=1)  # the smallest pool
    io.pool[:] = content(KEYS[0])
    tier = HostTier(io, 40 * BLOCK_BYTES)
    assert tier.statistics().seconds_per_block > 0
    assert np.array_equal(io.pool[0], content(KEYS[0]))
    assert tier.statistics().blocks == 0


def test_loads_move_the_average() -> None:
    io = NumpyIO()
    tier = HostTier(io, 4 * BLOCK_BYTES)
    tier.save(KEYS[:4], range(4), io, "after")
    tier.load(KEYS[:4], range(4), io, "after")
    first = tier.statistics().seconds_per_block
    assert first > 0
    for _ in range(200):
        tier.load(KEYS[:4], range(4), io, "after")
    assert tier.statistics().seconds_per_block != first


def test_a_closed_tier_holds_nothing() -> None:
    io = NumpyIO()
    tier = HostTier(io, 4 * BLOCK_BYTES)
    tier.save(KEYS[:3], range(3), io, "after")
    assert repr(tier) == "<HostTier [3/4 blocks]>"
    tier.close()
    assert KEYS[0] not in tier
    assert tier.load(KEYS[:3], range(3), io, "after") == 0
    assert tier.statistics().blocks == 0


def test_any_thread_may_ask_what_it_holds() -> None:
    io = NumpyIO()
    tier = HostTier(io, 5 * BLOCK_BYTES)
    stop, wrong, answers = threading.Event(), list[Exception](), set[bool]()

    def ask() -> None:
        try:
            while not stop.is_set():
                answers.update(key in tier for key in KEYS)
                statistics = tier.statistics()
                assert 0 <= statistics.blocks <= 5
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        generator = np.random.default_rng(0)
        for _ in range(1500):
            keys = [KEYS[i] for i in generator.permutation(NUM_KEYS)[:4]]
            tier.save(keys, range(4), io, "after")
            tier.load(keys[::-1], range(4), io, "after")
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not wrong
    assert answers == {True, False}


# -- between a GPU's pool and the host -------------------------------------------------------------

if importlib.util.find_spec("triton") is not None:
    from ragserve.engine.gpu import block_io as swap
    from ragserve.engine.gpu.memory import release_memory
    from ragserve.engine.gpu.stream import DeviceStream

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
SHAPE = (3, 2, 40, 2, 16, 24)
with_triton = [
    pytest.mark.triton,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def marked(function: Any) -> Any:
    """As `make test` runs what needs Triton only once."""
    for mark in with_triton:
        function = mark(function)
    return function


def block_hashes(count: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(count)]


@pytest.fixture(params=["staged", *(["direct"] if ON_GPU else [])])
def device_io(request: pytest.FixtureRequest) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """A pool of random blocks, the engine's stream, and what copies between it and the host."""
    torch.manual_seed(0)
    stream = DeviceStream(DEVICE)
    with stream.current():
        pool = torch.randn(SHAPE, device=DEVICE).half()
    direct = request.param == "direct"
    io = swap.GPUBlockIO(pool, stream, direct_reads=direct, direct_writes=direct)
    yield pool, stream, io
    io.close()


@marked
@pytest.mark.parametrize("per_transfer", [3, 1 << 12])
def test_blocks_of_a_device_come_back_to_other_blocks(
    device_io: tuple[torch.Tensor, Any, Any], per_transfer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, stream, io = device_io
    monkeypatch.setattr(swap, "_MOST_BLOCKS", per_transfer)
    tier = HostTier(io, 25 * io.block_bytes)
    before = pool.clone()
    keys = block_hashes(20)
    saved = torch.randperm(40)[:20].tolist()
    tier.save(keys[:7], saved[:7], io, io.mark())
    tier.save(keys[7:], saved[7:], io, io.mark())
    assert torch.equal(pool, before)
    with stream.current():
        pool.fill_(float("nan"))
    fresh = torch.randperm(40)[:20].tolist()
    assert tier.load(keys, fresh, io, io.mark()) == 20
    stream.synchronize()
    assert torch.equal(pool[:, :, fresh], before[:, :, saved])
    others = sorted(set(range(40)) - set(fresh))
    assert pool[:, :, others].isnan().all()
    tier.close()


@marked
def test_a_row_holds_layer_after_layer_the_keys_and_then_the_values(
    device_io: tuple[torch.Tensor, Any, Any],
) -> None:
    pool, _, io = device_io
    memory = io.allocate(3)
    assert not memory.any()
    io.read([11], memory, [1], io.mark())
    assert memory[1].tobytes() == pool[:, :, 11].cpu().contiguous().numpy().tobytes()
    assert not memory[[0, 2]].any()
    assert io.block_bytes == memory.shape[1] == 3 * 2 * 2 * 16 * 24 * 2
    assert io.layout == "gpu float16 [3 layers, 2, 2 heads, 16, 24]"


@marked
def test_memory_that_the_host_lacks_is_refused(
    device_io: tuple[torch.Tensor, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, io = device_io
    message = r"\d+ bytes of host memory were asked for .* available; lower swap_space_bytes"
    with pytest.raises(OutOfMemoryError, match=message):
        HostTier(io, 1 << 50)
    monkeypatch.setattr(swap, "available_memory", lambda: 1 << 60)
    with pytest.raises(OutOfMemoryError, match=r"the system refused .* lower swap_space_bytes"):
        HostTier(io, 1 << 57)


@marked
def test_closing_twice_is_closing_once(device_io: tuple[torch.Tensor, Any, Any]) -> None:
    _, _, io = device_io
    memory = io.allocate(2)
    io.close()
    io.close()
    memory[:] = 1  # still there for whoever has it


@needs_gpu
@marked
def test_memory_that_is_not_pinned_will_do(device_io: tuple[torch.Tensor, Any, Any]) -> None:
    pool, stream, io = device_io
    memory = np.zeros((2, io.block_bytes), dtype=np.uint8)
    io.read([5, 6], memory, [1, 0], io.mark())
    io.write([8, 9], memory, [1, 0], io.mark())
    stream.synchronize()
    assert torch.equal(pool[:, :, [8, 9]], pool[:, :, [5, 6]])


@marked
def test_a_transfer_wants_a_mark(device_io: tuple[torch.Tensor, Any, Any]) -> None:
    _, _, io = device_io
    with pytest.raises(TypeError, match="after is what mark"):
        io.read([0], io.allocate(1), [0], None)


@needs_gpu
@marked
def test_transfers_wait_for_the_plans_before_them_and_for_no_others(
    device_io: tuple[torch.Tensor, Any, Any],
) -> None:
    """Saved is what the engine's stream has written when it comes to the mark, however late that
    is; and what it wrote to blocks before they were loaded does not come out on top."""
    pool, stream, io = device_io
    tier = HostTier(io, 8 * io.block_bytes)
    keys, blocks, fresh = block_hashes(8), list(range(8)), list(range(20, 28))
    expected = torch.randn(3, 2, 8, 2, 16, 24, device=DEVICE).half()
    left = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()

    def delay() -> None:
        with stream.current():
            for _ in range(30):
                torch.mm(left, left, out=product)

    with stream.current():
        product = torch.empty_like(left)
        delay()
        pool[:, :, blocks] = expected
    mark = io.mark()
    delay()
    with stream.current():
        pool[:, :, 30:] = 0  # another block's business goes on
    saving = threading.Thread(target=tier.save, args=(keys, blocks, io, mark))
    saving.start()
    saving.join()
    with stream.current():
        pool[:, :, blocks] = float("nan")
        delay()
        pool[:, :, fresh] = float("nan")
    loading = threading.Thread(target=tier.load, args=(keys, fresh, io, io.mark()))
    loading.start()
    loading.join()
    with stream.current():
        loaded = pool[:, :, fresh].clone()
    stream.synchronize()
    assert torch.equal(loaded, expected)
    assert pool[:, :, blocks].isnan().all()
    assert not pool[:, :, 30:].any()


def mapped_kilobytes() -> int:
    """Memory that this process has mapped, in kB: `VmSize` of Linux."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmSize"))


@needs_gpu
@marked
def test_the_hosts_memory_is_given_back(device_io: tuple[torch.Tensor, Any, Any]) -> None:
    pool, stream, _ = device_io
    sizes = []
    for _ in range(4):
        io = swap.GPUBlockIO(pool, stream)
        tier = HostTier(io, 256 << 20)
        assert tier.statistics().seconds_per_block < 1e-2
        inside = mapped_kilobytes()
        tier.close()
        io.close()
        del tier, io
        release_memory(DEVICE)
        sizes.append(mapped_kilobytes())
        assert inside - sizes[-1] >= 256 << 10
    # Less than one of the tiers, however many were made; an arena of malloc's is 64 MiB.
    assert max(sizes[1:]) - min(sizes[1:]) < 256 << 10


@needs_gpu
@marked
def test_a_document_returns_from_the_host_while_answers_go_on(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is answered as when it had stayed on the device."""
    monkeypatch.setattr(Tiers, "seconds", lambda self, keys: 0.0)  # always worth its while
    folder = tiny_model("llama", **MEDIUM)
    block = 4 * 2 * 2 * 64 * 16 * 4
    knobs = {**SMALL_ENGINE, "kv_cache_bytes": 160 * block, "swap_space_bytes": 200 * block}
    knobs["cache_policy"] = "lru"  # the other one keeps what was asked for more than once
    document = make_prompt(600)
    params = SamplingParams.greedy(max_tokens=20, ignore_eos=True)
    answer = SamplingParams.greedy(max_tokens=400, ignore_eos=True)

    async def main() -> None:
        async with Engine.open(folder, dtype="float32", **knobs) as engine:
            await engine.warm([document])
            resident = await engine.generate(document, params)
            for _ in range(1000):
                saved = engine.statistics().cache.tiers["host"].saved
                if saved >= 37:
                    break
                await asyncio.sleep(0.01)
            assert saved >= 37
            questions = (make_prompt(9, seed) for seed in (1, 2))
            answers = [asyncio.create_task(engine.generate(q, answer)) for q in questions]
            for seed in range(4):
                await engine.generate(make_prompt(700, 10 + seed), params)
            returned = await engine.generate(document, params)
            await asyncio.gather(*answers)
            await engine.check_integrity()
        assert resident.reuse[0].source == "device"
        assert returned.reuse[0].source == "host"
        assert returned.usage.cached_tokens >= 512
        assert returned.token_ids == resident.token_ids

    asyncio.run(main())
