"""The KV pool as numbers: which blocks are in use, which prefix each one stores, which goes next.

`BlockLayout` maps tokens to blocks, `block_hash` names a block's content, `BlockPool` counts
references and finds prefixes, `IdleBlocks` orders what may be evicted.

Pure Python: the tensors are in `cpu/` and `gpu/`, requests in `scheduling/`; neither is known here.
"""
