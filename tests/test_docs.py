"""What the API reference shows: every public name has a docstring."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

PUBLIC = (
    "ragserve",
    "ragserve.documents",
    "ragserve.retrieval",
    "ragserve.prompting",
    "ragserve.pipeline",
    "ragserve.observability",
    "ragserve.web",
    "ragserve.testing",
    "ragserve.bench",
)
"""The modules that `make docs` is given."""


def members(owner: type) -> Iterator[tuple[str, object]]:
    """Public functions and properties that a class of ours defines."""
    for name, value in vars(owner).items():
        if not name.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
        ):
            yield name, value


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module: str) -> None:
    face = importlib.import_module(module)
    assert face.__doc__
    missing = []
    for name in face.__all__:
        value = getattr(face, name)
        if not inspect.isclass(value):
            if inspect.isfunction(value) and not inspect.getdoc(value):
                missing.append(name)
            continue
        # A dataclass without a docstring is given its signature.
        if (vars(value).get("__doc__") or f"{name}(").startswith(f"{name}("):
            missing.append(name)
        missing += [f"{name}.{m}" for m, member in members(value) if not inspect.getdoc(member)]
    assert not missing


def test_make_docs_shows_these_modules() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    assert f"API := {' '.join(PUBLIC)}\n" in makefile
