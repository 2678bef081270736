"""Which models take requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ragserve.engine import Engine
from ragserve.pipeline.rag_pipeline import RagPipeline

__all__ = ["health_of"]

_ORDER: Final = ("ready", "loading", "draining", "closed", "dead")
"""From the best to the worst."""


def health_of(models: Mapping[str, Engine | RagPipeline | None]) -> tuple[dict[str, Any], bool]:
    """What `/health` says, and whether all models take requests.

    A model's status is its engine's: ready, draining, closed or dead; or loading, if it is not
    there yet. The whole has the worst of them, and without any model is loading.
    """
    known: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        if model is None:
            known[name] = {"status": "loading"}
            continue
        health = (model.engine if isinstance(model, RagPipeline) else model).health()
        known[name] = {"status": health.status}
        if health.error is not None:
            # Its kind only: who asks this needs no key.
            known[name]["error"] = type(health.error).__name__
    worst = max((m["status"] for m in known.values()), key=_ORDER.index, default="loading")
    return {"status": worst, "models": known}, worst == "ready"
