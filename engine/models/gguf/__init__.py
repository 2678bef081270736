"""GGUF files: reading them, and turning one into a Hugging Face folder.

`reader` checks and reads a file, `tokenizer` rebuilds its tokenizer, `convert` writes the folder.
"""
