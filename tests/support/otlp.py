"""A receiver of OpenTelemetry spans: OTLP over HTTP, on loopback."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typing_extensions import override


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A span as it arrived. Ids are hex; ``parent`` is empty for a root. Times in nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    started: int
    ended: int
    has_failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Receiver:
    """The spans that a collector was sent."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.payloads: list[bytes] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        """Read one export."""
        self.payloads.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(group.resource.attributes)
            self.spans += [_span(span, resource) for scope in group.scope_spans for span in scope.spans]

    def wait(self, roots: int, seconds: float = 20.0) -> list[ReceivedSpan]:
        """Return all spans when so many calls have arrived."""
        end = time.monotonic() + seconds
        while len(self.calls()) < roots:
            assert time.monotonic() < end, f"{len(self.calls())} calls arrived within {seconds} s"
            time.sleep(0.02)
        return list(self.spans)

    def calls(self) -> list[ReceivedSpan]:
        """The spans of requests to the service."""
        return [span for span in list(self.spans) if span.kind == 2]

    def children(self, call: ReceivedSpan) -> list[ReceivedSpan]:
        """The spans below a call's, by their start."""
        return sorted((each for each in self.spans if each.parent == call.id), key=lambda each: each.started)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A receiver for the length of the block."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            found.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        @override
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _span(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        started=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        has_failed=span.status.code == 2,
        attributes=_plain(span.attributes),
        resource=resource,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
