"""A call as it is asked at the front door: stored, then its answer is waited for; one answer in any case."""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec

from headrace.contracts import codec
from headrace.contracts.calls import CallAnswer, CallAsk, CallMessage
from headrace.contracts.codec import SCHEMA_HEADER, TRACEPARENT
from headrace.contracts.errors import HeadraceError
from headrace.gateway.keys import call_id
from headrace.gateway.telemetry import sent
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.publisher import publish


async def ask(mesh: Mesh, request: CallAsk, *, tenant: str, traceparent: str | None = None) -> CallAnswer:
    """Store a call and return its answer, or `in_progress` if there is none within `wait_s`.

    Raise `Unavailable` if it is not known whether the call is stored: the same key may be asked again, and a call
    without a key was then accepted by nobody.
    """
    now_us = time.time_ns() // 1_000
    name = request.tenant or tenant
    call = uuid.uuid4().hex if request.key is None else call_id(name, request.agent, request.key)
    until_us = now_us + int(request.wait_s * 1e6)
    span = sent(request, name, call, {TRACEPARENT: traceparent} if traceparent else None)
    with mesh.listen() as (inbox, answered):
        message = CallMessage(
            request=uuid.uuid4().hex,
            callee=request.callee,
            body=request.body,
            tenant=name,
            agent=request.agent,
            key=request.key,
            call=call,
            reply_to=inbox,
            task=request.task,
            asked_us=now_us,
            until_us=until_us,
            deadline_us=None if request.deadline_s is None else now_us + int(request.deadline_s * 1e6),
        )
        carried = span.traceparent if span else traceparent
        headers = {SCHEMA_HEADER: codec.CALL.name} | ({TRACEPARENT: carried} if carried else {})
        try:
            await publish(
                mesh,
                mesh.topology.calls,
                mesh.subjects.call(name, request.agent),
                codec.CALL.encode(message),
                headers=headers,
            )
        except HeadraceError as e:
            if span is not None:
                span.end(error=e.code)
            raise
        if span is not None:
            span.end()
        crash_point("call-accepted")
        try:
            async with asyncio.timeout(max(0.0, until_us / 1e6 - time.time())):
                return msgspec.json.decode((await answered).data, type=CallAnswer)
        except TimeoutError:
            return CallAnswer(call_id=call, state="in_progress")
