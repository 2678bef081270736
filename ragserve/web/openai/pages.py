"""The routes that only look: models, health, metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ragserve.engine import Engine
from ragserve.observability.metrics import Metrics
from ragserve.pipeline.rag_pipeline import RagPipeline

from ..bodies import json_response
from ..health import health_of
from ..limits import Keyring
from .models import Models

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

__all__ = ["Pages"]


class Pages:
    """Endpoints of `GET` routes.

    :param metrics: what is shown; None is what the models count.
    """

    def __init__(self, models: Models, keys: Keyring, metrics: Metrics | None) -> None:
        self._models = models
        self._keys = keys
        self._metrics = metrics
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """`/v1/models`: those that can be asked now."""
        self._keys.find(request.headers.get("authorization"))
        known = self._models.all()
        return json_response(
            {
                "object": "list",
                "data": [
                    self._card(name, model) for name, model in known.items() if model is not None
                ],
            }
        )

    async def model(self, request: Request) -> Response:
        """`/v1/models/NAME`."""
        self._keys.find(request.headers.get("authorization"))
        name = request.path_params["name"]
        return json_response(self._card(name, self._models.find(name)))

    async def health(self, request: Request) -> Response:
        """`/health`: 200 if every model takes requests, else 503."""
        health, ready = health_of(self._models.all())
        return json_response(health, 200 if ready else 503, {"cache-control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        """`/metrics`, in Prometheus' text format."""
        self._keys.check_metrics(request.headers.get("authorization"))
        metrics = self._metrics
        text = _exposition(self._models.all()) if metrics is None else metrics.prometheus()
        return Response(text, headers={"content-type": Metrics.content_type})

    def _card(self, name: str, model: Engine | RagPipeline) -> dict[str, Any]:
        engine = model.engine if isinstance(model, RagPipeline) else model
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "ragserve",
            "max_model_len": engine.config.max_model_len,
        }


def _exposition(models: Mapping[str, Engine | RagPipeline | None]) -> str:
    """What the models have counted since they were opened.

    Nothing is kept between two scrapes, for the models may be others by then. OpenTelemetry is
    told nothing: that is for who makes a `Metrics` of their own.
    """
    metrics = Metrics(meter_provider=_silent_provider())
    try:
        shown: set[int] = set()
        for name, model in models.items():
            if model is not None and id(model) not in shown:  # one may have several names
                shown.add(id(model))
                metrics.add(model, name)
        for model in models.values():
            if isinstance(model, RagPipeline) and id(model.engine) not in shown:
                shown.add(id(model.engine))
                metrics.add(model.engine)
        return metrics.prometheus()
    finally:
        metrics.close()


def _silent_provider() -> MeterProvider | None:
    """A meter provider that records nothing; None without OpenTelemetry."""
    try:
        from opentelemetry.metrics import NoOpMeterProvider
    except ImportError:
        return None
    return NoOpMeterProvider()
