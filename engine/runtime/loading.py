"""From a model's name to something that can run: weights, tokenizer, KV pool, runner."""

from __future__ import annotations

import errno
import importlib.util
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..config import EngineConfig
from ..errors import InvalidParamsError, ModelLoadError, OutOfMemoryError
from ..models.locate import locate
from ..offload.tiers import BlockIO, BlockStore, Tiers
from ..text.tokenizer import Tokenizer
from .core import Runner

if TYPE_CHECKING:
    import torch

    from ..cpu.runner import ModelRunner
    from ..gpu.runner import GPURunner
    from ..models.config import ModelConfig
    from ..models.decoder import DecoderModel

__all__ = ["LoadedModel", "ModelSource", "PretrainedModel", "build", "log_opened"]

_logger = logging.getLogger("ragserve")

_NO_MEMORY = (
    "can't allocate memory",
    "unable to mmap",
    "can't start new thread",
    "failed to map segment",
)


@dataclass(slots=True)
class LoadedModel:
    """What an engine runs."""

    name: str
    runner: Runner
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    num_blocks: int
    max_num_mixed_tokens: int | None = None
    """Default of the knob, if the model's speed on its device decides it."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    dtype: str = ""
    num_threads: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Time per phase of loading."""
    kv_identity: dict[str, str] | None = None
    """What decides its keys and values, if blocks are to be kept on a disk: see `fingerprint`."""
    tiers: Tiers | None = None
    """Behind the KV pool, if there are any."""
    attention_tokens: float = float("inf")
    """Position at which a token's attention costs as much to compute as all else."""

    def close(self) -> None:
        """Give the memory back, if no engine has taken this over."""
        if self.tiers is not None:
            self.tiers.close()
        self.runner.close()


class ModelSource(Protocol):
    """Where an engine gets its model from: files (`PretrainedModel`), or a script in a test."""

    def load(self, config: EngineConfig) -> LoadedModel:
        """Load it. Called in a worker thread; may take long.

        :raises RagserveError: the fitting one, if it cannot be loaded with this config.
        """


class PretrainedModel:
    """A model from a Hugging Face folder, a hub id, or a `.gguf` file.

    :param name: path of a folder or file, or hub id; a folder with nothing but a `.gguf` file is
        that file.
    """

    def __init__(self, name: str | Path) -> None:
        self.name = name

    def load(self, config: EngineConfig) -> LoadedModel:
        """Load weights and tokenizer, and make the KV pool.

        :raises ModelLoadError: if files are missing, broken, or do not fit each other.
        :raises UnsupportedModelError: if it is an architecture that we do not implement.
        :raises OutOfMemoryError: if the KV pool does not fit.
        :raises InvalidParamsError: if a knob does not fit the model.
        """
        path = locate(self.name)  # before torch, whose import takes seconds
        with _typed_errors(self.name):
            return self._load(path, config)

    def _load(self, path: Path | None, config: EngineConfig) -> LoadedModel:
        seconds: dict[str, float] = {}
        with _timed(seconds, "import"):
            import torch

            from ..models.cast import cast
            from ..models.load import load_model
            from ..models.resolve import resolve_folder

        device = _device(config)
        with _timed(seconds, "files"):
            folder = resolve_folder(self.name, config.revision)
            dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
            if dtype is not None:
                folder = cast(folder, dtype)
        with ThreadPoolExecutor(2, thread_name_prefix="ragserve loading") as beside:
            tokenizing = beside.submit(self._load_tokenizer, folder, config, seconds)
            hashing = beside.submit(self._hash_weights, folder, seconds) if _keeps(config) else None
            with _timed(seconds, "weights"):
                model = load_model(
                    folder, dtype=dtype, device=device, max_model_len=config.max_model_len
                )
            tokenizer = tokenizing.result()
            weights = None if hashing is None else hashing.result()
        tokenizer.check_model(model.config.vocab_size)
        name = str(self.name) if path is None or path.is_dir() else path.stem
        return build(model, tokenizer, config, name=name, seconds=seconds, weights=weights)

    @staticmethod
    def _hash_weights(folder: Path, seconds: dict[str, float]) -> str:
        from ..models.weights import Checkpoint
        from ..offload.fingerprint import hash_files

        with _timed(seconds, "fingerprint"):
            try:
                return hash_files(Checkpoint(folder).files)
            except OSError as error:
                raise ModelLoadError(f"cannot read the weights in {folder}: {error}") from error

    @staticmethod
    def _load_tokenizer(folder: Path, config: EngineConfig, seconds: dict[str, float]) -> Tokenizer:
        with _timed(seconds, "tokenizer"):
            return Tokenizer.load(folder, num_clones=config.num_tokenizers)


