"""A model folder in a narrower dtype: made once, kept in the user's cache, read ever after."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..cache import cache_directory, make_folder
from .config import ModelConfig
from .weights import DTYPES, Checkpoint

__all__ = ["cast"]

_logger = logging.getLogger("ragserve")

_VERSION = "1"
"""Part of every fingerprint; raise it when what is written changes."""

_BESIDES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")


def cast(folder: Path, dtype: torch.dtype) -> Path:
    """A folder with the same model in `dtype`, if that is narrower than what it is stored in.

    Opening a model in half the width then reads half the bytes. Files are cast one after the
    other, so that no more than one is in memory. Where there is no room on the disk the folder
    itself is returned, and the weights are cast each time that they are read.

    :raises ModelLoadError: if the weights are missing or broken.
    :raises UnsupportedModelError: if it is a model that cannot be run anyway.
    """
    ModelConfig.from_folder(folder)  # refused before, not after, gigabytes are written
    checkpoint = Checkpoint(folder)
    if dtype.itemsize >= checkpoint.dtype.itemsize:
        return folder
    name = str(dtype).removeprefix("torch.")
    files = sorted(set(checkpoint.files.values()))
    state = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    facts = json.dumps([_VERSION, str(folder.resolve()), name, state])
    fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
    target = cache_directory() / "models" / f"{folder.name}-{name}-{fingerprint[:16]}"

    def write(scratch: Path) -> None:
        _logger.info("casting %s to %s, once, into %s", folder, name, target)
        for pattern in _BESIDES:
            for file in folder.glob(pattern):
                if not file.name.startswith("conversion"):
                    shutil.copyfile(file, scratch / file.name)
        for file in files:
            names = [tensor for tensor, home in checkpoint.files.items() if home == file]
            tensors = {
                tensor: (value.to(dtype) if value.dtype in DTYPES else value.clone())
                for tensor, value in checkpoint.read(names)
            }
            save_file(tensors, scratch / file.name, metadata={"format": "pt"})

    try:
        return make_folder(target, fingerprint, write)
    except OSError as error:
        _logger.warning("%s is not kept in %s: %s", folder, name, error)
        return folder
