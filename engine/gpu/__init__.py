"""The engine on a GPU: the host enqueues ahead, the device feeds itself."""

from .loading import build_gpu

__all__ = ["build_gpu"]
