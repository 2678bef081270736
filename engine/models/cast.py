"""A model folder in a narrower dtype: made once, kept in the user's cache, read ever after."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .config import ModelConfig
from .conversion_cache import RECORD, cache_directory, check_room, make_folder, short_name
from .decoder import check_shapes
from .weights import DTYPES, Checkpoint

__all__ = ["cast"]

_logger = logging.getLogger("ragserve")

_VERSION = "2"
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
    config, checkpoint = ModelConfig.from_folder(folder), Checkpoint(folder)
    stored = checkpoint.dtype.itemsize
    if dtype.itemsize >= stored:
        return folder
    check_shapes(config, checkpoint)  # refused before, not after, gigabytes are written
    name = str(dtype).removeprefix("torch.")
    files = checkpoint.files
    besides = sorted(
        file
        for pattern in _BESIDES
        for file in folder.glob(pattern)
        if file.is_file() and file.name != RECORD
    )
    state = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in (*files, *besides)]
    facts = json.dumps([_VERSION, str(folder.resolve()), name, state])
    fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def write(scratch: Path) -> None:
        check_room(scratch, sum(file.stat().st_size for file in files) * dtype.itemsize // stored)
        _logger.info("casting %s to %s, once, for the cache", folder, name)
        for file in besides:
            shutil.copyfile(file, scratch / file.name)
        for file in files:
            names = [name for name, tensor in checkpoint.tensors.items() if tensor.file == file]
            tensors = {
                tensor: (value.to(dtype) if value.dtype in DTYPES else value.clone())
                for tensor, value in checkpoint.read(names)
            }
            save_file(tensors, scratch / file.name, metadata={"format": "pt"})

    try:
        target = (
            cache_directory() / "models" / f"{short_name(folder.name)}-{name}-{fingerprint[:16]}"
        )
        return make_folder(target, fingerprint, write)
    except (OSError, SafetensorError) as error:  # the latter if the disk is full
        _logger.warning("%s is not kept in %s: %s", folder, name, error)
        return folder
