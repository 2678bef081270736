"""Running plans on a CPU: on the C kernels where they can run a model, else on torch.

`runner` turns a plan into tensors and sampled ids, `backend` is the forward pass and its KV pool,
`memory` says how many blocks fit, `block_io` copies blocks to other memory.
"""
