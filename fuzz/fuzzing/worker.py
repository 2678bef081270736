"""One process that feeds one target: what it does now can be read by others while it does it.

Inputs come from atheris (libFuzzer), guided by the coverage of the target's modules, where it is
installed; else from a corpus that grows by each input with an outcome that was not seen yet.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib.util
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .minimise import minimise
from .target import MEMORY_LIMIT, ROOT, Target, signature
from .targets import corpus_of, make_target

__all__ = ["CURRENT", "MAX_BYTES", "Judge", "current_input", "work"]

MAX_BYTES = 1 << 20
"""Longest input."""
CURRENT = "current"
"""The file that holds the input under way: when it began (0: none is), its length, its bytes."""
_HEAD = struct.Struct("<dQ")


def current_input(folder: Path) -> tuple[float, bytes]:
    """When the input under way began, by `time.time`, and the input. 0: there is none."""
    with contextlib.suppress(OSError, struct.error):
        data = (folder / CURRENT).read_bytes()
        began, size = _HEAD.unpack_from(data)
        return began, data[_HEAD.size : _HEAD.size + size]
    return 0.0, b""


def _peak_memory(*, reset: bool = False) -> int:
    """Most bytes that this process held since it was last reset; 0 where nobody can tell."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@dataclass
class Judge:
    """Feeds a target and says what was wrong.

    :param target: what is fed.
    """

    target: Target
    outcomes: Counter[str] = field(default_factory=Counter)

    def fault(self, data: bytes) -> tuple[str, str] | None:
        """Feed one input.

        :returns: None, or the fault: its signature and the traceback.
        """
        before = _peak_memory(reset=True)
        try:
            outcome = self.target.run(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        # A panic of Rust's is no Exception, and passes whatever catches those.
        except BaseException as error:
            name = signature(error)
            self.outcomes[f"FAULT {name}"] += 1
            return name, "".join(traceback.format_exception(error))
        grown = _peak_memory() - before
        if grown > MEMORY_LIMIT:
            name = f"memory grew by more than {MEMORY_LIMIT >> 20} MB"
            self.outcomes[f"FAULT {name}"] += 1
            return name, f"it grew by {grown >> 20} MB; outcome: {outcome}\n"
        self.outcomes[outcome] += 1
        return None


class _Worker:
    def __init__(self, name: str, folder: Path, failures: Path, seed: int) -> None:
        self.target = make_target(name, folder / "scratch")
        self.judge = Judge(self.target)
        self.rng = random.Random(seed)
        self._failures = failures / name
        self._folder = folder
        self._seen: Counter[str] = Counter()
        self._count = 0
        self._written = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / CURRENT
        path.write_bytes(bytes(_HEAD.size + MAX_BYTES))
        with path.open("r+b") as file:
            self._current = mmap.mmap(file.fileno(), 0)
        self._stack = (folder / "stack").open("w")
        faulthandler.enable(self._stack)
        faulthandler.register(signal.SIGUSR1, self._stack, all_threads=True)

    def feed(self, data: bytes) -> None:
        """One input, kept for the parent while it runs."""
        data = data[:MAX_BYTES]
        # The time last: whoever reads it finds the input that it belongs to.
        self._current[_HEAD.size : _HEAD.size + len(data)] = data
        self._current[: _HEAD.size] = _HEAD.pack(time.time(), len(data))
        fault = self.judge.fault(data)
        self._current[: _HEAD.size] = _HEAD.pack(0.0, 0)
        self._count += 1
        if fault is not None:
            self._keep(data, *fault)
        if time.monotonic() - self._written > 0.5:
            self.write()

    def _keep(self, data: bytes, name: str, text: str) -> None:
        self._seen[name] += 1
        if self._seen[name] > 1:
            return
        self._failures.mkdir(parents=True, exist_ok=True)
        stem = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        path = self._failures / stem
        if path.exists():
            return  # another worker's
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{name}\n\n{text}", "utf-8", "replace")
        judge = Judge(self.target)  # what minimising tries is not counted

        def fails(other: bytes) -> bool:
            found = judge.fault(other)
            return found is not None and found[0] == name

        if not fails(data):
            path.with_suffix(".txt").write_text(
                f"{name} (not every time)\n\n{text}", "utf-8", "replace"
            )
            return
        path.write_bytes(minimise(data, fails))

    def write(self) -> None:
        """What the parent adds up."""
        self._written = time.monotonic()
        state = {"inputs": self._count, "outcomes": self.judge.outcomes}
        path = self._folder / "state.json"
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").replace(path)

    def close(self) -> None:
        """The end of a shift."""
        self.write()
        self.target.close()


def work(
    name: str, folder: Path, failures: Path, seconds: float, seed: int, *, guided: bool
) -> None:
    """Feed a target for some time.

    :param folder: the worker's own; what it does can be read there.
    :param failures: where failing inputs go, in a folder of the target's name.
    :param guided: by coverage, with atheris.
    """
    logging_off()
    worker = _Worker(name, folder, failures, seed)
    corpus = [*worker.target.seeds(), *corpus_of(name)]
    # What the first input imports and starts is not its own.
    Judge(worker.target).fault(corpus[0])
    _bound_memory()
    for data in corpus:
        worker.feed(data)
    if guided and importlib.util.find_spec("atheris") is not None:
        _guided(worker, corpus, folder / "corpus", seconds, seed)
        return
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            data = worker.target.mutate(worker.rng, worker.rng.choice(corpus))
            seen = len(worker.judge.outcomes)
            worker.feed(data)
            if len(worker.judge.outcomes) > seen and len(data) < 65536:
                corpus.append(data)
    finally:
        worker.close()


def _guided(worker: _Worker, corpus: list[bytes], folder: Path, seconds: float, seed: int) -> None:
    import atheris

    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(corpus):
        (folder / f"{number:03}").write_bytes(data)
    deadline = time.monotonic() + seconds
    rng = worker.rng

    def feed(data: bytes) -> None:
        worker.feed(data)
        if time.monotonic() > deadline:
            worker.close()
            sys.stdout.flush()
            os._exit(0)  # libFuzzer looks at the time in its own rhythm

    def mutate(data: bytes, max_size: int, number: int) -> bytes:
        rng.seed(number)
        return bytes(worker.target.mutate(rng, bytes(data))[:max_size])

    options = ["-timeout=100000", "-rss_limit_mb=0", "-handle_segv=0", "-handle_abrt=0",
               "-handle_bus=0", "-handle_fpe=0", "-handle_ill=0", "-verbosity=0", "-len_control=0",
               f"-max_len={MAX_BYTES}", f"-seed={seed % 2**31 or 1}", "-detect_leaks=0",
               "-print_final_stats=0", f"-artifact_prefix={folder}/"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(folder)], feed, custom_mutator=mutate)
    atheris.Fuzz()


def _bound_memory() -> None:
    """Let the allocator refuse what would take the machine's memory from others."""
    try:
        import resource

        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                most = int(line.split()[1]) * 1024 + (2 << 30)
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    except (ImportError, OSError):
        pass  # nothing bounds it there


def instrument(name: str) -> None:
    """Have the target's modules count what of them runs; before anything imports them."""
    import atheris

    target = make_target(name, ROOT / "none")
    # The hooks stay: targets import when they first run.
    manager = atheris.instrument_imports(include=list(target.modules), enable_loader_override=False)
    manager.__enter__()


def logging_off() -> None:
    """Warnings about broken files are what is asked for here."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
