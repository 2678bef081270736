"""Triton kernels: what a GPU runs. A face of its own, imported only when there is one.

As in `ragserve.kernels`, tensors in, tensors out; but outputs are given, nothing is allocated and
nothing waits for the device, so that a CUDA graph can record any of it.
"""

from .attention import (
    DecodeConfig,
    DecodeWorkspace,
    SharedPartials,
    choose_splits,
    decode_config,
    decode_workspace,
    paged_decode,
    paged_prefill,
    prefill_config,
    prefill_tiles,
)
from .cascade import (
    MIN_SHARED_BLOCKS,
    CascadeConfig,
    CascadeWorkspace,
    cascade_config,
    cascade_workspace,
    min_saved_bytes,
    num_programs,
    paged_shared,
    plan_cascade,
    saved_tokens,
)
from .copy import blocks_to_rows, rows_to_blocks
from .layers import add_rms_norm, rms_norm, rope_and_store, silu_and_mul
from .linear import GEMV_ROWS, gemv, gemv_silu, linear
from .sampling import PROMPT_BIT, SamplerWorkspace, sample, sampler_workspace
from .steps import (
    MAX_STOPS,
    SeatState,
    embed_step,
    pack_segments,
    prepare_decode,
    scatter,
    seat_line,
    seat_state,
)

__all__ = [
    # products
    "GEMV_ROWS",
    "gemv",
    "gemv_silu",
    "linear",
    # between them
    "add_rms_norm",
    "rms_norm",
    "rope_and_store",
    "silu_and_mul",
    # attention
    "DecodeConfig",
    "DecodeWorkspace",
    "SharedPartials",
    "choose_splits",
    "decode_config",
    "decode_workspace",
    "paged_decode",
    "paged_prefill",
    "prefill_config",
    "prefill_tiles",
    # attention to what sequences share
    "MIN_SHARED_BLOCKS",
    "CascadeConfig",
    "CascadeWorkspace",
    "cascade_config",
    "cascade_workspace",
    "min_saved_bytes",
    "num_programs",
    "paged_shared",
    "plan_cascade",
    "saved_tokens",
    # blocks to other memory and back
    "blocks_to_rows",
    "rows_to_blocks",
    # sampling
    "PROMPT_BIT",
    "SamplerWorkspace",
    "sample",
    "sampler_workspace",
    # seats
    "MAX_STOPS",
    "SeatState",
    "embed_step",
    "pack_segments",
    "prepare_decode",
    "scatter",
    "seat_line",
    "seat_state",
]
