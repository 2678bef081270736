"""What can be asked: engines and pipelines, by the names that requests know them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ragserve.engine import Engine, InvalidParamsError
from ragserve.pipeline.rag_pipeline import RagPipeline

from ..problem import Problem
from .protocol import Bounds

__all__ = ["Engines", "Models", "Pipelines"]

Engines: TypeAlias = Mapping[str, Engine] | Mapping[str, Engine | None]
"""None is one that is still loading."""
Pipelines: TypeAlias = Mapping[str, RagPipeline] | Mapping[str, RagPipeline | None]


class Models:
    """Both mappings as one. They are looked at anew each time, so they may be filled later.

    :raises InvalidParamsError: if a name is in both.
    """

    def __init__(self, engines: Engines, pipelines: Pipelines) -> None:
        if twice := engines.keys() & pipelines.keys():
            raise InvalidParamsError("rag", min(twice), "a name that is no engine's")
        self._engines = engines
        self._pipelines = pipelines

    def all(self) -> dict[str, Engine | RagPipeline | None]:
        """Those there are now; None is one that is still loading."""
        return {**self._pipelines, **self._engines}

    def bounds(self, name: str) -> Bounds:
        """What the model of that name can take.

        :raises Problem: as `find`.
        """
        model = self.find(name)
        engine = model.engine if isinstance(model, RagPipeline) else model
        template = engine.tokenizer.chat_template or ""
        return Bounds(
            engine.config.limits, engine.config.max_model_len, writes_tools="tool_calls" in template
        )

    def find(self, name: str) -> Engine | RagPipeline:
        """The model of that name.

        :raises Problem: 404 if there is none; 503 if it is still loading.
        """
        known = self.all()
        if name not in known:
            raise Problem(
                404,
                f"there is no model {name!r:.100}; there are: {', '.join(known) or 'none yet'}",
                param="model",
                code="model_not_found",
            )
        model = known[name]
        if model is None:
            raise Problem(
                503,
                f"model {name!r} is still loading",
                code="model_loading",
                headers={"retry-after": "2"},
            )
        return model