def build(
    model: DecoderModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    *,
    name: str,
    seconds: dict[str, float],
    weights: str | None = None,
) -> LoadedModel:
    """Make the KV pool and the runner of a model whose weights are on `config.device`.

    :param seconds: time per phase of loading so far; extended.
    :param weights: their fingerprint; None computes it from the tensors, if it is needed.
    :raises InvalidParamsError: if a knob does not fit the model.
    :raises OutOfMemoryError: if the KV pool does not fit.
    """
    runner: ModelRunner | GPURunner
    weight_bytes, num_threads, max_num_mixed_tokens = model.num_bytes, 1, None
    identity = None
    if _keeps(config):
        # Before the backend takes the weights over.
        from ..offload.fingerprint import hash_tensors, kv_identity

        with _timed(seconds, "fingerprint"):
            weights = weights or hash_tensors(model.tensors())
            identity = kv_identity(model, weights, config.block_size)
    with _timed(seconds, "backend"):
        if model.device.type == "cpu":
            runner, num_blocks, kv_bytes, num_threads = _build_cpu(model, config)
        else:
            from ..gpu import build_gpu

            runner, num_blocks, kv_bytes = build_gpu(model, config)
            max_num_mixed_tokens = runner.num_mixed_tokens
    try:
        tiers = _open_tiers(runner.block_io, identity, config)
    except BaseException:
        runner.close()
        raise
    return LoadedModel(
        name=name,
        runner=runner,
        tokenizer=tokenizer,
        vocab_size=model.config.vocab_size,
        max_model_len=model.max_model_len,
        num_blocks=num_blocks,
        max_num_mixed_tokens=max_num_mixed_tokens,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        dtype=str(model.dtype).removeprefix("torch."),
        num_threads=num_threads,
        seconds=seconds,
        kv_identity=identity,
        tiers=tiers,
        attention_tokens=_attention_tokens(model.config),
    )


def _open_tiers(
    io: BlockIO | None, identity: dict[str, str] | None, config: EngineConfig
) -> Tiers | None:
    """What is behind the pool, fastest first.

    :raises OutOfMemoryError: if the host has no room for `swap_space_bytes`.
    """
    stores: list[BlockStore] = []
    if io is not None and config.swap_space_bytes:
        from ..offload.host_tier import HostTier

        stores.append(HostTier(io, config.swap_space_bytes))
    if io is not None and config.disk_cache is not None and identity is not None:
        from ..offload.disk_tier import DiskTier

        stores.append(DiskTier(Path(config.disk_cache), identity, config.disk_cache_bytes, io))
    return None if io is None or not stores else Tiers(stores, io)


def _attention_tokens(config: ModelConfig) -> float:
    """Multiplications of a layer's weights with a token, over those of its attention with one key
    and one value."""
    width = config.num_heads * config.head_dim
    weights = config.hidden_size * (2 * width + 2 * config.num_kv_heads * config.head_dim)
    weights += 3 * config.hidden_size * config.intermediate_size
    return weights / (2 * width)


def _build_cpu(model: DecoderModel, config: EngineConfig) -> tuple[ModelRunner, int, int, int]:
    """Runner, number of blocks, bytes of the KV pool, threads."""
    import torch

    from ..cpu.backend import block_bytes, make_backend, native_operations
    from ..cpu.memory import plan_blocks
    from ..cpu.runner import ModelRunner

    ops = native_operations(model)
    per_block = block_bytes(model, ops, config.block_size)
    num_blocks = plan_blocks(
        per_block, config.block_size, model.max_model_len, config.kv_cache_bytes
    )
    num_threads = config.num_threads or torch.get_num_threads()
    backend = make_backend(model, ops, num_blocks=num_blocks, block_size=config.block_size)
    runner = ModelRunner(backend, num_threads=num_threads)
    return runner, num_blocks, num_blocks * per_block, num_threads


def _keeps(config: EngineConfig) -> bool:
    """Whether blocks are to be kept on a disk."""
    return config.disk_cache is not None


def _device(config: EngineConfig) -> torch.device:
    """The device, if it is there and can be used.

    :raises InvalidParamsError: if not.
    """
    import torch

    device = torch.device(config.device)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else 0
    if index >= count:
        raise InvalidParamsError(
            "device", config.device, f'"cpu": this torch ({torch.__version__}) sees {count} GPUs'
        )
    if importlib.util.find_spec("triton") is None:
        raise InvalidParamsError(
            "device", config.device, '"cpu", as triton is not installed: pip install triton'
        )
    return torch.device("cuda", index)


@contextmanager
def _typed_errors(name: str | Path) -> Iterator[None]:
    """What runs out, or breaks, while a model is opened is named, wherever it is noticed."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise _no_memory(name, error) from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise _no_memory(name, error) from error
        hint = ""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "; close files, or raise the limit (ulimit -n)"
        raise ModelLoadError(f"cannot open {name}: {error}{hint}") from error
    except RecursionError:  # without its traceback of a thousand lines
        raise ModelLoadError(f"cannot open {name}: a file of it is nested too deeply") from None
    except (RuntimeError, ImportError) as error:
        # Neither torch, on a CPU, nor threading, nor the dynamic linker has an error type for it.
        if any(text in str(error) for text in _NO_MEMORY):
            raise _no_memory(name, error) from error
        raise


def _no_memory(name: str | Path, error: Exception) -> OutOfMemoryError:
    what = str(error) or type(error).__name__
    return OutOfMemoryError(
        f"no memory is left to open {name}: {what}; free some, raise the process's limit "
        "(ulimit -v), or take a narrower dtype, a smaller model or a lower kv_cache_bytes"
    )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - started


def log_opened(loaded: LoadedModel, config: EngineConfig) -> None:
    """Say, once, what was opened and what it can hold."""
    tokens = loaded.num_blocks * config.block_size
    _logger.info(
        "opened %s: %s on %s, weights %.1f MiB, KV %.1f MiB = %d blocks x %d tokens = %d tokens, "
        "%.1f sequences of max_model_len=%d at once, %d threads; %s",
        loaded.name,
        loaded.dtype,
        config.device,
        loaded.weight_bytes / 2**20,
        loaded.kv_bytes / 2**20,
        loaded.num_blocks,
        config.block_size,
        tokens,
        tokens / loaded.max_model_len,
        loaded.max_model_len,
        loaded.num_threads,
        ", ".join(f"{phase} {spent:.2f} s" for phase, spent in loaded.seconds.items()),
    )
