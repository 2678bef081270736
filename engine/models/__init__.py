"""From a model's name to a decoder with its weights.

`resolve` finds the folder (a GGUF file is converted once, see `gguf/`), `ModelConfig` reads what
the decoder looks like, `load` reads the weights into a `DecoderModel`.

Knows tensors and files; nothing of requests, schedules or devices' runners. Importing this face
imports no torch.
"""
