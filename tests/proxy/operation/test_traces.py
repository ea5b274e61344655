"""Traces by OpenTelemetry: what a collector receives of calls, and what the model host is told of the trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tersely import __version__
from tersely.domain.messages import Dialect
from tersely.fakellm.scripted import ScriptedReply
from tersely.service.common.tracing import CallSpan, CallTrace
from tersely.telemetry import is_wanted
from tersely.telemetry.span_export import SpanEncoder
from tests.conftest import Database
from tests.support.dialect_wires import WIRES
from tests.support.otlp import ReceivedSpan, Receiver, receiver
from tests.support.services import serve
from tests.support.upstreams import MODEL, Model, scripted

SECRET = "zanzibar-4711"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
STEPS = {"recognition", "context", "store"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A collector that the environment names."""
    with receiver() as found:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield found


@pytest.fixture
def model() -> Iterator[Model]:
    with scripted() as running:
        yield running


def exported_text(collector: Receiver) -> str:
    """Everything that was exported, as text in which words can be looked for."""
    return b"".join(collector.payloads).decode("utf-8", "replace")


def inside(child: ReceivedSpan, call: ReceivedSpan) -> bool:
    return call.started <= child.started <= child.ended <= call.ended


@pytest.mark.parametrize("dialect", sorted(WIRES))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_is_a_span_with_its_steps_and_the_request_to_the_model(
    database: Database, model: Model, collector: Receiver, dialect: Dialect, stream: bool
) -> None:
    with serve(database, model.url) as service:
        answer = await WIRES[dialect].send(
            service,
            f"The password is {SECRET}.",
            stream=stream,
            Traceparent=f"00-{TRACE}-{PARENT}-01",
            Authorization="Bearer sk-secret-key",
        )
        assert answer.status == 200
        collector.wait(1)
    (call,) = collector.calls()
    assert (call.trace, call.parent) == (TRACE, PARENT)
    assert call.name == f"POST {call.attributes['http.route']}"
    session = answer.headers["x-tersely-session"]
    expected: dict[str, Any] = {
        "gen_ai.conversation.id": session,
        "tersely.dialect": dialect,
    }
    # A stream of Chat Completions is asked for its usage.
    context = "built" if stream and dialect == "openai_chat" else "passthrough"
    expected |= {"tersely.tenant": "default", "tersely.context": context, "http.response.status_code": 200}
    assert expected.items() <= call.attributes.items()
    assert call.resource["service.name"] == "tersely"
    children = collector.children(call)
    assert {child.name for child in children if child.kind == 1} == STEPS
    assert all(child.trace == TRACE and inside(child, call) for child in children)
    (upstream,) = [child for child in children if child.kind == 3]
    provider = {"anthropic": "anthropic", "gemini": "gcp.gemini", "gemini_gca": "gcp.gemini"}.get(dialect, "openai")
    operation = "generate_content" if dialect.startswith("gemini") else "chat"
    assert upstream.name == f"{operation} {upstream.attributes['gen_ai.request.model']}"
    assert upstream.attributes["gen_ai.provider.name"] == provider
    assert upstream.attributes["gen_ai.conversation.id"] == session
    assert upstream.attributes["gen_ai.usage.input_tokens"] > 0
    assert upstream.attributes["gen_ai.usage.output_tokens"] > 0
    assert upstream.attributes["server.address"] == "127.0.0.1"
    assert not any(each.has_failed for each in collector.spans)
    # The model host takes part in the same trace, below the span of the request to it.
    assert model.last.headers["Traceparent"] == f"00-{TRACE}-{upstream.id}-01"
    text = exported_text(collector)
    assert session in text
    assert SECRET not in text
    assert "sk-secret" not in text


async def test_a_live_call_has_the_same_steps(database: Database, model: Model, collector: Receiver) -> None:
    with serve(database, model.url, live_sessions="64") as service, httpx.Client(base_url=service.url) as http:
        messages: list[dict[str, str]] = []
        for question in ("One?", "Two?", "Three?"):
            messages.append({"role": "user", "content": question})
            answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=30)
            messages.append(answer.json()["choices"][0]["message"])
        hits = [line for line in http.get("/metrics").text.splitlines() if line.startswith("tersely_live_calls_total")]
        assert any('result="hit"' in line and not line.endswith(" 0.0") for line in hits), hits
        collector.wait(3)
    for call in collector.calls():
        assert {child.name for child in collector.children(call) if child.kind == 1} == STEPS


async def test_a_live_call_whose_host_is_gone_is_a_failed_span(database: Database, collector: Receiver) -> None:
    with ExitStack() as running:
        model = running.enter_context(scripted())
        with serve(database, model.url, live_sessions="64") as service, httpx.Client(base_url=service.url) as http:
            messages = [{"role": "user", "content": "One?"}]
            answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=30)
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Two?"}]
            running.close()
            lost = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}, timeout=30)
            assert lost.status_code == 502
            collector.wait(2)
    failed = next(call for call in collector.calls() if call.has_failed)
    (upstream,) = [child for child in collector.children(failed) if child.kind == 3]
    assert upstream.has_failed
    assert upstream.attributes["error.type"] == "UpstreamUnavailable"


