"""Workers for all targets, watched, and a table of what they found."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .target import ROOT, SECONDS_LIMIT
from .targets import SHARES
from .worker import current_input

__all__ = ["Result", "campaign", "report"]

_START_SECONDS = 60.0
"""For the imports of a worker, before its first input."""
_PATIENCE = 4
"""Times the limit that a hang may last while its process gets little of the processor."""


@dataclass
class Result:
    """What came of a target."""

    inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    """Workers that a crash or a hang has ended."""


class _Shift:
    """A worker's process, and how it is watched."""

    def __init__(
        self, name: str, folder: Path, failures: Path, seconds: float, seed: int, guided: bool
    ) -> None:
        self.name = name
        self._folder, self._failures = folder, failures
        self.began = time.monotonic()
        self._seconds = seconds
        self._since: tuple[float, float] = (0.0, 0.0)  # the input's begin, processor time then
        self._first = False
        folder.mkdir(parents=True)
        command = [sys.executable, "-P", str(ROOT / "fuzz"), "_work", name, str(folder),
                   str(failures), str(seconds), str(seed)]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                                    "RAGSERVE_CACHE": str(folder / "cache"),
                                    "HF_HUB_OFFLINE": "1"}  # fmt: skip
        self._output = (folder / "output").open("wb")
        self._process = subprocess.Popen(
            [*command, *(["--guided"] if guided else [])],
            env=environment,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )

    def _processor_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return float("inf")

    def over(self) -> bool:
        """Whether it has ended, or was ended since it hangs."""
        if self._process.poll() is not None:
            return True
        began, _ = current_input(self._folder)
        self._first = self._first or began > 0
        if began == 0.0:
            late = time.monotonic() - self.began > self._seconds + 2 * _START_SECONDS
            if late:
                self._process.kill()
            return False
        if began != self._since[0]:
            self._since = (began, self._processor_seconds())
        waited = time.time() - began
        used = self._processor_seconds() - self._since[1]
        # On a busy machine time passes that is not the input's.
        if waited > SECONDS_LIMIT and (
            used > SECONDS_LIMIT / 2 or waited > _PATIENCE * SECONDS_LIMIT
        ):
            self._process.send_signal(signal.SIGUSR1)  # writes where it stands
            time.sleep(0.5)
            self._keep(f"no end within {SECONDS_LIMIT:.0f} s")
            self._process.kill()
            self._process.wait()
            return True
        return False

    def finish(self, result: Result) -> bool:
        """Add up what it has done; whether it ended as it should."""
        code = self._process.wait()
        self._output.close()
        began, _ = current_input(self._folder)
        fine = code == 0
        if not fine and began and code != -signal.SIGKILL:
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            self._keep(f"the process ended by {how}")
        state = {"inputs": 0, "outcomes": {}}
        if (self._folder / "state.json").exists():
            state = json.loads((self._folder / "state.json").read_text())
        result.inputs += int(state["inputs"])  # type: ignore[call-overload]
        result.outcomes.update(state["outcomes"])  # type: ignore[arg-type]
        result.seconds += time.monotonic() - self.began
        if not fine:
            result.ended += 1
            if not began:
                tail = (self._folder / "output").read_bytes()[-2000:].decode("utf-8", "replace")
                print(f"{self.name}: a worker ended with {code}, between inputs:\n{tail}")
        shutil.rmtree(self._folder, ignore_errors=True)
        return fine

    def _keep(self, how: str) -> None:
        _, data = current_input(self._folder)
        stack = (self._folder / "stack").read_text("utf-8", "replace")
        lines = [line.partition(f"{ROOT}/")[2] for line in stack.splitlines()]
        ours = [line for line in lines if line and not line.startswith(("fuzz/", "."))]
        where = ours[0].replace('", line ', ":").partition(" ")[0] if ours else "?"
        name = f"{how} {where}"
        folder = self._failures / self.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        if not path.exists():
            path.write_bytes(data)
            path.with_suffix(".txt").write_text(f"{name}\n\n{stack}")


def campaign(
    minutes: float, failures: Path, *, names: Sequence[str], seed: int, jobs: int, guided: bool
) -> dict[str, Result]:
    """Feed targets, `jobs` of them at a time, and give each its share of the time."""
    scratch = Path(tempfile.mkdtemp(prefix="ragserve-fuzz-"))
    total = sum(SHARES[name] for name in names)
    budget = minutes * 60 * jobs
    left = {name: budget * SHARES[name] / total for name in names}
    results = {name: Result() for name in names}
    waiting, running = list(names), list[_Shift]()
    number = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                number += 1
                folder = scratch / f"{name}-{number}"
                running.append(_Shift(name, folder, failures, left[name], seed + number, guided))
            time.sleep(0.2)
            for shift in [shift for shift in running if shift.over()]:
                running.remove(shift)
                used = time.monotonic() - shift.began
                left[shift.name] -= used
                if not shift.finish(results[shift.name]) and left[shift.name] > 5:
                    waiting.insert(0, shift.name)
    finally:
        for shift in running:
            shift._process.kill()
            shift.finish(results[shift.name])
        shutil.rmtree(scratch, ignore_errors=True)
    return results


def report(results: dict[str, Result], failures: Path, seed: int) -> int:
    """Print the table and the faults.

    :returns: how many different faults there are.
    """
    print(f"{'target':<20}{'inputs':>9}{'per s':>8}  outcomes")
    for name, result in results.items():
        rate = result.inputs / result.seconds if result.seconds else 0
        common = ", ".join(f"{what} {n}" for what, n in result.outcomes.most_common(6))
        print(f"{name:<20}{result.inputs:>9}{rate:>8.0f}  {common}")
    inputs = sum(result.inputs for result in results.values())
    faults = [path for name in results for path in sorted((failures / name).glob("*.txt"))]
    print(f"{inputs} inputs, seed {seed}, {len(faults)} faults")
    for text in faults:
        first = text.read_text("utf-8", "replace").splitlines()[0]
        path = text.with_suffix("")
        print(f"\n{text.parent.name}: {first}")
        print(f"  {path.stat().st_size} bytes; again: ", end="")
        print(f"{Path(sys.executable)} -P fuzz again {text.parent.name} {path}")
    return len(faults)
