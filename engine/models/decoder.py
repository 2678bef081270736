"""One decoder for every supported family, shaped by its `ModelConfig`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ragserve import kernels

from ..errors import ModelLoadError
from .config import ModelConfig
from .layers import Attend, DecoderLayer
from .rope import rope_table
from .weights import Checkpoint

__all__ = ["DecoderModel", "check_shapes"]


class DecoderModel:
    """Token ids -> hidden states -> logits. Attention and its cache are the caller's.

    A new model's weights are unset: read them into the memory that `tensors()` names.
    Run it under `torch.inference_mode()`.

    :param dtype: of weights and hidden states.
    :param max_model_len: positions run from 0 to this, exclusive; with dynamic RoPE scaling
        it also fixes the frequencies.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len or config.context_length
        self.embedding = torch.empty(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = [
            DecoderLayer(config, index, dtype=dtype, device=device)
            for index in range(config.num_layers)
        ]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = (
            self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        )
        self.cos_sin = rope_table(
            config.rope, config.head_dim, self.max_model_len, dtype=dtype, device=device
        )

    def __repr__(self) -> str:
        return (
            f"<DecoderModel {self.config.architecture} [{self.config.num_layers} layers, "
            f"{self.dtype}, {self.device}]>"
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; what is shared (a tied embedding) counts once."""
        storages = (tensor.untyped_storage() for tensor in self.tensors().values())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm.

        :param token_ids: `[T]` int64, tokens of any number of sequences.
        :param positions: `[T]` int64, each token's position in its sequence.
        :param attend: called once per layer, in order.
        :returns: `[T, hidden_size]` in the model's dtype.
        """
        hidden = F.embedding(token_ids, self.embedding)
        cos, sin = F.embedding(positions, self.cos_sin).chunk(2, dim=-1)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attend)
        return kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token after each row.

        :param hidden: `[m, hidden_size]`, rows of what `forward` returned.
        :returns: `[m, vocab_size]` float32.
        """
        return F.linear(hidden, self.lm_head).float()

    def tensors(self) -> dict[str, Tensor]:
        """Name in a Hugging Face checkpoint -> the memory it is to be read into.

        What is joined here (queries, keys and values; gate and up) appears as its parts.
        """
        result = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            result["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.tensors():
                result[f"model.layers.{index}.{name}"] = tensor
        return result


def check_shapes(config: ModelConfig, checkpoint: Checkpoint) -> int:
    """Compare a model with its weights before there is memory for them.

    :returns: bytes of the weights, at one byte an element.
    :raises ModelLoadError: if a tensor is missing, or has another shape or an unknown dtype.
    """
    if config.num_layers > len(checkpoint.tensors):
        raise ModelLoadError(
            f"config.json has num_hidden_layers={config.num_layers} and the checkpoint only "
            f"{len(checkpoint.tensors)} tensors"
        )
    model = DecoderModel(config, dtype=torch.int8, device=torch.device("meta"), max_model_len=1)
    checkpoint.check({name: tuple(tensor.shape) for name, tensor in model.tensors().items()})
    return sum(tensor.numel() for tensor in model.tensors().values())
