"""What running a plan needs on every device: sampling on the host, and what sampling has to know.

Knows plans and tensors; no pool, no scheduler. `cpu/` and `gpu/` stand on it.
"""
