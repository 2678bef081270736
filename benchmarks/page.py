"""The parts of a page that benchmarks write: between markers, so that prose around them stays."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_part"]


def write_part(path: Path, name: str, text: str) -> None:
    """Put `text` between `<!-- NAME:begin -->` and `<!-- NAME:end -->` of a file.

    :raises ValueError: if the markers are not there; the file is left alone.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")
