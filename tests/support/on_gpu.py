"""What the tests of a real GPU share: the shape of their models, and of their engines."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DEVICE", "MEDIUM", "MIB", "SMALL_ENGINE"]

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
MEDIUM: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
"""Overrides of `tiny_model`."""
SMALL_ENGINE: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_bytes": 64 * MIB,
}
