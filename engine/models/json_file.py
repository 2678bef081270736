"""JSON files of a model's folder, which anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError

__all__ = ["read_json_object"]

_MAX_BYTES = 1 << 25
"""The index of a model with 90,000 tensors has 9 MB."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    :raises ModelLoadError: if it cannot be read, is larger than 32 MiB, or holds anything else.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ModelLoadError(f"{path} is not a file")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ModelLoadError(f"{path} has more than {_MAX_BYTES} bytes; it is not a model's")
        values = json.loads(data)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    except RecursionError:  # without its traceback of a thousand lines
        raise ModelLoadError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} holds a {type(values).__name__}, not an object")
    return values
