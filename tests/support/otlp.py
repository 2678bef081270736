"""A backend for traces: takes what an OTLP exporter sends over HTTP, and keeps it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Sampler


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire. Times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    failed: bool
    scope: str


class Collector:
    """Receives traces on a port of its own; `provider` makes providers that send them there."""

    def __enter__(self) -> Collector:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._providers: list[TracerProvider] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._receive(ExportTraceServiceRequest.FromString(body))
                reply = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for provider in self._providers:
            provider.shutdown()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def provider(self, sampler: Sampler | None = None) -> TracerProvider:
        """A provider that sends its spans here in batches, as an application sets it up."""
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        self._providers.append(provider)
        return provider

    def spans(self) -> list[ReceivedSpan]:
        """All that were ended by now."""
        for provider in self._providers:
            provider.force_flush()
        with self._lock:
            return list(self._spans)

    def _receive(self, request: ExportTraceServiceRequest) -> None:
        received = [
            ReceivedSpan(
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=span.kind,
                start=span.start_time_unix_nano,
                end=span.end_time_unix_nano,
                attributes={pair.key: _value(pair.value) for pair in span.attributes},
                failed=span.status.code == span.status.STATUS_CODE_ERROR,
                scope=scope.scope.name,
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += received


def by_name(spans: Iterable[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    """Spans by name, each of which there must be once."""
    spans = list(spans)
    named = {span.name: span for span in spans}
    assert len(named) == len(spans), sorted(span.name for span in spans)
    return named


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
