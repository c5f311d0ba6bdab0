"""The spans of the task path, and where each is opened.

`submit` (internal) → `send` (producer) → `process` (consumer, linked to its `send`; one more for each
redelivery, linked to the same) → `chat` (client) and `land` (consumer, linked to its `process`).

Sampling is by job: the sampler decides once, on the submit's span, and items follow it. Of a sampled job the
first `HEADRACE_TRACE_ITEMS_PER_JOB` items (default 1000) get spans; the later ones carry the trace id with
the sampled flag cleared, so that their outcomes still name the trace. A job that is not sampled carries
nothing. A job's context stands in its `opened` event, so that a resumed submit stays in its trace.

Where it is called:

- client: `submit_span` once for each run of a submit; `JobTrace.send` for each task gives the `traceparent`
  of its headers; `JobTrace.stored` when a batch is acknowledged; `JobTrace.end` at last.
- worker: `process_span` when a delivery is decoded, `chat_span` around the engine, `tracing.carry` for the
  result's header and `tracing.trace_id` for `Result.trace_id`; `TraceSpan.end` after the settle.
- completion: `landed` once for each committed batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from headrace.contracts.codec import TRACEPARENT
from headrace.mesh import semconv
from headrace.mesh.tracing import TraceSpan, enabled, job_context, open_span, parse_traceparent

if TYPE_CHECKING:
    from headrace.contracts.generation import Generation
    from headrace.contracts.messages import Result, Task
    from headrace.mesh.consumer import Delivery

ITEMS_PER_JOB: Final = 1_000


class JobTrace:
    """The spans of one run of a submit: its own, and the `send` of each item that is traced."""

    def __init__(self, span: TraceSpan, stream: str, items: int) -> None:
        self._span = span
        self._stream = stream
        self._items = items
        self._open: dict[int, TraceSpan] = {}
        context = span.context
        self.sampled = bool(context.trace_flags & TraceFlags.SAMPLED)
        self.traceparent = span.traceparent
        """For `JobOpened.traceparent`."""
        self._unsampled = self.traceparent[:-2] + "00"

    @property
    def trace_id(self) -> str:
        """The job's trace, 32 hex digits."""
        return self.traceparent[3:35]

    def send(self, task: Task, *, size: int = 0) -> str | None:
        """Open the `send` span of a task; the `traceparent` for its headers, None for an unsampled job."""
        if not self.sampled:
            return None
        if task.index >= self._items:
            return self._unsampled
        if task.index in self._open:  # prepared twice, sent once
            return self._open[task.index].traceparent
        attributes = semconv.of_item(task) | semconv.operation("send", "send", self._stream)
        if size:
            attributes[semconv.MESSAGING_MESSAGE_BODY_SIZE] = size
        name = f"send {self._stream}"
        span = (
            open_span(name, SpanKind.PRODUCER, self._span.context, attributes, linked=False)
            if enabled()
            else self._span
        )
        self._open[task.index] = span
        return span.traceparent

    def stored(self, upto: int) -> None:
        """End the `send` spans of the items below index `upto`: the broker acknowledged them."""
        for index in [index for index in self._open if index < upto]:
            self._open.pop(index).end()

    def end(self, *, count: int = 0, error: str | None = None) -> None:
        """End the submit; `send` spans still open were not acknowledged, and say so."""
        for span in self._open.values():
            span.end(error=error or "not_acknowledged")
        self._open.clear()
        self._span.set({semconv.MESSAGING_BATCH_MESSAGE_COUNT: count})
        self._span.end(error=error)


def submit_span(
    *, job: str, function: str, tenant: str, lane: str, stream: str, stored: str | None = None
) -> JobTrace | None:
    """Open the span of a submit, in the trace `stored` with the job if it began before; None while off."""
    if not enabled():
        return None
    limit = os.environ.get("HEADRACE_TRACE_ITEMS_PER_JOB", "")
    attributes = semconv.of_job(job=job, function=function, tenant=tenant, lane=lane)
    span = open_span("submit", SpanKind.INTERNAL, job_context(stored), attributes, linked=False)
    return JobTrace(span, stream, int(limit) if limit.isdecimal() else ITEMS_PER_JOB)


def process_span(delivery: Delivery, task: Task, *, client: str) -> TraceSpan | None:
    """Open the span of one delivery, a child of its `send` and linked to it; None if it is not traced."""
    parent = _sampled(delivery.headers)
    if parent is None:
        return None
    attributes = semconv.of_item(task) | semconv.operation("process", "process", delivery.stream)
    attributes[semconv.MESSAGING_CONSUMER_GROUP_NAME] = delivery.consumer
    attributes[semconv.MESSAGING_CLIENT_ID] = client
    attributes["headrace.delivery.attempt"] = delivery.delivered
    attributes["headrace.stream.sequence"] = delivery.stream_seq
    return open_span(f"process {delivery.stream}", SpanKind.CONSUMER, parent, attributes, linked=True)


def chat_span(
    parent: TraceSpan | None, params: Generation, *, chat: bool, engine: str, model: str, max_tokens: int
) -> TraceSpan | None:
    """Open the span of a model's run inside an item's `process`; None if the item is not traced."""
    if parent is None or not enabled():
        return None
    attributes = semconv.asked(params, chat=chat, engine=engine, model=model, max_tokens=max_tokens)
    name = f"{attributes[semconv.GEN_AI_OPERATION_NAME]} {model}"
    return open_span(name, SpanKind.CLIENT, parent.context, attributes, linked=False)


def landed(batch: Iterable[tuple[Delivery, Result]], *, started_ns: int) -> None:
    """Record a `land` span for each traced result of a batch that is now committed.

    `started_ns` is `time.time_ns()` of when the transaction began.
    """
    if not enabled():
        return
    ended_ns = time.time_ns()
    for delivery, result in batch:
        parent = _sampled(delivery.headers)
        if parent is None:
            continue
        attributes = semconv.of_item(result) | semconv.operation("process", "land", delivery.stream)
        attributes[semconv.MESSAGING_CONSUMER_GROUP_NAME] = delivery.consumer
        attributes["headrace.status"] = result.status
        attributes["headrace.delivery.attempt"] = delivery.delivered
        span = open_span(
            f"land {delivery.stream}", SpanKind.CONSUMER, parent, attributes, linked=True, at_ns=started_ns
        )
        span.end(error=result.error.type if result.error else None, at_ns=ended_ns)


def _sampled(headers: Mapping[str, str] | None) -> SpanContext | None:
    """The context in `headers` if tracing is on and its sampled flag is set."""
    if not enabled() or not headers:
        return None
    context = parse_traceparent(headers.get(TRACEPARENT))
    return context if context is not None and context.trace_flags & TraceFlags.SAMPLED else None
