"""Traces: one trace id for an item from its submit to its landing, over redelivery and restart.

Off unless `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set; then spans go out as
OTLP over HTTP, and every other `OTEL_*` variable of the SDK counts (sampler, headers, batch sizes, resource).
While it is off each function costs one check for None, and nothing of the SDK is imported.

This file switches tracing on and off and carries contexts; the spans themselves are opened in `spans`.
Contexts are passed by hand, never by a "current" span: thousands of items are open at once in one process.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from headrace.contracts.codec import TRACEPARENT
from headrace.mesh import semconv

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from headrace.contracts.messages import Choice, Usage

log = logging.getLogger("headrace.tracing")

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_INSTANCE = str(uuid.uuid4())
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class _Provider(Protocol):
    def shutdown(self) -> None: ...


_tracer: trace.Tracer | None = None
_provider: _Provider | None = None


# --- on and off -------------------------------------------------------------------------------------


def configured(environ: Mapping[str, str] | None = None) -> bool:
    """True if the environment names a receiver and does not switch tracing off."""
    env = os.environ if environ is None else environ
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if env.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() in ("none", ""):
        return False
    return any(env.get(name, "").strip() for name in _ENDPOINTS)


def setup_tracing(service: str) -> None:
    """Start exporting spans of this process as `headrace-<service>`, if the environment asks for it.

    `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` come before it. A second call does nothing.
    """
    global _tracer, _provider
    if _tracer is not None or not configured():
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol and protocol != "http/protobuf":
        log.warning("OTLP protocol %s is not spoken here: spans go out as http/protobuf", protocol)
    # No exit handler: the SDK's waits up to 30 s for a receiver that is down. `shutdown_tracing` has a bound.
    provider = TracerProvider(resource=resource_of(service), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _provider, _tracer = provider, provider.get_tracer("headrace")


def resource_of(service: str) -> Resource:
    """What this process is, for its spans and its metrics alike."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = Resource(
        {
            "service.namespace": "headrace",
            "service.name": f"headrace-{service}",
            "service.instance.id": _INSTANCE,
        }
    )
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())


def shutdown_tracing(timeout_s: float = 5.0) -> None:
    """Send what has ended and stop; spans that a receiver does not take within `timeout_s` are given up."""
    global _tracer, _provider
    provider, _provider, _tracer = _provider, None, None
    if provider is None:
        return
    # The SDK's own flush knows no time limit, so it gets a thread that may be left behind.
    flush = threading.Thread(target=provider.shutdown, name="headrace-trace-flush", daemon=True)
    flush.start()
    flush.join(timeout_s)
    if flush.is_alive():
        log.warning("spans not sent within %.1f s: given up", timeout_s)


def enabled() -> bool:
    """True between `setup_tracing` and `shutdown_tracing`, if a receiver is configured."""
    return _tracer is not None


# --- contexts ---------------------------------------------------------------------------------------


def parse_traceparent(value: str | None) -> SpanContext | None:
    """The context in a `traceparent` header (W3C Trace Context); None for a missing or malformed one.

    A header comes from outside: nothing in it may raise, or stop an item.
    """
    found = _TRACEPARENT.fullmatch(value) if value else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    context = SpanContext(
        int(found[2], 16), int(found[3], 16), is_remote=True, trace_flags=TraceFlags(int(found[4], 16))
    )
    return context if context.is_valid else None


def inject(span: Span | SpanContext) -> str:
    """The `traceparent` of a span, for a message's headers."""
    context = span if isinstance(span, SpanContext) else span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & TraceFlags.SAMPLED:02x}"


@functools.lru_cache(maxsize=1_024)
def trace_id(traceparent: str | None) -> str | None:
    """The trace id in a `traceparent`, 32 hex digits; None if there is none."""
    return traceparent[3:35] if parse_traceparent(traceparent) is not None and traceparent else None


def job_context(stored: str | None = None) -> SpanContext | None:
    """The parent of a submit: the one that the job was opened with, else `TRACEPARENT` of the environment."""
    return parse_traceparent(stored) or parse_traceparent(os.environ.get("TRACEPARENT"))


def carry(headers: Mapping[str, str] | None, span: TraceSpan | None) -> str | None:
    """The `traceparent` that a result takes on: of the span, else the one of its task if that is well formed.

    It is passed on while tracing is off here too: the trace may go on in a process where it is on.
    """
    if span is not None:
        return span.traceparent
    value = headers.get(TRACEPARENT) if headers else None
    return value if parse_traceparent(value) is not None else None


# --- spans ------------------------------------------------------------------------------------------


class TraceSpan:
    """An open span: set attributes, then `end` it once."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.traceparent = inject(span)

    @property
    def context(self) -> SpanContext:
        """What a child or a link needs of it."""
        return self._span.get_span_context()

    def set(self, attributes: Mapping[str, semconv.Value]) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def answered(self, *, model: str, usage: Usage, choices: Iterable[Choice]) -> None:
        """End a `chat` span with what the model gave."""
        self._span.set_attributes(semconv.answered(model=model, usage=usage, choices=choices))
        self._span.end()

    def end(self, *, error: str | None = None, at_ns: int | None = None) -> None:
        """End it; `error` is a stable word (`too_long`), never a text that might quote a prompt."""
        if error is not None:
            self._span.set_attribute(semconv.ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(at_ns)


def open_span(
    name: str,
    kind: SpanKind,
    parent: SpanContext | None,
    attributes: semconv.Attributes,
    *,
    linked: bool,
    at_ns: int | None = None,
) -> TraceSpan:
    """Open a span under `parent` (a root without one), linked to it too if asked. Only while `enabled`."""
    assert _tracer is not None  # noqa: S101  (every caller asked `enabled`)
    # An empty context, not None: None would mean the current one, and a stray span there is not our parent.
    context = otel_context.Context()
    if parent is not None:
        context = trace.set_span_in_context(NonRecordingSpan(parent), context)
    links = [Link(parent)] if linked and parent is not None else None
    return TraceSpan(_tracer.start_span(name, context, kind, attributes, links, at_ns))
