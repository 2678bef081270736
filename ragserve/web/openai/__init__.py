"""OpenAI's routes, over engines and pipelines.

`app` is the ASGI application and its routing; `endpoint` is one route that generates: it admits,
reads (`protocol`), runs (`generation`), writes (`responses`) and logs (`request_log`). `models`
and `pages` are the routes beside them.

What is HTTP and not OpenAI's is in the folder above: bodies, errors, keys, server-sent events.
"""

from __future__ import annotations

from .app import openai_app

__all__ = ["openai_app"]
