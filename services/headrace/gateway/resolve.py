"""Bringing calls in doubt to their end: by evidence, by asking the callee, by an operator; and those of dead owners.

Every end is a record by compare-and-set, so any number of gateways may do this at once, and again after a crash
anywhere in it: the first end stands, and a repeat finds it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from headrace.contracts.account import AttemptView, CallView, advance, settle, view_of
from headrace.contracts.errors import Conflict, HeadraceError, NotFound
from headrace.contracts.ledger import (
    CallError,
    CallOutcome,
    CallRecord,
    CallUsage,
    Completed,
    Evidence,
    Failed,
    Unit,
)
from headrace.gateway.book import Book
from headrace.gateway.callees import Callee, Callees, actual
from headrace.gateway.dialing import Attempted, Dialer
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.ledger import Ledger, Overtaken
from headrace.gateway.open_calls import OpenCall, OpenCalls
from headrace.gateway.records import Me, end_of
from headrace.gateway.verdicts import Seen
from headrace.mesh.connection import backoff_s
from headrace.mesh.crash import crash_point

log = logging.getLogger("headrace.gateway")

SWEEP_S = 0.5
AT_ONCE = 500
PATIENCE_S = 30.0
ASK_CAP_S = 60.0
"""Longest pause between two questions about one call."""


class Resolver:
    """Ends calls for one gateway."""

    def __init__(
        self,
        *,
        me: Me,
        ledger: Ledger,
        book: Book,
        callees: Callees,
        dialer: Dialer,
        evidence: EvidenceStream,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
    ) -> None:
        self._me = me
        self._ledger = ledger
        self._book = book
        self._callees = callees
        self._dialer = dialer
        self._evidence = evidence
        self._now_us = now_us
        self._asked: dict[tuple[str, str], tuple[int, float]] = {}
        """How often a call was asked about, and when it may be again."""

    # --- dead owners -------------------------------------------------------------------------------
    async def recover(self, calls: OpenCalls) -> int:
        """End or put in doubt every open call of an earlier life of this gateway; return how many there were.

        Calls that may simply be made again are left to their messages, which have what was asked.
        """
        mine = [
            call
            for call in list(calls.calls.values())
            if call.view.last.state == "open"
            and call.view.last.intent.owner == self._me.owner
            and call.view.last.intent.epoch < self._me.epoch
            and call.view.request.effect not in ("read", "idempotent")
        ]
        for start in range(0, len(mine), AT_ONCE):
            await asyncio.gather(*(self._declare_dead(call) for call in mine[start : start + AT_ONCE]))
        return len(mine)

    async def _declare_dead(self, call: OpenCall) -> None:
        view = call.view
        try:
            callee = self._callees.get(view.request.callee)
        except NotFound:  # it is declared no more: nobody can say, and so it stays in doubt
            callee = None
        if callee is not None and callee.settings.kind == "function":
            return
        error = CallError(type="owner_died", message="the gateway that made the call died while it was open")
        attempted = Attempted(seen=Seen.DIED, error=error)
        known = callee or Callee(view.request.callee, self._callees.unknown(view.request.effect))
        record = end_of(self._me, known, view, attempted, more=False, now_us=self._now_us())
        await self._write(view, call.seq, record)
        crash_point("recovery-classified")

    # --- in doubt ----------------------------------------------------------------------------------
    async def sweep_for_ever(self, calls: OpenCalls) -> None:
        """Ask for what is in doubt, each call again and again with back-off."""
        await calls.caught_up.wait()
        while True:
            due = [
                call
                for key, call in list(calls.calls.items())
                if call.view.last.state == "in_doubt" and self._is_due(key)
            ]
            for start in range(0, len(due), 32):
                await asyncio.gather(*(self._ask(call) for call in due[start : start + 32]))
            for key in [key for key in self._asked if key not in calls.calls]:
                del self._asked[key]
            await asyncio.sleep(SWEEP_S)

    def _is_due(self, key: tuple[str, str]) -> bool:
        return time.monotonic() >= self._asked.get(key, (0, 0.0))[1]

    async def _ask(self, call: OpenCall) -> None:
        view = call.view
        key = (view.tenant, view.call)
        times = self._asked.get(key, (0, 0.0))[0]
        self._asked[key] = (times + 1, time.monotonic() + backoff_s(times, base=1.0, cap=ASK_CAP_S))
        try:
            callee = self._callees.get(view.request.callee)
            if (late := await self._late_outcome(view)) is not None:
                await self._write(view, call.seq, self._completed(view, callee, late, "evidence"))
                return
            found = await self._dialer.resolve(callee, view)
            crash_point("resolver-asked")
            if found is None:
                return
            settled_us = view.last.intent.at_us + int(
                (callee.settings.timeout_s + callee.settings.settle_delay_s) * 1e6
            )
            if found.seen is Seen.ANSWERED:
                await self._note(view, "resolver", "applied", found)
                await self._write(view, call.seq, self._completed(view, callee, found, "resolver"))
            elif found.seen is Seen.NOT_SENT and self._now_us() >= settled_us:
                await self._note(view, "resolver", "not applied", found)
                await self._write(
                    view, call.seq, self._failed(view, "resolver", "the callee knows no such call")
                )
        except HeadraceError as e:
            log.info("a call stays in doubt", extra={"call": view.call, "reason": str(e)[:200]})

    async def _late_outcome(self, view: CallView) -> Attempted | None:
        """What an owner that was thought dead has brought of the last attempt."""
        for evidence in await self._evidence.of(view.tenant, view.call):
            if (
                evidence.kind == "late_outcome"
                and evidence.attempt == view.last.intent.attempt
                and evidence.outcome
            ):
                return Attempted(
                    seen=Seen.ANSWERED, outcome=evidence.outcome, usage=evidence.usage or CallUsage()
                )
        return None

    # --- the operator's word -----------------------------------------------------------------------
    async def decide(
        self, tenant: str, call: str, *, applied: bool, cost_micro: int | None, why: str, by: str
    ) -> CallView:
        """End a call in doubt as an operator says. Without `cost_micro`, applied costs what is held, else nothing.

        Raise `NotFound`, or `Conflict` if the call is not in doubt.
        """
        stored = await self._ledger.call(tenant, call)
        view = view_of(stored.records)
        if view is None:
            raise NotFound(f"no call {call!r} of tenant {tenant}", code="unknown_call")
        if view.last.state != "in_doubt":
            by_whom = getattr(view.last.end, "resolved_by", None)
            raise Conflict(
                f"call {call} is {view.state}{f' (by {by_whom})' if by_whom else ''}, not in doubt: nothing is to be "
                "resolved",
                code="not_in_doubt",
            )
        await self._evidence.store(
            Evidence(
                call=call, tenant=tenant, kind="operator", attempt=view.last.intent.attempt, by=by, why=why,
                at_us=self._now_us(),
            )
        )  # fmt: skip
        crash_point("operator-noted")
        name = f"operator {by}"
        if applied:
            amounts = _held(view.last)
            if cost_micro is not None:
                amounts["micro"] = cost_micro
            record: CallRecord = Completed(
                **self._common(view), outcome=CallOutcome(), usage=CallUsage(source="assumed"),
                cost_micro=view.last.intent.max_cost_micro if cost_micro is None else cost_micro,
                postings=settle(view.last, amounts), resolved_by=name, why=why,
            )  # fmt: skip
        else:
            record = self._failed(view, name, why, cost_micro or 0)
        seq = await self._book.write(record, view, stored.seq, patience_s=PATIENCE_S)
        log.info("a call is resolved", extra={"call": call, "by": by, "applied": applied, "seq": seq})
        return advance(view, record)

    # --- records -----------------------------------------------------------------------------------
    def _completed(self, view: CallView, callee: Callee, found: Attempted, by: str) -> Completed:
        return Completed(
            **self._common(view),
            outcome=found.outcome or CallOutcome(),
            usage=found.usage,
            cost_micro=actual(callee, found.usage)["micro"],
            postings=settle(view.last, actual(callee, found.usage)),
            resolved_by=by,
        )

    def _failed(self, view: CallView, by: str, why: str, cost_micro: int = 0) -> Failed:
        return Failed(
            **self._common(view),
            error=CallError(type="not_applied", message="the callee did not do it"),
            retryable=cost_micro == 0,
            request_sent=True,
            cost_micro=cost_micro,
            postings=settle(view.last, {"micro": cost_micro} if cost_micro else None),
            resolved_by=by,
            why=why,
        )

    def _common(self, view: CallView) -> dict[str, Any]:
        return {
            "call": view.call, "tenant": view.tenant, "attempt": view.last.intent.attempt, "owner": self._me.owner,
            "epoch": self._me.epoch, "at_us": self._now_us(),
        }  # fmt: skip

    async def _write(self, view: CallView, seq: int, record: CallRecord) -> None:
        try:
            await self._book.write(record, view, seq, patience_s=PATIENCE_S)
        except Overtaken:
            return  # somebody else has decided
        state = type(record).__name__.lower()
        log.info("a call is decided", extra={"call": view.call, "state": state})

    async def _note(self, view: CallView, kind: str, why: str, found: Attempted) -> None:
        await self._evidence.testify(
            Evidence(
                call=view.call, tenant=view.tenant, kind=kind, attempt=view.last.intent.attempt, why=why,  # type: ignore[arg-type]
                outcome=found.outcome, at_us=self._now_us(),
            )
        )  # fmt: skip
        crash_point("resolver-noted")


def _held(attempt: AttemptView) -> dict[Unit, int]:
    """The most that an attempt may have cost, by unit: what it reserved."""
    amounts: dict[Unit, int] = {}
    for r in attempt.intent.reservations:
        amounts[r.unit] = max(amounts.get(r.unit, 0), r.amount)
    return amounts
