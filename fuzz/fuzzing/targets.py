"""All targets, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import files
from .routes import RoutesTarget
from .target import Target

__all__ = ["SHARES", "corpus_of", "make_target"]

_MAKERS: dict[str, tuple[int, Callable[[Path], Target]]] = {
    "http-h11": (3, lambda scratch: RoutesTarget("h11")),
    "http-httptools": (3, lambda scratch: RoutesTarget("httptools")),
    "gguf": (2, files.GGUFTarget),
    "safetensors": (1, lambda scratch: files.WeightsTarget(scratch, index=False)),
    "safetensors-index": (1, lambda scratch: files.WeightsTarget(scratch, index=True)),
    "config": (1, lambda scratch: files.ConfigTarget(scratch, "config.json")),
    "generation-config": (1, lambda scratch: files.ConfigTarget(scratch, "generation_config.json")),
    "tokenizer": (1, lambda scratch: files.TokenizerTarget(scratch, "tokenizer.json")),
    "tokenizer-config": (
        1,
        lambda scratch: files.TokenizerTarget(scratch, "tokenizer_config.json"),
    ),
    "chat-template": (1, files.TemplateTarget),
    "index": (1, files.IndexTarget),
    "disk-tier": (1, files.BlockTarget),
}

SHARES = {name: share for name, (share, _) in _MAKERS.items()}
"""Each target's share of a campaign's time."""


def make_target(name: str, scratch: Path) -> Target:
    """A target, not started yet.

    :param scratch: a folder of its own, which need not exist.
    """
    return _MAKERS[name][1](scratch / name)


def corpus_of(name: str) -> list[bytes]:
    """Inputs that were kept: one that found a fault stays, so that the fault does not return."""
    folder = Path(__file__).resolve().parents[1] / "corpus" / name
    return [path.read_bytes() for path in sorted(folder.glob("*"))]
