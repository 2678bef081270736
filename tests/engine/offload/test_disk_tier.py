"""Blocks on a disk: back bit for bit, or not at all, whatever happens to the files."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import disk_blocks
import numpy as np
import pytest
import torch
from disk_blocks import (
    FILE_BYTES,
    HEADER_BYTES,
    IDENTITY,
    MemoryIO,
    block_files,
    content,
    file_of,
    key,
    keys_of,
    load,
    make_tier,
    save,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ragserve import kernels
from ragserve.engine import EngineConfig
from ragserve.engine.cpu.backend import Backend, block_bytes, make_backend, native_operations
from ragserve.engine.cpu.block_io import CPUBlockIO
from ragserve.engine.models.decoder import DecoderModel
from ragserve.engine.models.load import load_model
from ragserve.engine.offload.disk_tier import DiskTier
from ragserve.engine.offload.fingerprint import hash_files, hash_tensors, kv_identity
from ragserve.engine.runtime.loading import LoadedModel, PretrainedModel

MODULE = "ragserve.engine.offload.disk_tier"


@pytest.fixture(autouse=True)
def _look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the folder is looked at in every call: most tests change it behind one's back."""
    monkeypatch.setattr(f"{MODULE}._LOOK_SECONDS", 0.0)
    monkeypatch.setattr(f"{MODULE}._LOOK_TIMES", 0)  # looking is slow on a busy machine


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(errno.EACCES, "refused")


# ---- what is kept comes back


def test_what_was_saved_outlives_the_tier(tmp_path: Path) -> None:
    keys = keys_of(8)
    first = make_tier(tmp_path / "new" / "kv")
    assert load(first, keys) == 0
    save(first, keys)
    assert all(name in first for name in keys)
    assert load(first, keys) == 8
    first.close()
    assert keys[0] not in first
    second = make_tier(tmp_path / "new" / "kv")
    assert all(name in second for name in keys)
    assert key(99) not in second
    assert load(second, keys) == 8
    assert load(second, [*keys[:5], key(99), *keys[5:]]) == 5
    found = second.statistics()
    assert (found.blocks, found.bytes) == (8, 8 * FILE_BYTES)
    assert (found.saved, found.loaded, found.evicted, found.rejected) == (0, 13, 0, 0)
    assert found.seconds_per_block is not None
    assert found.seconds_per_block > 0
    assert "8 blocks" in repr(second)


def test_a_file_is_safetensors_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    save(make_tier(folder), keys_of(2))
    path = file_of(folder, key(0))
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        assert np.array_equal(file.get_tensor("block"), content(key(0)))
    assert metadata["key"] == key(0).hex()
    assert {name: metadata[f"identity.{name}"] for name in IDENTITY} == IDENTITY
    assert metadata["identity.layout"] == "memory"
    assert path.stat().st_size == FILE_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for above in (path.parent, path.parent.parent, folder):
        assert stat.S_IMODE(above.stat().st_mode) == 0o700


