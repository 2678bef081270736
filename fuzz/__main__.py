"""`python -P fuzz run --minutes 10`; `python -P fuzz again TARGET FILE` runs one input."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from pathlib import Path

from fuzzing.targets import SHARES

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """The command line.

    :returns: 0 if there is no fault, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -P fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="feed all targets, or some")
    run.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(SHARES))
    run.add_argument("--minutes", type=float, default=1.0)
    run.add_argument("--seed", type=int, default=int(time.time()))
    run.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    run.add_argument("--failures", type=Path, default=FOLDER / "failures")
    run.add_argument("--unguided", action="store_true", help="without atheris")
    again = commands.add_parser("again", help="feed one input, and say what came of it")
    again.add_argument("target", choices=list(SHARES))
    again.add_argument("file", type=Path)
    work = commands.add_parser("_work")
    work.add_argument("target")
    work.add_argument("folder", type=Path)
    work.add_argument("failures", type=Path)
    work.add_argument("seconds", type=float)
    work.add_argument("seed", type=int)
    work.add_argument("--guided", action="store_true")
    given = parser.parse_args()

    if given.command == "run":
        from fuzzing.campaign import campaign, report

        unknown = sorted(set(given.targets) - set(SHARES))
        if unknown:
            parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(SHARES)}")
        results = campaign(
            given.minutes,
            given.failures.resolve(),
            names=given.targets or list(SHARES),
            seed=given.seed,
            jobs=given.jobs,
            guided=not given.unguided,
        )
        return 1 if report(results, given.failures, given.seed) else 0
    if given.command == "_work":
        from fuzzing import worker

        if given.guided:
            try:
                worker.instrument(given.target)
            except ImportError:
                print("atheris is not installed: inputs are not guided by coverage")
        worker.work(
            given.target, given.folder, given.failures, given.seconds, given.seed,
            guided=given.guided,
        )  # fmt: skip
        return 0
    return _again(given.target, given.file)


def _again(name: str, file: Path) -> int:
    from fuzzing.targets import make_target
    from fuzzing.worker import Judge, logging_off

    logging_off()
    faulthandler.enable()
    faulthandler.dump_traceback_later(20, exit=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["RAGSERVE_CACHE"] = scratch
        target = make_target(name, Path(scratch))
        judge = Judge(target)
        data = file.read_bytes()
        if "http" not in name:
            for seed in target.seeds()[:1]:
                judge.fault(seed)  # imports, which take memory and time
        began = time.perf_counter()
        fault = judge.fault(data)
        took = time.perf_counter() - began
        target.close()
    if fault is None:
        print(f"no fault, in {took:.2f} s: {list(judge.outcomes)[-1]}")
        return 0
    print(f"{fault[1]}\n{fault[0]}, in {took:.2f} s")
    return 1


if __name__ == "__main__":
    sys.exit(main())
