"""What collectors hear of calls: spans by OpenTelemetry's conventions for generative AI, and metrics.

A call has one trace, from its first intent over every redelivery, restart and replay: the context stands in the intent.
It is that of the asker's message; without one it is made of the call's id, so that whoever takes the call up finds the
same. Each attempt is a client span, `chat MODEL` or `execute_tool CALLEE`, whose usage is that of the record; each
asking is a consumer span, linked to where it came from. No body is ever an attribute.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace
from opentelemetry.trace import SpanKind

from headrace.contracts.account import CallView
from headrace.contracts.calls import CallAnswer, CallAsk, CallMessage
from headrace.contracts.codec import TRACEPARENT
from headrace.contracts.ledger import CallUsage, Completed
from headrace.gateway.dialing import Order
from headrace.gateway.open_calls import OpenCalls
from headrace.gateway.records import Asked
from headrace.mesh import metrics, semconv
from headrace.mesh.tracing import TraceSpan, carry, enabled, open_span, parse_traceparent

STREAM: Final = "HR_CALLS"
PROVIDERS: Final = {"openai": "openai", "function": "headrace", "http": "http"}


# --- contexts ---------------------------------------------------------------------------------------


def traced(message: CallMessage, headers: Mapping[str, str] | None) -> CallMessage:
    """`message` with the context of its headers."""
    carried = carry(headers, None)
    return message if carried is None else replace(message, traceparent=carried)


def traceparent_of(message: CallMessage, call: str) -> str | None:
    """The context of an asking: its message's, else, while traces are on, one that follows from the call's id."""
    given = message.traceparent if parse_traceparent(message.traceparent) else None
    if given is not None or not enabled():
        return given
    digest = hashlib.sha256(f"{message.tenant}/{call}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def sent(request: CallAsk, tenant: str, call: str, headers: Mapping[str, str] | None) -> TraceSpan | None:
    """The span of an asking at the front door, until it is stored; None while traces are off."""
    if not enabled():
        return None
    attributes = _of_call(tenant, call, request.callee, request.agent) | semconv.operation(
        "send", "send", STREAM
    )
    parent = parse_traceparent((headers or {}).get(TRACEPARENT))
    return open_span(f"send {STREAM}", SpanKind.PRODUCER, parent, attributes, linked=False)


# --- spans ------------------------------------------------------------------------------------------


def attempt_span(asked: Asked, order: Order, traceparent: str | None) -> TraceSpan | None:
    """Open the span of one attempt in the call's trace; None while traces are off, or the trace is not sampled."""
    parent = parse_traceparent(traceparent)
    if not enabled() or (parent is not None and not parent.trace_flags.sampled):
        return None
    kind, body = asked.callee.settings.kind, asked.body
    attributes = _of_call(order.tenant, order.call, asked.callee.name, asked.message.agent)
    attributes["headrace.call.attempt"] = order.attempt
    attributes["headrace.call.effect"] = asked.callee.effect
    if asked.message.conversation:
        attributes[semconv.GEN_AI_CONVERSATION_ID] = asked.message.conversation
    if kind == "http":
        name = f"execute_tool {asked.callee.name}"
        attributes |= {
            semconv.GEN_AI_OPERATION_NAME: "execute_tool",
            semconv.GEN_AI_TOOL_NAME: asked.callee.name,
            semconv.GEN_AI_TOOL_TYPE: "extension",
            semconv.GEN_AI_TOOL_CALL_ID: order.call,
        }
    else:
        model = body.model or asked.callee.settings.function or asked.callee.name
        name = f"chat {model}"
        attributes |= {
            semconv.GEN_AI_OPERATION_NAME: "chat",
            semconv.GEN_AI_PROVIDER_NAME: PROVIDERS[kind],
            semconv.GEN_AI_REQUEST_MODEL: model,
        }
        if body.max_output_tokens is not None:
            attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] = body.max_output_tokens
    return open_span(name, SpanKind.CLIENT, parent, attributes, linked=False)


def attempt_ended(span: TraceSpan | None, view: CallView | None, attempt: int, owner: str) -> None:
    """End the span of an attempt by its record; one that somebody else ended is `fenced`."""
    if span is None:
        return
    end = view.attempts[attempt - 1].end if view is not None and attempt <= len(view.attempts) else None
    if end is None or end.owner != owner:
        span.end(error="fenced")
        return
    attributes: semconv.Attributes = {"headrace.call.state": _state(end)}
    if not isinstance(end, Completed):
        span.set(attributes)
        span.end(error=end.error.type)
        return
    attributes["headrace.call.cost_micro"] = end.cost_micro
    attributes["headrace.usage.source"] = end.usage.source
    attributes |= usage_attributes(end.usage)
    if end.outcome.response_id:
        attributes[semconv.GEN_AI_RESPONSE_ID] = end.outcome.response_id
    if end.outcome.finish_reason:
        attributes[semconv.GEN_AI_RESPONSE_FINISH_REASONS] = [end.outcome.finish_reason]
    span.set(attributes)
    span.end()