def test_saving_again_writes_nothing(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    save(tier, keys_of(4))
    inodes = [path.stat().st_ino for path in block_files(tmp_path)]
    save(tier, keys_of(4))
    assert [path.stat().st_ino for path in block_files(tmp_path)] == inodes
    assert tier.statistics().saved == 4


# ---- what is broken is not served


def refusal(
    tier: DiskTier, folder: Path, name: bytes, caplog: pytest.LogCaptureFixture
) -> Callable[[bytes], None]:
    """`check(data)`: a file of that content is refused, said to be, deleted, and written anew."""
    path = file_of(folder, name)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        before = tier.statistics().rejected
        caplog.clear()
        assert load(tier, [name]) == 0
        assert name not in tier
        assert tier.statistics().rejected == before + 1
        assert [path.name in record.getMessage() for record in caplog.records] == [True]
        assert not path.exists()
        save(tier, [name])
        assert load(tier, [name]) == 1

    return check


def test_truncated_at_any_byte(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = make_tier(tmp_path)
    save(tier, [key(0)])
    check = refusal(tier, tmp_path, key(0), caplog)
    whole = file_of(tmp_path, key(0)).read_bytes()
    for size in [*range(HEADER_BYTES + 1), *range(HEADER_BYTES, FILE_BYTES, 17), FILE_BYTES - 1]:
        check(whole[:size])
    check(whole + b"\0")
    check(bytes(FILE_BYTES))


def test_any_flipped_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = make_tier(tmp_path)
    save(tier, [key(0)])
    check = refusal(tier, tmp_path, key(0), caplog)
    whole = file_of(tmp_path, key(0)).read_bytes()
    for bit in [*range(0, HEADER_BYTES * 8, 17), *range(HEADER_BYTES * 8, FILE_BYTES * 8, 13)]:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        check(bytes(flipped))


def test_a_file_under_another_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = make_tier(tmp_path)
    save(tier, keys_of(2))
    refusal(tier, tmp_path, key(1), caplog)(file_of(tmp_path, key(0)).read_bytes())
    assert load(tier, keys_of(2)) == 2


@pytest.mark.parametrize("changed", sorted(IDENTITY))
def test_of_another_identity(
    tmp_path: Path, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier, keys = make_tier(tmp_path), keys_of(3)
    save(tier, keys)
    mine = file_of(tmp_path, key(1)).read_bytes()
    other = make_tier(tmp_path, identity={**IDENTITY, changed: "f" * len(IDENTITY[changed])})
    assert key(0) not in other
    assert load(other, keys) == 0
    assert not caplog.records
    save(other, keys)
    assert len(block_files(tmp_path)) == 6
    # One of the first in the second's folder is seen through, though it has the size of its own.
    (theirs,) = (path for path in block_files(tmp_path) if key(1).hex() in path.name
                 and path.read_bytes() != mine)  # fmt: skip
    theirs.write_bytes(mine)
    assert load(other, keys) == 1
    assert len(caplog.records) == 1
    assert load(tier, keys) == 3


def test_layouts_do_not_meet(tmp_path: Path) -> None:
    save(make_tier(tmp_path), keys_of(2))
    assert key(0) not in DiskTier(tmp_path, IDENTITY, 1 << 20, MemoryIO("another layout"))


def test_what_cannot_be_deleted_is_not_served_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(tmp_path)
    save(tier, keys_of(3))
    file_of(tmp_path, key(1)).write_bytes(b"nothing")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert load(tier, keys_of(3)) == 1
        assert load(tier, [key(2)]) == 1  # it has looked at the folder again
        assert key(1) not in tier
    assert len(caplog.records) == 1
    save(tier, keys_of(3))
    assert load(tier, keys_of(3)) == 3


def test_what_is_no_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = make_tier(tmp_path / "kv")
    save(tier, keys_of(3))
    private = tmp_path / "private"
    shutil.copyfile(file_of(tmp_path / "kv", key(0)), private)
    for number, make in enumerate((lambda path: path.symlink_to(private), os.mkfifo)):
        path = file_of(tmp_path / "kv", key(number))
        path.unlink()
        make(path)
        assert load(tier, [key(number)]) == 0
        assert key(number) not in tier
    assert len(caplog.records) == 2
    assert private.stat().st_size == FILE_BYTES
    save(tier, keys_of(3))
    assert load(tier, keys_of(3)) == 3
    assert not file_of(tmp_path / "kv", key(0)).is_symlink()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for what Linux has")
@pytest.mark.parametrize("after", ["fstat", "close"])  # before it is mapped, and then
def test_a_file_cut_while_it_is_read_is_an_error_not_the_end(tmp_path: Path, after: str) -> None:
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if version < (5, 14):
        pytest.skip("this system cannot read ahead with an error")
    save(make_tier(tmp_path), keys_of(1))
    script = (
        "import os, sys, disk_blocks\n"
        "from pathlib import Path\n"
        "def cut(descriptor):\n"
        "    result = real(descriptor)\n"
        "    if path.exists(): os.truncate(path, 0)\n"
        "    return result\n"
        "path = disk_blocks.file_of(Path(sys.argv[1]), disk_blocks.key(0))\n"
        "tier = disk_blocks.make_tier(Path(sys.argv[1]))\n"
        "real = getattr(os, sys.argv[2])\n"
        "setattr(os, sys.argv[2], cut)\n"
        "print(disk_blocks.load(tier, disk_blocks.keys_of(1)))\n"
    )
    done = python("-c", script, tmp_path, after)
    assert done.communicate(timeout=300)[0] == "0\n"
    assert done.returncode == 0


def python(*arguments: object) -> subprocess.Popen[str]:
    """A process with the helpers of `disk_blocks`."""
    path = os.pathsep.join(
        [str(Path(disk_blocks.__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
    )


# ---- a writer that dies


class Died(BaseException):
    """The process is gone: nothing of it runs any more."""


@contextmanager
def dying_after(patch: pytest.MonkeyPatch, num_bytes: int) -> Iterator[None]:
    """Saving ends once that many bytes are written, and leaves what is there."""
    write, left = os.write, num_bytes

    def limited(descriptor: int, data: Any) -> int:
        nonlocal left
        count = write(descriptor, data[:left]) if left else 0
        left -= count
        if count < len(data):
            raise Died
        return count

    def gone(*_: Any) -> None:
        raise Died

    with patch.context() as patched:
        patched.setattr(os, "write", limited)
        patched.setattr(os, "unlink", lambda _: None)
        patched.setattr(os, "replace", gone)
        yield


def test_dead_at_any_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(tmp_path)
    save(tier, [key(0)])
    points = range(FILE_BYTES + 1)
    for num_bytes in points:
        with dying_after(monkeypatch, num_bytes), pytest.raises(Died):
            save(tier, keys_of(2))
    assert len(contents(tmp_path)) == 1 + len(points)  # something was left each time
    assert key(1) not in tier
    opened = make_tier(tmp_path)
    assert key(1) not in opened
    assert load(opened, keys_of(2)) == 1
    save(opened, keys_of(2))
    assert load(opened, keys_of(2)) == 2
    assert not caplog.records


def test_killed_while_it_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = python(disk_blocks.__file__, "stall", tmp_path)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "half\n"
    finally:
        process.kill()
        process.communicate(timeout=300)
    assert len(contents(tmp_path)) == 3
    tier = make_tier(tmp_path)
    assert load(tier, keys_of(3)) == 2
    save(tier, keys_of(3))
    assert load(tier, keys_of(3)) == 3
    assert not caplog.records


def test_old_temporary_files_go_and_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for identity in (IDENTITY, {"format": "0"}):
        tier = make_tier(tmp_path, identity=identity)
        for _ in range(2):
            with dying_after(monkeypatch, 20), pytest.raises(Died):
                save(tier, keys_of(1))
    left = [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    assert len(left) == 4
    (left[0].parent / "notes.tmp").write_text("mine")
    (tmp_path / "notes.safetensors").write_text("mine")
    long_ago = time.time() - 7200
    for path in [*left[::2], left[0].parent / "notes.tmp"]:
        os.utime(path, (long_ago, long_ago))
    make_tier(tmp_path)
    there = {tmp_path / name for name in contents(tmp_path)}
    assert there == {*left[1::2], left[0].parent / "notes.tmp", tmp_path / "notes.safetensors"}


# ---- the bound


def test_the_bound_holds_over_all_identities(tmp_path: Path) -> None:
    old = make_tier(tmp_path, capacity=10, identity={**IDENTITY, "format": "0"})
    save(old, keys_of(6))
    new = make_tier(tmp_path, capacity=10)
    save(new, keys_of(4, first=20))
    assert load(old, keys_of(6)) == 6
    assert new.statistics().evicted == 0
    save(new, keys_of(3, first=30))
    assert new.statistics().evicted == 3
    assert len(block_files(tmp_path)) == 10
    # The first's were used last; of the second's first prompt the beginning is left.
    assert load(old, keys_of(6)) == 6
    assert load(new, keys_of(4, first=20)) == 1
    assert load(new, keys_of(3, first=30)) == 3
    # A tier without blocks of its own leaves nothing behind of identities that are gone.
    assert make_tier(tmp_path, capacity=10).statistics().evicted == 0


def test_of_more_blocks_than_fit_the_first_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(tmp_path, capacity=5)
    save(tier, keys_of(12))
    assert load(tier, keys_of(12)) == 5
    large = make_tier(tmp_path / "large", capacity=40)
    save(large, keys_of(60))
    save(large, keys_of(60))  # what is kept is not broken up by saving the rest
    assert 36 <= load(large, keys_of(60)) <= 40
    assert not caplog.records
    none = DiskTier(tmp_path / "none", IDENTITY, FILE_BYTES - 1, MemoryIO())
    save(none, keys_of(2))
    assert load(none, keys_of(2)) == 0
    assert [str(FILE_BYTES) in record.getMessage() for record in caplog.records] == [True]


OPERATIONS = st.tuples(st.booleans(), st.integers(0, 20), st.integers(1, 6))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(1, 12), st.lists(OPERATIONS, min_size=1, max_size=20))
def test_the_least_recently_used_go(capacity: int, operations: list[tuple[bool, int, int]]) -> None:
    expected: OrderedDict[bytes, None] = OrderedDict()
    with tempfile.TemporaryDirectory() as name:
        tier = make_tier(Path(name), capacity=capacity)
        for saves, first, count in operations:
            keys = keys_of(count, first)
            if saves:
                keys = keys[:capacity]
                save(tier, keys)
            else:
                keys = list(itertools.takewhile(expected.__contains__, keys))
                assert load(tier, keys_of(count, first)) == len(keys)
            for used in reversed(keys):
                expected[used] = None
                expected.move_to_end(used)
            # Each group of a transfer makes room for itself alone: so does this.
            while len(expected) > capacity:
                expected.popitem(last=False)
            assert {path.stem for path in block_files(Path(name))} == {k.hex() for k in expected}
            assert all(used in tier for used in expected)
            assert tier.statistics().blocks == len(expected)


# ---- several at a time


def test_two_tiers_on_one_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = make_tier(tmp_path, capacity=12), make_tier(tmp_path, capacity=12)
    save(one, keys_of(6))
    assert load(other, keys_of(6)) == 6  # whether or not it has seen them
    assert key(0) in other
    save(other, keys_of(8, first=10))
    assert load(one, keys_of(6)) == 4
    assert load(one, keys_of(8, first=10)) == 8
    assert len(block_files(tmp_path)) == 12
    shutil.rmtree(tmp_path)
    assert load(one, keys_of(6)) == 0
    save(one, keys_of(3))
    assert load(other, keys_of(3)) == 3
    assert not caplog.records


def test_processes_share_a_folder(tmp_path: Path) -> None:
    processes = [python(disk_blocks.__file__, "hammer", tmp_path, seed) for seed in range(2)]
    for process in processes:
        saved, loaded, rejected = process.communicate(timeout=300)[0].split()
        assert process.returncode == 0
        assert int(saved) > 0
        assert int(loaded) > 0
        assert int(rejected) == 0
    assert all(name.endswith(".safetensors") for name in contents(tmp_path))
    tier = make_tier(tmp_path, capacity=40)
    save(tier, keys_of(8, first=1000))
    assert len(block_files(tmp_path)) <= 40


def test_asked_from_other_threads_meanwhile(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, capacity=16)
    save(tier, [key(0)])
    over = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        while not over.is_set():
            if key(0) not in tier or key(999) in tier:
                wrong.append("a key was missed, or made up")
            if tier.statistics().blocks > 16:
                wrong.append(tier.statistics())
            time.sleep(0.0002)  # without it the others hardly come to hold the interpreter

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for round in range(20):
            save(tier, keys_of(5, first=1 + round * 5))
            assert load(tier, [key(0)]) == 1
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert tier.statistics().evicted > 60


# ---- a disk that does not do what it should


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a user without rights can reach."""
    folder = Path(tempfile.mkdtemp(prefix="ragserve-test-"))
    try:
        yield folder
    finally:
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)


@contextmanager
def as_owner_without_rights(folder: Path) -> Iterator[None]:
    """Nothing can be written in the folder; root, who always could, becomes somebody else."""
    nobody = 65534
    paths = [folder, *folder.rglob("*")]
    root = os.geteuid() == 0
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
        if root:
            os.chown(path, nobody, nobody)
    if root:
        os.seteuid(nobody)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_that_can_only_be_read(
    open_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_tier(open_folder), keys_of(4))
    with as_owner_without_rights(open_folder):
        tier = make_tier(open_folder)
        assert not caplog.records
        for _ in range(3):
            save(tier, keys_of(6))
            assert load(tier, keys_of(6)) == 4
            assert key(5) not in tier
    assert len(caplog.records) == 1
    assert "goes on without saving" in caplog.text
    assert tier.statistics().saved == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        caplog.clear()
        tier = make_tier(folder)
        save(tier, keys_of(2))
        assert load(tier, keys_of(2)) == 0
        assert key(0) not in tier
        assert [str(folder) in record.getMessage() for record in caplog.records] == [True]
        tier.close()


def test_somebody_elses_folder_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path / "kv")
    save(tier, keys_of(2))
    (home,) = (tmp_path / "kv").iterdir()
    home.chmod(0o755)
    assert load(make_tier(tmp_path / "kv"), keys_of(2)) == 2
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert load(make_tier(tmp_path / "kv"), keys_of(2)) == 0
    # A link that somebody has put there leads nowhere.
    home.rename(tmp_path / "elsewhere")
    home.symlink_to(tmp_path / "elsewhere")
    linked = make_tier(tmp_path / "kv")
    save(linked, keys_of(4))
    assert load(linked, keys_of(4)) == 0
    assert len(list((tmp_path / "elsewhere").glob("*/*"))) == 2
    assert len(caplog.records) == 2


@pytest.mark.parametrize("function", ["write", "open", "replace", "close"])
def test_a_full_disk(
    tmp_path: Path,
    function: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = make_tier(tmp_path)
    save(tier, keys_of(2))
    before = contents(tmp_path)
    real = getattr(os, function)

    def full(*arguments: Any) -> Any:
        if function == "close":
            real(*arguments)
        elif function == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, full)
        for first in (10, 20, 30):
            save(tier, keys_of(7, first))
        patch.setattr(f"{MODULE}._PAUSE_SECONDS", 0.0)
        tier._paused_until = 0.0
        save(tier, keys_of(7, 40))
        if function != "close":
            assert load(tier, keys_of(2)) == 2
    assert contents(tmp_path) == before
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text
    save(tier, keys_of(7, 40))  # there is room again
    assert load(tier, keys_of(7, 40)) == 7
    assert len(caplog.records) == 1


def test_room_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(tmp_path, capacity=3)
    save(tier, keys_of(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        save(tier, keys_of(2, first=10))
    assert len(block_files(tmp_path)) == 3
    assert load(tier, keys_of(3)) == 3
    assert len(caplog.records) == 1


def test_what_goes_wrong_in_the_pool_is_raised(tmp_path: Path) -> None:
    class Broken(MemoryIO):
        def read(self, *_: object) -> None:
            raise OSError("the pool is gone")

    with pytest.raises(OSError, match="the pool is gone"):
        make_tier(tmp_path).save(keys_of(1), [0], Broken(), None)


# ---- the pools of the CPU's backends

BACKENDS = [
    pytest.param(native, dtype, id=f"{'native' if native else 'torch'}-{dtype}")
    for native, dtype in [
        (True, torch.float32),
        (True, torch.bfloat16),
        (False, torch.float32),
        (False, torch.bfloat16),
        (False, torch.float16),
    ]
]


def make(folder: Path, native: bool, dtype: torch.dtype, block_size: int = 16) -> Backend:
    model = load_model(folder, dtype=dtype, device=torch.device("cpu"))
    ops = native_operations(model) if native else None
    if native and ops is None:
        pytest.skip("the C kernels are switched off or were not built")
    size = block_bytes(model, ops, block_size)
    backend = make_backend(model, ops, num_blocks=12, block_size=block_size)
    assert CPUBlockIO(backend).block_bytes == size
    return backend


def fill(backend: Backend, seed: int) -> None:
    """Any bytes at all, so NaNs too."""
    random = np.random.default_rng(seed)
    for pool in backend.pools:
        memory = pool.view(pool.shape[0], -1).view(torch.uint8)
        memory.copy_(torch.from_numpy(random.integers(0, 256, memory.shape, np.uint8)))


def bits(backend: Backend, blocks: Sequence[int]) -> list[bytes]:
    """What each block holds, in all pools."""
    return [
        b"".join(pool[block].contiguous().view(torch.uint8).numpy().tobytes() for pool in pools)
        for pools in [backend.pools]
        for block in blocks
    ]


@pytest.mark.parametrize(("native", "dtype"), BACKENDS)
def test_round_trip(
    tiny_model: Callable[..., Path], tmp_path: Path, native: bool, dtype: torch.dtype
) -> None:
    backend = make(tiny_model("llama"), native, dtype, block_size=20)
    io = CPUBlockIO(backend)
    tier = DiskTier(tmp_path, IDENTITY, 1 << 30, io)
    threads = torch.get_num_threads()
    fresh = itertools.count()
    orders = st.permutations(range(12))

    @settings(deadline=None, derandomize=True, max_examples=10)
    @given(st.integers(1, 11), orders, orders, st.integers(0, 1000))
    def check(count: int, saved: list[int], loaded: list[int], seed: int) -> None:
        keys = [key(next(fresh)) for _ in range(count)]
        source, target, others = saved[:count], loaded[:count], loaded[count:]
        fill(backend, seed)
        expected = bits(backend, source)
        tier.save(keys, source, io, io.mark())
        fill(backend, seed + 1)
        untouched = bits(backend, others)
        assert tier.load(keys, target, io, io.mark()) == count
        assert bits(backend, target) == expected
        assert bits(backend, others) == untouched

    mover = threading.Thread(target=check)
    mover.start()
    mover.join()
    assert tier.statistics().loaded > 0
    assert torch.get_num_threads() == threads
    io.close()
    with pytest.raises(RuntimeError, match="closed"):
        tier.load([key(0)], [0], io, None)


@torch.inference_mode()
def compute(backend: Backend, tokens: Sequence[int], blocks: Sequence[int], start: int) -> Any:
    """Scores after the last of `tokens`, of which those before `start` are in the pool."""
    size, end = backend.block_size, len(tokens)
    positions = np.arange(start, end)
    batch = kernels.PagedBatch(
        query_starts=[0, end - start],
        seq_lens=[end],
        block_tables=torch.tensor([list(blocks)]),
        block_starts=torch.tensor([[min(i * size, end) for i in range(len(blocks) + 1)]]),
        slots=torch.from_numpy(np.array(blocks)[positions // size] * size + positions % size),
        positions=torch.from_numpy(positions),
    )
    hidden = backend.forward(torch.tensor(tokens[start:end]), batch)
    return backend.logits(hidden[-1:])


@pytest.mark.parametrize(("native", "dtype"), BACKENDS)
def test_loaded_blocks_give_the_same_answer(
    tiny_model: Callable[..., Path], tmp_path: Path, native: bool, dtype: torch.dtype
) -> None:
    folder, tokens = tiny_model("qwen3"), list(range(4, 44))
    computed = make(folder, native, dtype)
    compute(computed, tokens[:32], [3, 1, 7], 0)
    io = CPUBlockIO(computed)
    DiskTier(tmp_path, IDENTITY, 1 << 30, io).save(keys_of(2), [3, 1], io, None)
    expected = compute(computed, tokens, [3, 1, 7], 32)

    opened = make(folder, native, dtype)
    fill(opened, 1)
    io = CPUBlockIO(opened)
    assert DiskTier(tmp_path, IDENTITY, 1 << 30, io).load(keys_of(2), [0, 5], io, None) == 2
    for pool in opened.pools:
        pool[2].zero_()  # the block that is computed: what is random may be NaN
    assert torch.equal(compute(opened, tokens, [0, 5, 2], 32), expected)


def test_layouts_name_what_differs(tiny_model: Callable[..., Path]) -> None:
    layouts = set()
    cases = [
        (False, torch.float32, 16),
        (False, torch.bfloat16, 16),
        (False, torch.float16, 16),
        (False, torch.float32, 32),
    ]
    for native, dtype, block_size in cases:
        io = CPUBlockIO(make(tiny_model("llama"), native, dtype, block_size))
        layouts.add(io.layout)
    assert len(layouts) == len(cases)
    native_layout = CPUBlockIO(make(tiny_model("llama"), True, torch.float32)).layout
    assert native_layout not in layouts


# ---- which model it is


def test_files_are_told_apart_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragserve.engine.offload.fingerprint._PIECE", 1000)
    data = np.random.default_rng(0).integers(0, 256, 4500, np.uint8).tobytes()
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(data)
    two.write_bytes(data[:2000])
    found = hash_files([one, two])
    assert found == hash_files([one, two])
    assert len(found) == 64
    hashes = {found, hash_files([two, one]), hash_files([one]), hash_files([two]), hash_files([])}
    for at in (0, 999, 1000, 4499):
        changed = bytearray(data)
        changed[at] ^= 1
        one.write_bytes(changed)
        hashes.add(hash_files([one, two]))
    one.write_bytes(data[:-1])
    hashes.add(hash_files([one, two]))
    assert len(hashes) == 10
    with pytest.raises(FileNotFoundError):
        hash_files([tmp_path / "absent"])


def test_tensors_are_told_apart() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    found = hash_tensors(tensors)
    assert found == hash_tensors(dict(reversed(tensors.items())))
    changed = torch.arange(6.0).view(2, 3).clone()
    changed[1, 2] += 1e-6
    others = [
        {**tensors, "a": changed},
        {**tensors, "a": tensors["a"].view(3, 2)},
        {**tensors, "a": tensors["a"].view(torch.int32)},
        {"b": tensors["a"], "a": tensors["b"]},
        {"a": tensors["a"]},
    ]
    assert len({found, *map(hash_tensors, others)}) == 6
    assert hash_tensors({**tensors, "a": tensors["a"].t().contiguous().t()}) == found


def test_identity_of_keys_and_values(tiny_model: Callable[..., Path]) -> None:
    def of(
        family: str = "llama",
        dtype: torch.dtype = torch.float32,
        length: int = 128,
        block_size: int = 16,
        **options: Any,
    ) -> dict[str, str]:
        model: DecoderModel = load_model(
            tiny_model(family, **options),
            dtype=dtype,
            device=torch.device("cpu"),
            max_model_len=length,
        )
        return kv_identity(model, hash_tensors(model.tensors()), block_size)

    plain = of()
    assert plain == of(length=256)
    assert of(dtype=torch.bfloat16)["dtype"] != plain["dtype"]
    assert of(block_size=32)["block_size"] != plain["block_size"]
    assert of("qwen2")["weights"] != plain["weights"]
    theta = {"rope_type": "default", "rope_theta": 500.0}
    assert of(rope_parameters=theta)["rope"] != plain["rope"]
    assert of(rms_norm_eps=1e-3)["config"] != plain["config"]
    # This scaling's frequencies depend on how long sequences may be.
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    one, other = (
        of(rope_parameters=dynamic, length=length, max_position_embeddings=256)["rope"]
        for length in (300, 500)
    )
    assert one != other


def opened(folder: Path, config: EngineConfig) -> LoadedModel:
    loaded = PretrainedModel(folder).load(config)
    loaded.close()
    return loaded


def test_loading_tells_the_identity_where_a_disk_is_used(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = EngineConfig(dtype="float32", kv_cache_bytes=1 << 24)
    with monkeypatch.context() as patch:
        patch.setattr("ragserve.engine.offload.fingerprint.hash_files", refuse)
        assert opened(tiny_model("llama"), plain).kv_identity is None
    config = replace(plain, disk_cache=tmp_path / "kv")
    loaded = opened(tiny_model("llama"), config)
    assert loaded.kv_identity is not None
    assert {"weights", "dtype", "block_size", "rope", "format"} <= set(loaded.kv_identity)
    assert "fingerprint" in loaded.seconds
    copy = Path(shutil.copytree(tiny_model("llama"), tmp_path / "copy"))
    assert opened(copy, config).kv_identity == loaded.kv_identity
    assert opened(tiny_model("llama3"), config).kv_identity != loaded.kv_identity