async def test_traces_mark_failures_without_message_text(database: Database, model: Model, collector: Receiver) -> None:
    refused = ScriptedReply(status=429, body=json.dumps({"error": {"message": f"no more of {SECRET}"}}).encode())
    with serve(database, model.url) as service, httpx.Client(base_url=service.url, timeout=30) as http:
        model.script("limited", refused)
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]}
        assert http.post("/v1/chat/completions", json={**body, "user": "limited"}).status_code == 429
        collector.wait(1)
    (call,) = collector.calls()
    (upstream,) = [child for child in collector.children(call) if child.kind == 3]
    assert upstream.has_failed
    assert upstream.attributes["error.type"] == "429"
    assert call.attributes["tersely.outcome"] == "upstream_limited"
    with serve(database, "http://127.0.0.1:9/v1") as service, httpx.Client(base_url=service.url, timeout=30) as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 502
        collector.wait(2)
    call = collector.calls()[-1]
    (upstream,) = [child for child in collector.children(call) if child.kind == 3]
    assert call.has_failed
    assert call.attributes["tersely.outcome"] == "upstream_error"
    assert upstream.has_failed
    assert upstream.attributes["error.type"] == "UpstreamUnavailable"
    assert SECRET not in exported_text(collector)


async def test_unsampled_call_is_not_exported_and_its_parent_is_forwarded(
    database: Database, model: Model, collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gateway")
    with serve(database, model.url) as service:
        wire = WIRES["openai_chat"]
        assert (await wire.send(service, "Hello")).status == 200
        assert "Traceparent" not in model.last.headers
        unsampled = f"00-{TRACE}-{PARENT}-00"
        assert (await wire.send(service, "Hello", Traceparent=unsampled)).status == 200
        assert model.last.headers["Traceparent"] == unsampled
        await wire.send(service, "Hello", Traceparent=f"00-{TRACE}-{PARENT}-01")
        collector.wait(1)
    (call,) = collector.calls()
    assert call.trace == TRACE
    assert call.resource["service.name"] == "gateway"


async def test_health_and_metrics_are_not_traced_and_rest_is(
    database: Database, model: Model, collector: Receiver
) -> None:
    with serve(database, model.url) as service, httpx.Client(base_url=service.url) as http:
        for path in ("/healthz", "/readyz", "/metrics", "/api/sessions"):
            assert http.get(path).status_code == 200
        collector.wait(1)
    (call,) = collector.calls()
    assert call.name == "GET /api/sessions"


async def test_a_collector_that_is_away_holds_nothing_up(
    database: Database, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with serve(database, model.url) as service:
        for _ in range(3):
            assert (await WIRES["anthropic"].send(service, "Hello")).status == 200


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_traces_are_on_where_the_environment_names_a_collector(environment: dict[str, str], expected: bool) -> None:
    assert is_wanted(environment) is expected


def test_without_a_collector_the_sdk_is_not_imported() -> None:
    code = "import sys, tersely.composition.application, tersely.telemetry as t; t.Telemetry({}); "
    code += "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0


def test_a_step_that_ends_after_its_call_is_exported() -> None:
    """A client may leave while what it sent is being stored."""
    exported: list[str] = []

    class Exported:
        def new_id(self) -> int:
            return 1

        def new_trace_id(self) -> int:
            return 1

        def export(self, spans: list[CallSpan]) -> None:
            exported.extend(span.name for span in spans)

    trace = CallTrace(CallSpan(SpanContext(1, 1, is_remote=False), None, "call"), Exported())
    with trace.step("store"):
        with trace.step("context"):
            pass
        trace.finish({"status": 499})
        assert exported == ["context", "call"]
    assert exported == ["context", "call", "store"]


CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    is_remote=st.booleans(),
    trace_flags=st.sampled_from([TraceFlags(1), TraceFlags(3)]),
    trace_state=st.sampled_from([None, TraceState(), TraceState([("a", "1"), ("b@c", "x y")])]),
)
VALUES = st.one_of(st.text(max_size=20), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
SPANS = st.builds(
    CallSpan,
    CONTEXTS,
    st.none() | CONTEXTS,
    st.text(max_size=20),
    kind=st.sampled_from([SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT]),
    attributes=st.dictionaries(st.text(min_size=1, max_size=20), VALUES, max_size=5),
    has_failed=st.booleans(),
    started_at=st.integers(0, 2**63),
    ended_at=st.integers(0, 2**63),
)


@given(st.lists(SPANS, min_size=1, max_size=4))
def test_spans_are_encoded_as_the_sdk_encodes_them(spans: list[CallSpan]) -> None:
    resource = Resource({"service.name": "tersely", "host.ids": ["a", "b"]}, "https://schema.example")
    scope = InstrumentationScope("tersely", __version__)
    by_sdk = encode_spans(
        [
            ReadableSpan(
                name=span.name, context=span.context, parent=span.parent, resource=resource,
                attributes=span.attributes, kind=span.kind,
                status=Status(StatusCode.ERROR if span.has_failed else StatusCode.UNSET),
                start_time=span.started_at, end_time=span.ended_at, instrumentation_scope=scope,
            )
            for span in spans
        ]
    )  # fmt: skip
    encoded = SpanEncoder(resource, SpanLimits()).encode(spans)
    assert type(by_sdk).FromString(encoded) == by_sdk


async def test_a_new_trace_has_random_ids_and_keeps_limits_of_attributes(
    database: Database, model: Model, collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "6")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "5")
    with serve(database, model.url) as service:
        assert (await WIRES["openai_chat"].send(service, "Hello")).status == 200
        collector.wait(1)
    (call,) = collector.calls()
    assert call.parent == ""
    # Three: sampled, and an id of random bits.
    assert model.last.headers["Traceparent"].startswith(f"00-{call.trace}-")
    assert model.last.headers["Traceparent"].endswith("-03")
    assert len(call.attributes) == 6
    texts = [value for span in collector.spans for value in span.attributes.values() if isinstance(value, str)]
    assert texts
    assert max(len(each) for each in texts) == 5
