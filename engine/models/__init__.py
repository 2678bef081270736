"""Models: one decoder driven by the Hugging Face config, and the loading of its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import InvalidParamsError, ModelLoadError, OutOfMemoryError
from .cast import cast
from .config import ModelConfig
from .decoder import DecoderModel
from .layers import Attend
from .weights import Checkpoint, load_weights

__all__ = ["Attend", "DecoderModel", "ModelConfig", "cast", "load_model", "resolve_folder"]

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
# Sub-folders hold other formats, and Mistral's repositories a second copy of the weights.
_UNWANTED = ("*/*", "consolidated*")


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


def resolve_folder(model: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: an existing one as it is, else the Hub's, downloaded once.

    Only safetensors, JSON and tokenizer files are fetched: no pickles, no code.

    :param model: a folder, or a repository on the Hugging Face Hub (`owner/name`).
    :param revision: the repository's branch, tag or commit; unused for a folder.
    :raises ModelLoadError: if there is neither such a folder nor such a repository, or the Hub
        cannot be reached.
    """
    if model == "":
        raise ModelLoadError("the model's name is empty; give a folder or owner/name")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(f"{path} is a file; expected a model folder")
    if isinstance(model, Path) or model.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no folder {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except Exception as error:  # the Hub's client raises its transports' errors too
        at = "" if revision is None else f" at revision {revision!r}"
        raise ModelLoadError(
            f"{model!r} is no folder here, and the Hugging Face Hub did not give it{at}: {error}"
        ) from error
