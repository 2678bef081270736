"""Which model keys and values belong to: what must be the same for blocks to be used again."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..models.rope import inverse_frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.decoder import DecoderModel

__all__ = ["KV_FORMAT", "hash_files", "hash_tensors", "kv_identity"]

KV_FORMAT = "1"
"""Part of every identity. Raise it when the code computes other keys or values than before, or
puts them elsewhere in a block, from the same weights and tokens."""

_PIECE = 32 << 20
"""Bytes of a file that one thread hashes; part of the fingerprint."""

_READ = 1 << 20


def kv_identity(model: DecoderModel, weights: str, block_size: int) -> dict[str, str]:
    """What decides a block's keys and values, beside its tokens and those before.

    :param weights: fingerprint of the weights, see `hash_files` and `hash_tensors`.
    :param block_size: tokens of a block.
    """
    config = model.config
    # Neither says anything of keys and values: the dtype is the model's own, below.
    shape = dataclasses.replace(config, dtype=None, eos_token_ids=())
    # Not the table of angles: its length is max_model_len, which only some scalings look at.
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim, model.max_model_len)
    rope = hashlib.sha256(frequencies.numpy().tobytes())
    rope.update(repr(factor).encode())
    return {
        "format": KV_FORMAT,
        "weights": weights,
        "config": hashlib.sha256(repr(shape).encode()).hexdigest(),
        "rope": rope.hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "block_size": str(block_size),
    }


def hash_files(paths: Iterable[Path]) -> str:
    """Fingerprint of the contents of files, in the order given.

    SHA-256 (processors have instructions for it, unlike for BLAKE2) of the SHA-256 of pieces, which
    several threads compute without the GIL.

    :raises OSError: if a file cannot be read.
    """
    sizes = [(path, path.stat().st_size) for path in paths]
    pieces = [
        (path, start, min(size - start, _PIECE))
        for path, size in sizes
        for start in range(0, max(size, 1), _PIECE)
    ]
    digest = hashlib.sha256(f"files {[size for _, size in sizes]}".encode())
    with _threads() as threads:
        for part in threads.map(_hash_piece, *zip(*pieces, strict=True)):
            digest.update(part)
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Fingerprint of named tensors: names, shapes, dtypes and values, on whatever device."""
    names = sorted(tensors)
    facts = [(name, list(tensors[name].shape), str(tensors[name].dtype)) for name in names]
    digest = hashlib.sha256(f"tensors {facts}".encode())
    with _threads() as threads:
        for part in threads.map(_hash_tensor, (tensors[name] for name in names)):
            digest.update(part)
    return digest.hexdigest()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        min(8, os.cpu_count() or 1), thread_name_prefix="ragserve fingerprint"
    )


def _hash_piece(path: Path, start: int, size: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size > 0 and (part := file.read(min(size, _READ))):
            digest.update(part)
            size -= len(part)
    return digest.digest()


def _hash_tensor(tensor: Tensor) -> bytes:
    memory = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memory.numpy().data).digest()
