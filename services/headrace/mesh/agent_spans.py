"""The spans of agents: `send` (producer) → `process` (consumer, linked; one for each delivery) → `invoke_agent`.

A mail carries the context of its `send`, which stands in the sender's committed record too, so a mail that is sent
again after a crash is in the same trace. That of a mail without a context follows from its id, so that each of its
deliveries finds the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind, TraceFlags

from headrace.mesh import semconv
from headrace.mesh.tracing import TraceSpan, enabled, open_span, parse_traceparent

if TYPE_CHECKING:
    from headrace.contracts.mail import Mail
    from headrace.mesh.consumer import Delivery


def traceparent_of(mail: Mail) -> str | None:
    """The context of a mail: its own, else, while traces are on, one that follows from its id."""
    if parse_traceparent(mail.traceparent) is not None or not enabled():
        return mail.traceparent
    digest = hashlib.sha256(mail.id.encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def _of_mail(mail: Mail) -> semconv.Attributes:
    attributes: semconv.Attributes = {
        semconv.MESSAGING_SYSTEM: "nats",
        semconv.MESSAGING_MESSAGE_ID: mail.id,
        "headrace.mail.kind": mail.kind,
        "headrace.mail.sender": mail.sender,
        "headrace.mail.to": mail.to,
    }
    if mail.conversation is not None:
        attributes[semconv.GEN_AI_CONVERSATION_ID] = mail.conversation
    return attributes


def mail_sent(mail: Mail, stream: str) -> TraceSpan | None:
    """Open the `send` span of a mail, under the context that it has; None if that is not traced. End it once stored."""
    parent = parse_traceparent(traceparent_of(mail))
    if not enabled() or (parent is not None and not parent.trace_flags & TraceFlags.SAMPLED):
        return None
    attributes = _of_mail(mail) | semconv.operation("send", "send", stream)
    return open_span(f"send {stream}", SpanKind.PRODUCER, parent, attributes, linked=False)


def mail_processed(delivery: Delivery, mail: Mail, *, client: str) -> TraceSpan | None:
    """Open the span of one delivery, a child of its `send` and linked to it; None if it is not traced."""
    parent = parse_traceparent(traceparent_of(mail))
    if not enabled() or (parent is not None and not parent.trace_flags & TraceFlags.SAMPLED):
        return None
    attributes = _of_mail(mail) | semconv.operation("process", "process", delivery.stream)
    attributes[semconv.MESSAGING_CONSUMER_GROUP_NAME] = delivery.consumer
    attributes[semconv.MESSAGING_CLIENT_ID] = client
    attributes["headrace.delivery.attempt"] = delivery.delivered
    attributes["headrace.stream.sequence"] = delivery.stream_seq
    return open_span(f"process {delivery.stream}", SpanKind.CONSUMER, parent, attributes, linked=True)


def agent_invoked(parent: TraceSpan | None, agent: str, kind: str) -> TraceSpan | None:
    """Open the span of a handler's run inside a mail's `process`; None if the mail is not traced."""
    if parent is None or not enabled():
        return None
    attributes: semconv.Attributes = {
        semconv.GEN_AI_OPERATION_NAME: "invoke_agent",
        semconv.GEN_AI_AGENT_NAME: agent,
        "headrace.mail.kind": kind,
    }
    return open_span(f"invoke_agent {agent}", SpanKind.INTERNAL, parent.context, attributes, linked=False)
