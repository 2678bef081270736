"""One engine's thread: what it runs, what it is told, what it hands out.

`EngineCore` is the engine without threads: add, abort, step. `Driver` runs it in a thread of its
own: commands go in, one hand-off per step and event loop comes out. `Encoders` are the threads
that turn prompts into token ids; `loading` turns a model's name into what a core can run.

It may know every other room of the engine. Only what a caller sees (`engine.py`, `stream.py`,
`preparation.py`, `llm.py`) stands above it.
"""
