"""ASGI servers for tests: uvicorn and hypercorn on a free port, in a thread or a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

__all__ = ["SERVERS", "ServerProcess", "ServerThread", "get_json", "raw_request", "read_until"]

SERVERS = ("h11", "httptools", "hypercorn")
"""What `kind` may be: uvicorn with either of its parsers, or hypercorn."""

_PATIENCE = 120.0
"""Seconds after which a server that does not start, or end, has hung."""


class ServerThread:
    """Serves an app from a thread with an event loop of its own, while it is entered.

    Its lifespan runs too. Signals never reach it.

    :param app: an ASGI app.
    :param kind: one of `SERVERS`.
    :param send_buffer: bytes that the kernel holds for a client; few, and a client that does not
        read is soon noticed.
    :param options: settings of the server: `timeout_graceful_shutdown=1` for uvicorn, say.
    """

    def __init__(
        self, app: Any, kind: str = "h11", *, send_buffer: int | None = None, **options: Any
    ) -> None:
        self._sock = _listen(send_buffer)
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._serve, self._stop = _server(app, kind, self._sock, options)
        self._thread = threading.Thread(target=self._run, name=f"test server ({kind})")

    def __enter__(self) -> ServerThread:
        self._thread.start()
        try:
            _wait_for_port(self.port, lambda: self._error is None and self._thread.is_alive())
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if self._error is not None and error is None:
            raise self._error

    def request_stop(self) -> None:
        """Begin to stop, as a signal would; does not wait."""
        if self.loop is not None and not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self.loop.call_soon_threadsafe(self._stop)

    def stop(self) -> None:
        """Stop, and wait for its end."""
        self.request_stop()
        self._thread.join(_PATIENCE)
        self._sock.close()
        if self._thread.is_alive():
            raise RuntimeError("the server does not stop")

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self._serve()

        try:
            asyncio.run(main())
        except BaseException as error:
            self._error = error


def _server(
    app: Any, kind: str, sock: socket.socket, options: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """How to serve, in the event loop, and how to end that."""
    if kind == "hypercorn":
        from hypercorn.asyncio import serve
        from hypercorn.config import Config as HypercornConfig

        config = HypercornConfig.from_mapping(
            # A copy, for hypercorn closes it.
            bind=[f"fd://{os.dup(sock.fileno())}"],
            accesslog=None,
            errorlog=logging.getLogger("hypercorn"),
        )
        for name, value in options.items():
            setattr(config, name, value)
        ended = asyncio.Event()
        return lambda: serve(app, config, shutdown_trigger=ended.wait), ended.set

    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            app, http=kind, lifespan="on", log_config=None, access_log=False, ws="none", **options
        )
    )
    return lambda: server.serve(sockets=[sock]), lambda: setattr(server, "should_exit", True)


class ServerProcess:
    """Serves an app from a process of its own, by the server's command line, while it is entered.

    :param target: "module:name" of an ASGI app, importable from `folder`.
    :param kind: one of `SERVERS`.
    :param folder: first on the process's import path.
    :param arguments: more arguments for the server.
    """

    def __init__(
        self,
        target: str,
        kind: str = "h11",
        *,
        folder: Path,
        arguments: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self._sock = _listen()
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        fd = self._sock.fileno()
        if kind == "hypercorn":
            # Without workers, so that the process itself serves, and has the signals.
            command = ["hypercorn", target, "--bind", f"fd://{fd}", "--workers", "0"]
        else:
            command = ["uvicorn", target, "--fd", str(fd), "--http", kind, "--no-access-log"]
        self._command = [sys.executable, "-P", "-m", *command, *arguments]
        self._env = {**os.environ, "PYTHONPATH": str(folder), **(env or {})}
        self._folder = folder
        self.process: subprocess.Popen[str]

    def __enter__(self) -> ServerProcess:
        self.process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._env,
            pass_fds=[self._sock.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that workers can be ended with it
        )
        try:
            _wait_for_port(self.port, lambda: self.process.poll() is None)
        except BaseException as error:
            self._kill()
            error.add_note(self.process.communicate()[0])
            self._sock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate()
        self._sock.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = _PATIENCE) -> tuple[int, str]:
        """Wait for its end: exit code, and what it printed."""
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output


def _listen(send_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if send_buffer is not None:  # of every connection, too
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    sock.bind(("127.0.0.1", 0))
    sock.listen(256)
    return sock


def _wait_for_port(port: int, alive: Callable[[], bool]) -> None:
    """Wait until something answers. The socket listens already: what counts is an answer."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if not alive():
            raise RuntimeError("the server ended before it answered")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
                client.sendall(b"GET /%2e%2eready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                if client.recv(1):
                    return
        except (TimeoutError, ConnectionError):
            time.sleep(0.01)
    raise RuntimeError("the server does not start")


def get_json(url: str, **options: Any) -> Any:
    """GET, and the JSON of the answer."""
    with httpx.Client(trust_env=False) as client:
        return client.get(url, timeout=_PATIENCE, **options).raise_for_status().json()


def raw_request(
    port: int,
    path: str,
    *,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    receive_buffer: int | None = None,
) -> socket.socket:
    """Send a request, GET or with a body POST, and leave the answer unread.

    :param receive_buffer: bytes that the kernel takes for us; little makes a slow client.
    """
    sock = socket.socket()
    try:
        sock.settimeout(_PATIENCE)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.connect(("127.0.0.1", port))
        method = "GET" if body is None else "POST"
        lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
        if body is not None:
            lines.append(f"content-length: {len(body)}")
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + (body or b""))
    except BaseException:
        sock.close()
        raise
    return sock


def read_until(sock: socket.socket, mark: bytes | None) -> bytes:
    """Read until `mark` has come, or to the end."""
    data = bytearray()
    while mark is None or mark not in data:
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
    return bytes(data)
