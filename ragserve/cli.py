"""The command `ragserve`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ragserve.engine import RagserveError

from ._version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns its exit status."""
    arguments = _parser().parse_args(argv)
    status = 0
    try:
        arguments.run(arguments)
    # Task groups wrap what their tasks raise; except* takes it bare as well.
    except* RagserveError as group:
        for error in _leaves(group):
            print(f"ragserve: {error}", file=sys.stderr)
        status = 1
    except* KeyboardInterrupt:
        status = 130  # what shells report for a command ended by Ctrl-C
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ragserve", description="Retrieval-augmented generation inside your own process."
    )
    parser.add_argument("--version", action="version", version=f"ragserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="answer questions about Python from its own documentation",
        description="Answers several questions at the same time from the Python language "
        "reference, with a small model on the CPU, and shows where the time went.",
    )
    demo.add_argument("questions", nargs="*", metavar="question", help="instead of the usual ones")
    demo.set_defaults(run=_demo)
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import run  # pulls in OpenTelemetry's SDK, which --help has no use for

    run(arguments.questions)


def _leaves(group: BaseExceptionGroup[RagserveError]) -> list[RagserveError]:
    """The errors themselves, out of groups of groups."""
    leaves: list[RagserveError] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
