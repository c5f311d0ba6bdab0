"""Attempts at our own workers: a task in the queue, and its result from the stream of results.

Such a call is never in doubt for long. The task's name follows from call and attempt, its result is stored before the
task is acked, so whoever looks, after whatever restart, finds the result, or the task, or neither; then it was never
stored, and may be stored now. Several gateways may wait for one result: the ledger takes it from the first.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from msgspec.structs import replace

from headrace.client.formats import LineDecoder
from headrace.client.tasks import TaskMaker
from headrace.contracts import codec
from headrace.contracts.account import CallView
from headrace.contracts.codec import SCHEMA_HEADER, TRACEPARENT
from headrace.contracts.errors import (
    Conflict,
    HeadraceError,
    InvalidInput,
    NotFound,
    Refused,
    Unavailable,
    Undecodable,
)
from headrace.contracts.ledger import CallError, CallOutcome, CallTimes, CallUsage
from headrace.contracts.messages import FunctionSpec, ItemError, Result, Task
from headrace.contracts.names import Lane
from headrace.gateway.callees import Callee
from headrace.gateway.dialing import Attempted, Order
from headrace.gateway.verdicts import Seen
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.jsapi import (
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SUBJECT_SEQUENCE,
    JetStreamError,
    last_message,
    purge,
)
from headrace.mesh.provision import get_function
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.gateway")

LOOK_EVERY_S = 1.0
"""How often a result is looked for that was not heard of: a message may be missed while the connection is lost."""
SPEC_KEPT_S = 5.0


def job_of(call: str, attempt: int) -> str:
    """The name of the one-item job that an attempt is."""
    return f"{call}-{attempt}"


class FunctionDialer:
    """Runs calls on workers of this mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._objects = BlobStore(mesh)
        self._waiting: dict[str, asyncio.Event] = {}
        self._specs: dict[str, tuple[float, FunctionSpec]] = {}

    async def start(self) -> None:
        """Hear of results as they are stored."""
        await self._mesh.subscribe(self._mesh.subjects.results_of_sink("call"), self._heard)

    def _heard(self, subject: str) -> None:
        event = self._waiting.get(subject.rsplit(".", 1)[-1])
        if event is not None:
            event.set()

    async def dial(self, order: Order) -> Attempted:
        """Store the task, unless it or its result is there, and wait for the result."""
        function = order.callee.settings.function or order.callee.name
        job = job_of(order.call, order.attempt)
        sent_us = time.time_ns() // 1_000
        event = self._waiting[job] = asyncio.Event()
        try:
            async with asyncio.timeout(max(0.0, order.until_us / 1e6 - time.time())):
                result = await self._run(order, function, job, event)
        except (InvalidInput, NotFound, Refused) as e:
            return Attempted(
                seen=Seen.REFUSED, error=CallError(type=e.code, message=str(e)[:2_048]), request_sent=False
            )
        except TimeoutError:
            return await self._given_up(order, function, job)
        finally:
            self._waiting.pop(job, None)
        return _attempted(result, sent_us)

    async def resolve(self, callee: Callee, view: CallView) -> Attempted | None:
        """The result, if it is there."""
        function = callee.settings.function or callee.name
        result = await self._result(function, job_of(view.call, view.last.intent.attempt))
        return None if result is None else _attempted(result, 0)

    # --- the task ----------------------------------------------------------------------------------
    async def _run(self, order: Order, function: str, job: str, event: asyncio.Event) -> Result:
        attempt = 0
        stored = False
        while True:
            try:
                if (result := await self._result(function, job)) is not None:
                    return result
                if not stored:
                    await self._store(order, function, job)
                    stored = True
            except Unavailable as e:
                delay = backoff_s(attempt)
                attempt += 1
                log.warning("a call waits for the broker", extra={"call": order.call, "reason": str(e)[:200]})
                await asyncio.sleep(delay)
                continue
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await event.wait()
                event.clear()
            except TimeoutError:
                continue

    async def _store(self, order: Order, function: str, job: str) -> None:
        spec = await self._spec(function)
        mesh = self._mesh
        maker = TaskMaker(
            mesh.subjects, spec, job=job, lane=Lane.URGENT, tenant=order.tenant, max_payload=mesh.max_payload,
            deadline_us=order.until_us,
        )  # fmt: skip
        body = {name: value for name, value in order.body.value.items() if name != "stream"}
        item = LineDecoder(spec, form="lines").decode(msgspec.json.encode(body))
        message = maker.message(item, 0, time.time_ns() // 1_000)
        task: Task = replace(codec.TASK.decode(message.data), sink="call")
        headers = {SCHEMA_HEADER: codec.TASK.name}
        if order.traceparent:
            headers[TRACEPARENT] = order.traceparent
        try:
            await publish(
                mesh, mesh.topology.tasks, message.subject, codec.TASK.encode(task), headers=headers,
                expected_last_subject_seq=0,
            )  # fmt: skip
        except JetStreamError as e:
            if e.err_code not in (WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE):
                raise Refused(str(e), code="queue_full") from None

    async def _spec(self, function: str) -> FunctionSpec:
        read_at, spec = self._specs.get(function, (-SPEC_KEPT_S, None))
        if spec is None or time.monotonic() - read_at > SPEC_KEPT_S:
            spec = await get_function(self._mesh, function)
            self._specs[function] = (time.monotonic(), spec)
        return spec

    async def _result(self, function: str, job: str) -> Result | None:
        found = await last_message(
            self._mesh, self._mesh.topology.results, self._mesh.subjects.result("call", function, job)
        )
        if found is None:
            return None
        result = codec.RESULT.decode(found.data, found.headers)
        if result.blob is None:
            return result
        try:
            return codec.RESULT.decode(await self._objects.get(result.blob))
        except (NotFound, Conflict, Undecodable) as e:
            error = ItemError(type="result_missing", message=str(e)[:2_048])
            return replace(result, status="failed", error=error, blob=None)

    async def _given_up(self, order: Order, function: str, job: str) -> Attempted:
        """The time is over: the task is taken back. What a worker still makes of it, nobody waits for."""
        error = CallError(
            type="timeout", message=f"no worker of function {function} answered within the call's time"
        )
        try:
            await purge(self._mesh, self._mesh.topology.tasks, filter_=self._mesh.subjects.tasks_of_job(job))
            if (result := await self._result(function, job)) is not None:
                return _attempted(result, 0)
        except HeadraceError as e:
            log.warning("a task could not be taken back", extra={"call": order.call, "reason": str(e)[:200]})
        return Attempted(seen=Seen.NOT_SENT, error=error, request_sent=False)


def _attempted(result: Result, sent_us: int) -> Attempted:
    """What a worker's result says, in the form of an OpenAI-compatible server's answer."""
    times = CallTimes(
        sent_us=sent_us, first_byte_us=result.timings.started_us, done_us=result.timings.finished_us
    )
    if result.status != "ok":
        error = result.error
        type_, message = (error.type, error.message) if error else ("failed", "")
        seen = Seen.REFUSED if result.status == "failed" else Seen.SERVER_ERROR
        return Attempted(seen=seen, error=CallError(type=type_, message=message), times=times)
    usage = CallUsage(
        input_tokens=result.usage.prompt_tokens,
        output_tokens=result.usage.completion_tokens,
        cached_tokens=result.usage.cached_tokens,
    )
    choices = [
        {
            "index": at,
            "finish_reason": choice.finish_reason,
            **(
                {"message": {"role": "assistant", "content": choice.text}}
                if result.chat
                else {"text": choice.text}
            ),
        }
        for at, choice in enumerate(result.choices)
    ]
    value = None if result.value is msgspec.UNSET else result.value
    body = {
        "object": "chat.completion" if result.chat else "text_completion",
        "model": result.model,
        "choices": choices,
    }
    outcome = CallOutcome(
        status=200,
        body=body if value is None else value,
        finish_reason=result.choices[0].finish_reason if result.choices else None,
    )
    return Attempted(seen=Seen.ANSWERED, outcome=outcome, usage=usage, times=times)
