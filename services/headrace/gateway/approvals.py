"""Calls that a person has to allow first: asked for, decided and looked up in the stream of evidence.

A call that waits is an unacked message in the queue, and what was said of it stands in the evidence: so it waits over
any restart, and nobody keeps a list that could be wrong. The first decision counts; it is written by compare-and-set.
An approval is for one body: its fingerprint stands beside it, and another body under the same key is another call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Literal

from msgspec import Struct

from headrace.contracts import codec
from headrace.contracts.calls import CallWaiting
from headrace.contracts.errors import Conflict, HeadraceError, Unavailable
from headrace.contracts.ledger import CallRequest, Evidence
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.ledger import Overtaken
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import stream_info
from headrace.mesh.tail import tail

log = logging.getLogger("headrace.gateway")

TRIES = 20
READ_WITHIN_S = 10.0
Decision = Literal["approved", "denied"]


class Approval(Struct, frozen=True):
    """Where a call stands with those who decide. `seq` is the last sequence of its evidence."""

    state: Literal["not_asked", "waiting", "approved", "denied"] = "not_asked"
    asked: Evidence | None = None
    decided: Evidence | None = None
    seq: int = 0

    @property
    def fingerprint(self) -> str | None:
        """What it was asked for."""
        request = self.asked.request if self.asked else None
        return request.fingerprint if request else None


def take(approval: Approval, evidence: Evidence, seq: int) -> Approval:
    """`approval` after one more piece of evidence."""
    match evidence.kind:
        case "approval_asked" if approval.state == "not_asked":
            return Approval("waiting", evidence, None, seq)
        case "approved" | "denied" if approval.state == "waiting":
            return Approval(evidence.kind, approval.asked, evidence, seq)
        case "rejected" if approval.state == "waiting":  # its deadline is over, or a rule denies it now
            return Approval("not_asked", None, None, seq)
        case _:
            return Approval(approval.state, approval.asked, approval.decided, seq)


class Approvals:
    """Approvals of a mesh, as one gateway reads and writes them."""

    def __init__(self, mesh: Mesh, evidence: EvidenceStream) -> None:
        self._mesh = mesh
        self._evidence = evidence
        self._waiting: dict[tuple[str, str], Approval] = {}
        self._following: asyncio.Task[None] | None = None
        self._caught_up = asyncio.Event()
        self._moved = asyncio.Event()
        self._read = 0

    async def of(self, tenant: str, call: str) -> Approval:
        """Where a call stands."""
        found = Approval()
        for evidence, seq in await self._evidence.read(tenant, call):
            found = take(found, evidence, seq)
        return found

    async def ask(
        self, found: Approval, tenant: str, call: str, *, why: str, request: CallRequest, body: Any = None
    ) -> None:
        """Write that a call waits; `found` is where it stood. If somebody else wrote meanwhile, that is as good."""
        evidence = Evidence(
            call=call, tenant=tenant, kind="approval_asked", by=request.principal, why=why, request=request, body=body,
            at_us=_now_us(),
        )  # fmt: skip
        try:
            await self._evidence.store(evidence, expected=found.seq)
        except Overtaken:
            return
        crash_point("approval-asked")

    async def decide(self, tenant: str, call: str, decision: Decision, *, by: str, why: str) -> None:
        """Write a decision; saying the same again changes nothing.

        Raise `Conflict` if the call does not wait, or was decided otherwise.
        """
        for _ in range(TRIES):
            found = await self.of(tenant, call)
            if found.state == decision:
                return
            if found.decided is not None:
                msg = f"call {call} was {found.state} by {found.decided.by or 'somebody'}: the first decision counts"
                raise Conflict(msg, code="already_decided")
            if found.state == "not_asked":
                raise Conflict(f"call {call} does not wait for approval", code="no_approval_asked")
            evidence = Evidence(call=call, tenant=tenant, kind=decision, by=by, why=why, at_us=_now_us())
            try:
                await self._evidence.store(evidence, expected=found.seq)
            except Overtaken:
                continue
            crash_point("approval-decided")
            log.info("a call is decided", extra={"call": call, "by": by, "decision": decision})
            return
        raise Unavailable(f"what is said of call {call} changes all the time: try again")

    # --- what waits --------------------------------------------------------------------------------
    async def waiting(self, tenant: str | None, limit: int) -> list[CallWaiting]:
        """Calls that wait, oldest first. The first asking reads all evidence; from then on it is followed."""
        if self._following is None or self._following.done():
            self._caught_up.clear()
            self._waiting.clear()
            self._following = asyncio.get_running_loop().create_task(self._follow())
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                await self._up_to_date()
        except TimeoutError:
            raise Unavailable("the evidence is still being read: ask again", code="still_reading") from None
        found = [line_of(a) for (of, _), a in self._waiting.items() if tenant in (None, of)]
        return sorted(found, key=lambda line: line.asked_us)[:limit]

    async def _up_to_date(self) -> None:
        """Return once what is stored now has been read."""
        last = int((await stream_info(self._mesh, self._mesh.topology.evidence))["state"]["last_seq"])
        await self._caught_up.wait()
        while self._read < last and self._following is not None and not self._following.done():
            self._moved.clear()
            await self._moved.wait()

    async def _follow(self) -> None:
        stream = self._mesh.topology.evidence
        last = int((await stream_info(self._mesh, stream))["state"]["last_seq"])
        if last == 0:
            self._caught_up.set()
        try:
            async for batch in tail(self._mesh, stream, f"{self._mesh.subjects.prefix}.evidence.>"):
                for message in batch:
                    self._take(message.data, message.headers, message.sequence)
                self._read = batch[-1].sequence
                self._moved.set()
                if self._read >= last:
                    self._caught_up.set()
        except HeadraceError as e:
            log.warning("evidence is followed no more", extra={"reason": str(e)[:200]})

    def _take(self, data: bytes, headers: dict[str, str], seq: int) -> None:
        evidence = codec.EVIDENCE.decode(data, headers)
        key = (evidence.tenant, evidence.call)
        approval = take(self._waiting.get(key, Approval()), evidence, seq)
        if approval.state == "waiting":
            self._waiting[key] = approval
        else:
            self._waiting.pop(key, None)

    async def close(self) -> None:
        """Follow no more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)


def line_of(approval: Approval) -> CallWaiting:
    """A waiting call as it is listed."""
    asked = approval.asked
    request = asked.request if asked else None
    if asked is None or request is None:
        raise HeadraceError("a call waits for approval, and what it asks is not on record")
    return CallWaiting(
        call=asked.call, tenant=asked.tenant, agent=request.principal, callee=request.callee, effect=request.effect,
        model=request.model, why=asked.why, asked_us=asked.at_us, deadline_us=request.deadline_us,
    )  # fmt: skip


def _now_us() -> int:
    return time.time_ns() // 1_000
