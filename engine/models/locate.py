"""Where a model's files are: a folder, a GGUF file, or the Hub. Without torch, hence at once."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelLoadError

__all__ = ["locate"]

_MAGIC = b"GGUF"


def locate(model: str | Path) -> Path | None:
    """The model's folder or GGUF file here, or None for what may be the name of a repository.

    A GGUF file is known by its ending, in any case, or by how it begins. A folder that holds one
    and no safetensors is that file.

    :param model: a path, `~` for the home folder included, or a repository on the Hugging Face
        Hub (`owner/name`).
    :raises ModelLoadError: if it is a path and nothing is there, or something else.
    """
    if str(model) in ("", "."):
        raise ModelLoadError("the model's name is empty; give a folder, a file or owner/name")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _in_folder(path)
        if path.is_file():
            if path.suffix.lower() == ".gguf" or _begins_as_gguf(path):
                return path
            raise ModelLoadError(f"{path} is a file; expected a model folder or a .gguf file")
        if path.exists():
            raise ModelLoadError(f"{path} is neither a folder nor a file")
    except (OSError, ValueError, RuntimeError) as error:
        # A name that is too long, a NUL in it, no home folder, no permission.
        why = getattr(error, "strerror", None) or error
        raise ModelLoadError(f"cannot look for the model at {str(model)[:200]!r}: {why}") from error
    if isinstance(model, Path) or model.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no folder or file {path}")
    if path.suffix.lower() == ".gguf":
        raise ModelLoadError(f"there is no file {path}")
    return None


def _in_folder(folder: Path) -> Path:
    """The folder, or its only GGUF file if it holds no other weights."""
    files = [path for path in folder.iterdir() if path.suffix.lower() in (".gguf", ".safetensors")]
    models = sorted(path for path in files if path.suffix.lower() == ".gguf")
    if len(models) != len(files) or not models:
        return folder
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:5])
        raise ModelLoadError(
            f"{folder} holds {len(models)} GGUF files: {names}{', ...' if models[5:] else ''}; "
            "give the path of one"
        )
    return models[0]


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
