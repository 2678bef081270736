"""The C kernels under sanitizers: `python -P fuzz/sanitize.py`, or `make sanitize`.

Two builds of `kernels/cpu/native.c`: one with the address and undefined-behaviour sanitizers, one
with the thread sanitizer. Under each, the tests of the kernels run at every instruction set that
this processor has, and those of `fuzz/test_kernel_edges.py`. Sanitizers are gcc's; Python itself,
and torch, are the ordinary builds, with the sanitizer's library loaded first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "fuzz"
BUILD = ROOT / "build" / "sanitize"
SOURCE = ROOT / "kernels" / "cpu" / "native.c"
TESTS = [ROOT / "tests" / "kernels" / "test_native.py", FUZZ / "test_kernel_edges.py"]
# As pyproject.toml builds it, at a level where the sanitizers still name lines.
FLAGS = [
    "-shared",
    "-fPIC",
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-ffp-contract=off",
    "-Wno-psabi",
]


@dataclass(frozen=True)
class Sanitizer:
    """How to build and run under one.

    :param flags: of the compiler.
    :param libraries: of the sanitizer, to load before Python.
    :param environment: its options.
    """

    name: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    environment: dict[str, str]
    sources: tuple[Path, ...] = (SOURCE,)


def sanitizers(reports: Path) -> list[Sanitizer]:
    """Both, whose reports go to files of a folder."""
    address = Sanitizer(
        "address+undefined",
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        ("libasan.so", "libubsan.so"),
        {
            # Python keeps much until its end: leaks are not what is looked for.
            "ASAN_OPTIONS": f"detect_leaks=0:exitcode=66:log_path={reports}/address",
            "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode=66:log_path={reports}/undefined",
        },
    )
    thread = Sanitizer(
        "thread",
        ("-fsanitize=thread",),
        ("libtsan.so",),
        {
            # What Python and torch do among themselves cannot be followed.
            "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=66:"
            f"log_path={reports}/thread",
            "RAGSERVE_SANITIZE_THREADS": "4",
            "OMP_NUM_THREADS": "1",
        },
        (SOURCE, FUZZ / "threads.c"),
    )
    return [address, thread]


def library_of(compiler: str, name: str) -> str | None:
    """Where the compiler has a library; None if it has not."""
    found = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return found if os.path.isabs(found) and Path(found).exists() else None


def build(compiler: str, sanitizer: Sanitizer) -> Path:
    """Compile, unless this source was compiled so before. Takes a minute or two."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (*FLAGS, *sanitizer.flags):
        digest.update(part.encode())
    for source in sanitizer.sources:
        digest.update(source.read_bytes())
    library = BUILD / f"{sanitizer.name}-{digest.hexdigest()}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(".new")
        command = [compiler, *FLAGS, *sanitizer.flags, "-o", str(new)]
        subprocess.run([*command, *map(str, sanitizer.sources), "-lm"], check=True)
        new.replace(library)
    return library


def run(sanitizer: Sanitizer, library: Path, preload: list[str], arguments: list[str]) -> int:
    """Run the tests; their exit status."""
    environment = os.environ | sanitizer.environment
    environment |= {
        "LD_PRELOAD": ":".join(preload),
        "RAGSERVE_NATIVE_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(FUZZ), os.environ.get("PYTHONPATH")))),
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-P", "-m", "pytest", "-p", "native_sanitizer",
               "-p", "no:cacheprovider", "-o", "timeout=1200",
               *map(str, TESTS), *arguments]  # fmt: skip
    if (setarch := shutil.which("setarch")) is not None:
        # The thread sanitizer wants memory where a randomised layout may put something else.
        command = [setarch, "-R", *command]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def main() -> int:
    """The command line.

    :returns: 0 if all is clean; 1 if there are findings; 2 if something is missing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["address+undefined", "thread"])
    parser.add_argument("--cc", default=os.environ.get("CC", "gcc"))
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    given = parser.parse_args()
    if shutil.which(given.cc) is None:
        print(f"missing: the compiler {given.cc}; install gcc, or name another one with --cc")
        return 2
    levels = levels_here()
    reports = BUILD / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    clean = True
    for sanitizer in sanitizers(reports):
        if given.only not in (None, sanitizer.name):
            continue
        preload = {name: library_of(given.cc, name) for name in sanitizer.libraries}
        if absent := [name for name, path in preload.items() if path is None]:
            print(f"missing: {', '.join(absent)} of {given.cc}; install its sanitizer libraries")
            return 2
        began = time.monotonic()
        library = build(given.cc, sanitizer)
        status = run(sanitizer, library, [path for path in preload.values() if path], given.pytest)
        found = sorted(path for path in reports.iterdir() if path.stat().st_size)
        for path in found:
            print(f"==== {path.name}\n{path.read_text(errors='replace')[:6000]}")
            path.unlink()
        fine = status == 0 and not found
        clean = clean and fine
        verdict = "clean" if fine else f"{len(found)} reports, pytest's status {status}"
        took = time.monotonic() - began
        print(f"{sanitizer.name}: {verdict} ({', '.join(levels)}; {took:.0f} s)", flush=True)
    return 0 if clean else 1


def levels_here() -> list[str]:
    """The instruction sets that the tests run at."""
    from ragserve.kernels.cpu import native

    best = native.NativeOps(native.library_path()).level
    return list(native.LEVELS[: native.LEVELS.index(best) + 1])


if __name__ == "__main__":
    sys.exit(main())
