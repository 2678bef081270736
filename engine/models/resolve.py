"""From a model's name to the folder that holds it."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelLoadError
from .gguf.convert import convert
from .locate import locate

__all__ = ["resolve_folder"]

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
# Sub-folders hold other formats, and Mistral's repositories a second copy of the weights.
_UNWANTED = ("*/*", "consolidated*")


def resolve_folder(model: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: an existing one as it is, a GGUF file's conversion, which is made
    once, or the Hub's, downloaded once.

    Only safetensors, JSON and tokenizer files are fetched: no pickles, no code.

    :param model: a folder, a GGUF file, a folder that holds one and no safetensors, or a
        repository on the Hugging Face Hub (`owner/name`).
    :param revision: the repository's branch, tag or commit; unused for what is here.
    :raises ModelLoadError: if there is neither such a folder or file nor such a repository, the
        Hub cannot be reached, or the GGUF file is broken.
    :raises UnsupportedModelError: if the GGUF file holds something that we do not implement.
    """
    path = locate(model)
    if path is not None:
        return path if path.is_dir() else convert(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(model),
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
