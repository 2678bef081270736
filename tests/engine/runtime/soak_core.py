"""The state machine over the whole core, for as long as you like.

    make soak-core MINUTES=30
    .venv/bin/python -P tests/engine/runtime/soak_core.py --seed 12345 --rounds 1

A round is 200 runs of up to 80 things that happen, drawn from the round's seed, which is printed.
A failure is made small by Hypothesis and printed as the steps that lead to it; the exit status is
then 1, and the last line says how to see it again.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

HERE = Path(__file__).resolve().parent
RUNS, STEPS = 200, 80


def machine() -> Any:
    """`CoreMachine` of `test_core_machine.py`, which pytest imports by its path, too."""
    sys.path.insert(0, str(HERE.parents[1] / "support"))
    spec = importlib.util.spec_from_file_location(
        "test_core_machine", HERE / "test_core_machine.py"
    )
    if spec is None or spec.loader is None:
        raise FileNotFoundError(HERE / "test_core_machine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.CoreMachine


def soak(seed: int, minutes: float, rounds: int | None) -> bool:
    """Run rounds from `seed` on; whether none failed."""
    # Tiers that fail are part of it, and say so.
    logging.getLogger("ragserve").setLevel(logging.CRITICAL)
    core_machine, end, number = machine(), time.monotonic() + 60 * minutes, 0
    settings = hypothesis.settings(
        max_examples=RUNS,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    while number < rounds if rounds is not None else time.monotonic() < end:
        try:
            run_state_machine_as_test(
                hypothesis.seed(seed + number)(core_machine), settings=settings
            )
        except Exception:
            traceback.print_exc()
            again = f"{sys.executable} -P {Path(__file__).name} --seed {seed + number} --rounds 1"
            print(f"seed {seed + number} failed; in tests/, again: {again}", flush=True)
            return False
        number += 1
        print(f"seed {seed + number - 1}: {RUNS} runs passed", flush=True)
    return True


def main() -> int:
    """0 if nothing failed."""
    parser = argparse.ArgumentParser(description="the core's state machine, for a long time")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, help="so many, rather than for some minutes")
    parser.add_argument("--seed", type=int, help="of the first round; default: drawn")
    parser.add_argument("--jobs", type=int, default=1, help="processes, with seeds of their own")
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    if arguments.jobs == 1:
        return 0 if soak(seed, arguments.minutes, arguments.rounds) else 1
    command = [
        sys.executable,
        "-P",
        str(HERE / "soak_core.py"),
        "--minutes",
        str(arguments.minutes),
    ]
    if arguments.rounds is not None:
        command += ["--rounds", str(arguments.rounds)]
    children = [
        subprocess.Popen([*command, "--seed", str(seed + 1_000_000 * job)])
        for job in range(arguments.jobs)
    ]
    failed = sum(child.wait() != 0 for child in children)
    print(f"{arguments.jobs} processes, first seed {seed}: {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
