"""From a delivery to an item that may run: decode, check, resolve `max_tokens`, count the cost."""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import TYPE_CHECKING, Final

from headrace.contracts import codec
from headrace.contracts.codec import TRACEPARENT
from headrace.contracts.errors import Undecodable
from headrace.contracts.messages import BlobPrompt, FunctionSpec, Prompt, Task
from headrace.inference_worker.engines.protocol import Engine, ItemFailed, Work
from headrace.inference_worker.ledger import Cost, TokenLedger
from headrace.mesh.consumer import Delivery

if TYPE_CHECKING:
    from headrace.contracts.suspects import Suspect
    from headrace.inference_worker.incidents import Incident
    from headrace.inference_worker.lanes import LaneState
    from headrace.mesh.tracing import TraceSpan

NO_COST: Final = Cost(0, 0)


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1_000


class Item:
    """One delivery on its way through the worker. `work` and `cost` are there once it is admitted or held.

    `record`: what other workers know of a redelivered one. `alone`: it runs with nothing beside it. `incident`: the
    death of the engine that it was in. `seat`: its place in the flight recorder. `prompt`: fetched, where the task only
    names it.
    """

    __slots__ = (
        "aborted", "alone", "cost", "delivery", "incident", "lane", "prompt", "received_us", "record", "run", "seat",
        "span", "started_us", "task", "traceparent", "work",
    )  # fmt: skip

    def __init__(self, delivery: Delivery, task: Task, lane: LaneState) -> None:
        self.delivery = delivery
        self.task = task
        self.lane = lane
        self.received_us = now_us()
        self.started_us = 0
        self.cost = NO_COST
        self.work: Work | None = None
        self.prompt: Prompt | None = None
        self.run: asyncio.Task[None] | None = None
        self.span: TraceSpan | None = None
        headers = delivery.headers
        self.traceparent: str | None = headers.get(TRACEPARENT) if headers else None
        self.aborted: Aborted | None = None
        self.record: Suspect | None = None
        self.incident: Incident | None = None
        self.alone = False
        self.seat = -1

    @property
    def order_us(self) -> int:
        """When it went into an engine last, here or where it was before; 0 if it never did."""
        return self.started_us or (self.record.started_us if self.record is not None else 0)

    def end_span(self, error: str | None = None) -> None:
        """End the item's span, if it is traced."""
        span, self.span = self.span, None
        if span is not None:
            span.end(error=error)


class Aborted(Enum):
    """Why an item was stopped in the engine."""

    JOB_CANCELLED = "its job was cancelled: nothing is settled"
    HANDED_OVER = "the worker stops before the item is finished: it goes back"
    ENGINE_DIED = "its engine is dead and does not say so: it goes back as a suspect"


def decode(delivery: Delivery, function: str) -> Task:
    """The task of a delivery; raise `Undecodable` for bytes that are none, or that belong to another subject.

    Job and function are compared with the subject, since cancelling and accounting go by the subject, and the
    result goes by the task.
    """
    task = codec.TASK.decode(delivery.data, delivery.headers)
    if not delivery.subject.endswith(f".{task.job}") or task.function != function:
        what = f"task of job {task.job!r} for function {task.function!r}"
        raise Undecodable(f"{what} came on subject {delivery.subject[:200]!r}")
    return task


def resolve(item: Item, engine: Engine, spec: FunctionSpec) -> Work:
    """The work of a task, prepared by the engine: exact prompt tokens, and `max_tokens` never None.

    Where the task names no `max_tokens` it gets the function's default, or what the model's limit leaves.
    Raise `ItemFailed` as `Engine.prepare` does.
    """
    task, delivery = item.task, item.delivery
    prompt = item.prompt if isinstance(task.prompt, BlobPrompt) else task.prompt
    if prompt is None:
        raise RuntimeError("the prompt is not fetched")
    params = task.params
    work = Work(
        id=f"{task.job}/{task.index}@{task.generation}.{delivery.stream_seq}.{delivery.delivered}",
        prompt=prompt,
        params=params,
        # With the least that it may be, `prepare` refuses a prompt that is too long for any answer.
        max_tokens=params.max_tokens or max(1, params.min_tokens),
        prompt_tokens=task.prompt_tokens,
        chat=task.chat,
        traceparent=item.traceparent,
        attempt=delivery.delivered,
    )
    return prepared(work, engine, spec)


def prepared(work: Work, engine: Engine, spec: FunctionSpec) -> Work:
    """`work`, whose `max_tokens` is the least that it may be, prepared as `resolve` tells."""
    params = work.params
    work = engine.prepare(work)
    if params.max_tokens is not None:
        return work
    limit = engine.info.max_model_len or spec.max_model_len
    wanted = max(spec.default_max_tokens, params.min_tokens)
    room = limit - work.prompt_tokens if limit else wanted
    return _with_max_tokens(work, max(work.max_tokens, min(wanted, room)))


def cost_of(work: Work, ledger: TokenLedger) -> Cost:
    """Tokens and slots that the item may come to need; raise `ItemFailed` if the engine can never hold it."""
    n = work.params.n
    cost = ledger.cost(work.prompt_tokens + n * work.max_tokens, n)
    if ledger.too_large(cost):
        raise ItemFailed(
            "too_large_for_engine",
            f"prompt of {work.prompt_tokens} tokens and {n} × {work.max_tokens} new ones need {cost.tokens} tokens "
            f"of KV cache; this engine has {ledger.capacity}: ask for fewer, or run a worker with more memory",
            field="max_tokens",
        )
    return cost


def _with_max_tokens(work: Work, max_tokens: int) -> Work:
    return Work(
        id=work.id,
        prompt=work.prompt,
        params=work.params,
        max_tokens=max_tokens,
        prompt_tokens=work.prompt_tokens,
        chat=work.chat,
        traceparent=work.traceparent,
        attempt=work.attempt,
    )
