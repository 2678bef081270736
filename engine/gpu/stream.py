"""The one stream that all of an engine's device work goes to, in the order of the calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["DeviceStream", "Mark", "Staging"]


class Mark:
    """A point in a stream; `wait` returns when the device has come past it."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Block this thread, without the GIL and without burning its processor."""
        if self._event is not None:
            self._event.synchronize()


class DeviceStream:
    """A CUDA stream of an engine's own. On a CPU everything is done when its call returns, which
    is how the GPU path runs under Triton's interpreter.

    :param device: "cuda", with or without an index, or "cpu".
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            # What was enqueued elsewhere, weights above all, must be there before we read it.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU behind it."""
        return self._stream is not None

    @property
    def num_processors(self) -> int:
        """Multiprocessors of the device; what a CPU answers matters to nobody."""
        if self._stream is None:
            return 4
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def shared_memory(self) -> int:
        """Bytes of on-chip memory that one program can have."""
        if self._stream is None:
            return 227 << 10
        properties = torch.cuda.get_device_properties(self.device)
        # Where torch does not tell, what every GPU with bfloat16 has.
        return int(getattr(properties, "shared_memory_per_block_optin", 99 << 10))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Work enqueued by this thread in the block goes to this stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """The point behind all that has been enqueued."""
        if self._stream is None:
            return Mark(None)
        # Blocking: a waiting engine thread must not take a processor from the application.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return Mark(event)

    def follow(self, mark: Mark) -> None:
        """Have what is enqueued from now on wait, on the device, for another stream's mark."""
        if self._stream is not None and mark._event is not None:
            self._stream.wait_event(mark._event)

    def host_buffer(self, size: int) -> Tensor:
        """[size] int32 of host memory that the device can copy to and from on its own."""
        return torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)

    @contextlib.contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """Work enqueued by this thread in the block is recorded into `graph`, not done.

        :param pool: what `torch.cuda.graph_pool_handle` gave; graphs with the same one share
            memory, and must not run at the same time.
        """
        # Other threads of the application may use the GPU meanwhile: only our own calls count.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self._stream is not None:
            self._stream.synchronize()


class Staging:
    """Small arrays from the host to the device, without waiting for either.

    A ring of buffers: an uploaded array stays as it is until `depth` further uploads.

    :param size: int32s for which a buffer is made at once; larger arrays grow it.
    """

    def __init__(self, stream: DeviceStream, *, size: int, depth: int = 6) -> None:
        self._stream = stream
        self._host = [stream.host_buffer(size) for _ in range(depth)]
        self._device = [
            torch.empty(size, dtype=torch.int32, device=stream.device) for _ in range(depth)
        ]
        self._marks = [Mark(None)] * depth
        self._next = 0

    def upload(self, array: NDArray[np.int32]) -> Tensor:
        """[n] int32 -> [n] int32 on the device, ordered with the stream's other work."""
        at, size = self._next, len(array)
        self._next = (at + 1) % len(self._host)
        self._marks[at].wait()  # long past, but for a burst of uploads
        if size > len(self._host[at]):
            self._host[at] = self._stream.host_buffer(2 * size)
            self._device[at] = torch.empty(2 * size, dtype=torch.int32, device=self._stream.device)
        host, device = self._host[at][:size], self._device[at][:size]
        host.numpy()[:] = array
        device.copy_(host, non_blocking=True)
        self._marks[at] = self._stream.mark()
        return device