def asked_span(
    message: CallMessage,
    answer: CallAnswer | None,
    traceparent: str | None,
    *,
    started_ns: int,
    waits: str = "",
) -> None:
    """Record the span of one asking, in the call's trace and linked to its own message's."""
    if not enabled():
        return
    parent, own = parse_traceparent(traceparent), parse_traceparent(message.traceparent)
    if parent is None or not parent.trace_flags.sampled:
        return
    call = answer.call_id if answer else message.call or ""
    attributes = _of_call(message.tenant, call, message.callee, message.agent)
    attributes |= semconv.operation("process", "process", STREAM)
    attributes[semconv.MESSAGING_MESSAGE_ID] = message.request
    attributes["headrace.call.state"] = answer.state if answer else waits
    if answer:
        attributes["headrace.call.replayed"] = answer.replayed
    if own is not None and own.trace_id != parent.trace_id:
        attributes["headrace.asked_in"] = f"{own.trace_id:032x}"
    span = open_span(
        f"process {STREAM}", SpanKind.CONSUMER, parent, attributes, linked=True, at_ns=started_ns
    )
    span.end(error=str(answer.error.get("type", "error")) if answer and answer.error else None)


def _of_call(tenant: str, call: str, callee: str, agent: str) -> semconv.Attributes:
    return {
        "headrace.call.id": call,
        "headrace.tenant": tenant,
        "headrace.callee": callee,
        semconv.GEN_AI_AGENT_NAME: agent,
    }


def usage_attributes(usage: CallUsage) -> semconv.Attributes:
    """Usage as the ledger has it."""
    attributes: semconv.Attributes = {
        semconv.GEN_AI_USAGE_INPUT_TOKENS: usage.input_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: usage.output_tokens,
    }
    if usage.cached_tokens:
        attributes[semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] = usage.cached_tokens
    return attributes


def _state(end: object) -> str:
    return {"Completed": "completed", "Failed": "failed", "InDoubt": "in_doubt"}.get(
        type(end).__name__, "attempt_failed"
    )


# --- metrics ----------------------------------------------------------------------------------------


def answered(answer: CallAnswer, callee: str) -> None:
    """Count an asking that got its answer."""
    metrics.count(
        "headrace.calls",
        {
            "headrace.call.state": answer.state,
            "headrace.callee": callee,
            "headrace.call.replayed": answer.replayed,
        },
        unit="{call}",
    )
    if answer.state == "refused":
        type_ = str((answer.error or {}).get("type", "refused"))
        metrics.count(
            "headrace.calls.refused", {"error.type": type_, "headrace.callee": callee}, unit="{call}"
        )


def attempted(asked: Asked, usage: CallUsage | None, *, seconds: float, added_s: float) -> None:
    """Record how long a callee took, how long the gateway took beside it, and the tokens."""
    if not metrics.enabled():
        return
    callee = asked.callee
    operation = "execute_tool" if callee.settings.kind == "http" else "chat"
    common = {"gen_ai.operation.name": operation, "headrace.callee": callee.name}
    if asked.body.model:
        common["gen_ai.request.model"] = asked.body.model
    metrics.record("gen_ai.client.operation.duration", seconds, common, unit="s")
    metrics.record("headrace.call.added.duration", added_s, {"headrace.callee": callee.name}, unit="s")
    if usage is not None and operation == "chat":
        for type_, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            metrics.record(
                "gen_ai.client.token.usage", tokens, common | {"gen_ai.token.type": type_}, unit="{token}",
                buckets=metrics.TOKENS,
            )  # fmt: skip


def watch(calls: OpenCalls) -> None:
    """Report what is in doubt: how many calls, since when the oldest is, and how much money they hold."""

    def doubtful() -> list[CallView]:
        return [c.view for c in list(calls.calls.values()) if c.view.state == "in_doubt"]

    def number() -> Iterable[tuple[float, metrics.Attributes]]:
        return [(len(doubtful()), {})]

    def age_s() -> Iterable[tuple[float, metrics.Attributes]]:
        since = [a.end.at_us for view in doubtful() for a in view.attempts if a.end and a.state == "in_doubt"]
        return [(max(0.0, time.time() - min(since) / 1e6) if since else 0.0, {})]

    def held() -> Iterable[tuple[float, metrics.Attributes]]:
        amounts = (a.intent.max_cost_micro for view in doubtful() for a in view.attempts if a.held)
        return [(sum(amounts), {})]

    metrics.observe("headrace.calls.in_doubt", number, unit="{call}", description="calls in doubt")
    metrics.observe(
        "headrace.calls.in_doubt.age", age_s, unit="s", description="age of the oldest call in doubt"
    )
    metrics.observe(
        "headrace.calls.in_doubt.held", held, unit="{micro}", description="micro-units of money held in doubt"
    )
