"""From a model's folder to a decoder with its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import InvalidParamsError, OutOfMemoryError
from .config import ModelConfig
from .decoder import DecoderModel, check_shapes
from .free_memory import available_memory
from .weights import Checkpoint, load_weights

__all__ = ["load_model"]

_ANGLE_BYTES = 12
"""Of each element of the table of angles, while it is computed: angles, cosines and sines, both
joined."""


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    max_model_len: int | None = None,
) -> DecoderModel:
    """Build the model that a folder's `config.json` describes and read its weights.

    The weights are never twice in memory: each tensor goes from its mapped file to its place.

    :param dtype: of weights and arithmetic; None takes the one the model was saved for.
    :param max_model_len: longest sequence in tokens; None takes `config.context_length`.
    :raises InvalidParamsError: if `max_model_len` is beyond what the model supports.
    :raises ModelLoadError: if files are missing, broken, or do not fit the config.
    :raises OutOfMemoryError: if the device has too little memory for the weights.
    :raises UnsupportedModelError: if the model needs something that we do not implement.
    """
    config = ModelConfig.from_folder(folder)
    if max_model_len is not None and not 1 <= max_model_len <= config.max_context_length:
        raise InvalidParamsError(
            "max_model_len",
            max_model_len,
            f"1 to {config.max_context_length}, the longest sequence that {folder} supports",
        )
    checkpoint = Checkpoint(folder)
    dtype = dtype or config.dtype or checkpoint.dtype
    num_elements = check_shapes(config, checkpoint)
    _check_memory(folder, config, dtype, device, num_elements, max_model_len)
    try:
        model = DecoderModel(config, dtype=dtype, device=device, max_model_len=max_model_len)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights of {folder} do not fit on {device} as {dtype}: {error}; take a narrower "
            "dtype or a smaller model"
        ) from None
    tied = {"lm_head.weight": model.embedding} if config.tie_word_embeddings else {}
    load_weights(checkpoint, model.tensors(), tied)
    return model


def _check_memory(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_elements: int,
    max_model_len: int | None,
) -> None:
    """Compare with the host's memory before any of it is taken.

    :param num_elements: of the weights.
    :raises OutOfMemoryError: if the weights, or one sequence, do not fit.
    """
    length = max_model_len or config.context_length
    on_host, size = device.type == "cpu", dtype.itemsize
    weights = num_elements * size if on_host else 0
    # The table of angles is made on the host for every device. The keys and values are taken
    # later, but where they cannot fit a table as long need not be computed first.
    angles = _ANGLE_BYTES * config.head_dim * length
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size * length
    sequence = max(angles, kv) if on_host else angles
    available = available_memory()
    if weights > available:
        raise OutOfMemoryError(
            f"the weights of {folder} take {weights} bytes as {dtype} and {available} are "
            "available; take a narrower dtype or a smaller model"
        )
    if sequence > available:
        raise OutOfMemoryError(
            f"{folder}: a sequence of max_model_len={length} tokens takes {sequence} bytes and "
            f"{available} are available; lower max_model_len"
        )
