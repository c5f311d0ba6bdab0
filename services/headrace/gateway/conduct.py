"""The way of one call: from its message to its answer, by way of the ledger.

    look up the key → policy → budgets, price → INTENT (durable) → dial → COMPLETED | FAILED | IN_DOUBT → answer

Every step before the intent may be repeated. After it nothing is, unless the effect allows: whoever finds an intent
without an end decides by who wrote it, when its lease ends, and what the call does to the world. What ends an attempt
is written before the answer is given, for as long as that takes. If somebody else was quicker (we were thought dead),
the outcome goes to the evidence, and the answer is what the ledger says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from headrace.contracts.account import advance, view_of
from headrace.contracts.calls import CallAnswer, CallMessage
from headrace.contracts.errors import InvalidInput, NotFound, Refused
from headrace.contracts.ledger import (
    DANGEROUS,
    CallError,
    Evidence,
)
from headrace.contracts.messages import Blob
from headrace.gateway import telemetry
from headrace.gateway.answers import answer_of, conflict, in_progress, refused
from headrace.gateway.book import Book
from headrace.gateway.budgets import Budgets, reservations
from headrace.gateway.callees import Callees, read_body, worst_case
from headrace.gateway.dialing import Attempted, Dialer, Order
from headrace.gateway.ends import Ends
from headrace.gateway.keys import fingerprint
from headrace.gateway.ledger import Ledger, Overtaken
from headrace.gateway.records import (
    LEASE_GRACE_S,
    SECOND_US,
    Asked,
    Me,
    intent_of,
    name_of,
)
from headrace.gateway.standing import LOOK_AGAIN_S, Attempt, Standing
from headrace.gateway.verdicts import Seen
from headrace.gateway.way import Denied, Gate, Later, NotYet, OtherBody, Place
from headrace.mesh.crash import crash_point

log = logging.getLogger("headrace.gateway")

PAUSE_HERE_S = 2.0
"""A longer pause before the next attempt is spent in the queue."""


class Conductor:
    """Conducts calls for one gateway. `alive` says whether an owner in a certain life is still to be waited for."""

    def __init__(
        self,
        *,
        me: Me,
        ledger: Ledger,
        book: Book,
        callees: Callees,
        gate: Gate,
        dialer: Dialer,
        testify: Callable[[Evidence], Awaitable[None]],
        alive: Callable[[str, int], Awaitable[bool]],
        keep: Callable[[Asked], Awaitable[Blob | None]] | None = None,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._me = me
        self._ledger = ledger
        self._book = book
        self._budgets = Budgets(ledger)
        self._callees = callees
        self._gate = gate
        self._dialer = dialer
        self._testify = testify
        self._keep = keep
        self._now_us = now_us
        self._pause = pause
        self._under_way: set[tuple[str, str]] = set()
        self._traces: dict[str, str] = {}
        """The trace of the call that an asking asks for, by its request."""
        self._dialed: set[Attempt] = set()
        self._ends = Ends(me=me, ledger=ledger, book=book, testify=testify, now_us=now_us)
        self._standing = Standing(me=me, ends=self._ends, alive=alive, dialed=self._dialed, now_us=now_us)

    async def conduct(self, message: CallMessage) -> CallAnswer | Later:
        """Bring a call to where it can be answered. Raise `Unavailable` if the ledger is away: ask again then."""
        started_ns = time.time_ns()
        try:
            answer = await self._conducted(message)
        finally:
            traceparent = self._traces.pop(message.request, message.traceparent)
        if isinstance(answer, Later):
            telemetry.asked_span(
                message, None, traceparent, started_ns=started_ns, waits=answer.awaiting or "waiting"
            )
        else:
            telemetry.asked_span(message, answer, traceparent, started_ns=started_ns)
            telemetry.answered(answer, message.callee)
        return answer

    async def _conducted(self, message: CallMessage) -> CallAnswer | Later:
        call = message.call or message.request
        try:
            call = name_of(message)
            if (traceparent := telemetry.traceparent_of(message, call)) != message.traceparent:
                message = replace(message, traceparent=traceparent)
            key = (message.tenant, call)
            asked = self._read(message, call)
            if key in self._under_way:
                return await self._beside(asked)
            self._under_way.add(key)
            try:
                return await self._conduct(asked)
            finally:
                self._under_way.discard(key)
        except NotYet as e:
            return e.later
        except OtherBody:
            return conflict(call)
        except Denied as e:  # the decision itself is on record
            return refused(call, e)
        except (Refused, InvalidInput, NotFound) as e:
            await self._testify(
                Evidence(
                    call=call, tenant=message.tenant, kind="rejected", by=message.agent,
                    error=CallError(type=e.code, message=str(e)[:2_048]), at_us=self._now_us(),
                )
            )  # fmt: skip
            return refused(call, e)

    def _read(self, message: CallMessage, call: str) -> Asked:
        callee = self._callees.get(message.callee)
        if callee.effect in DANGEROUS and message.key is None:
            msg = f"callee {callee.name} is {callee.effect}: such a call needs a key"
            raise Refused(msg, code="key_required")
        print_ = fingerprint(callee.name, callee.settings.path, message.body)
        return Asked(message, callee, read_body(callee, message.body), call, print_)

    # --- the way -----------------------------------------------------------------------------------
    async def _conduct(self, asked: Asked) -> CallAnswer | Later:
        taken_s = time.monotonic()
        self._budgets.ahead(asked.message.tenant, taken_s)
        place = await self._look(asked)
        while True:
            if place.view is not None and place.view.request.fingerprint != asked.fingerprint:
                return conflict(asked.call)
            if place.view is not None and not place.again:
                standing = await self._standing.of(asked, place.view, place.seq)
                if not isinstance(standing, Place):
                    return standing
                place = standing
            if place.pause_s > PAUSE_HERE_S and place.view is not None and place.view.state == "retrying":
                return Later(place.pause_s)  # nobody else's place is held meanwhile
            await self._pause(place.pause_s)
            try:
                self._in_time(asked)
                if (later := await self._gate.admit(asked)) is not None:
                    return later
                free = await self._gate.turn(asked)
                try:
                    begun_at = time.monotonic()
                    begun = await self._begin(asked, place, taken_s)
                    if begun is None:  # somebody else moved the call
                        place = await self._look(asked)
                        continue
                    place = await self._attempt(asked, begun, begun_at)
                finally:
                    free()
            except Refused as e:
                if place.view is None or place.view.state != "retrying":
                    raise
                place = await self._ends.give_up(place.view, place.seq, e)
            if not place.again:
                return (
                    in_progress(asked.call) if place.view is None else answer_of(place.view, live=place.live)
                )

    async def _look(self, asked: Asked) -> Place:
        stored = await self._ledger.call(asked.message.tenant, asked.call)
        view = view_of(stored.records)
        traceparent = view.request.traceparent if view else asked.message.traceparent
        if traceparent is not None:
            self._traces[asked.message.request] = traceparent
        return Place(view, stored.seq)

    async def _beside(self, asked: Asked) -> CallAnswer | Later:
        """What an asking gets while this gateway conducts the same call for another one."""
        view = (await self._look(asked)).view
        if view is not None and view.request.fingerprint != asked.fingerprint:
            return conflict(asked.call)
        if view is not None and view.last.state == "open":
            return self._standing.meanwhile(asked.message, view)
        return Later(LOOK_AGAIN_S)

    # --- before the call ---------------------------------------------------------------------------
    async def _begin(self, asked: Asked, place: Place, taken_s: float) -> Place | None:
        """Write the intent of the next attempt; None if somebody else moved the call first."""
        view, message = place.view, asked.message
        if view is not None and view.last.state == "open":
            return place
        now = self._now_us()
        self._in_time(asked)
        budgets = await self._budgets.of(message.tenant, message.agent, since_s=taken_s)
        held, unknown = reservations(budgets, worst_case(asked.callee, asked.body), now)
        if unknown:
            budget, price = unknown[0], asked.callee.price
            lacks = "no price" if budget.unit == "micro" and price is None else "no limit of output tokens"
            msg = f"the call has {lacks}, and budget {budget.budget} counts {budget.unit}"
            raise Refused(msg, code="unpriced")
        body = await self._keep(asked) if self._keep is not None and view is None else None
        intent = intent_of(self._me, asked, view, held, self._now_us(), body=body)
        crash_point("intent-before-publish")
        try:
            seq = await self._book.write(intent, view, place.seq)
        except Overtaken:
            return None
        crash_point("intent-acked")
        return Place(advance(view, intent), seq)

    def _in_time(self, asked: Asked) -> None:
        deadline_us = asked.message.deadline_us
        if deadline_us is not None and self._now_us() >= deadline_us:
            raise Refused("the call's deadline has passed before it could be made", code="deadline")

    # --- the call and after it ---------------------------------------------------------------------
    async def _attempt(self, asked: Asked, place: Place, begun_at: float) -> Place:
        view = place.view
        if view is None:
            return place
        intent, span, took_s = view.last.intent, None, None
        until_us = intent.lease_until_us - int(LEASE_GRACE_S * SECOND_US)
        if (intent.owner, intent.epoch) != (self._me.owner, self._me.epoch):  # a dead owner's: see `_open`
            until_us = self._now_us() + int(asked.callee.settings.timeout_s * SECOND_US)
        if self._now_us() >= until_us:  # this process was stopped, and others may have taken the call over
            late = CallError(type="too_late", message="the attempt's time was over before it was made")
            attempted = Attempted(seen=Seen.NOT_SENT, error=late, request_sent=False)
        else:
            self._dialed.add((view.tenant, view.call, intent.attempt))
            order = Order(
                call=view.call, tenant=view.tenant, attempt=intent.attempt, callee=asked.callee, body=asked.body,
                remote_key=intent.remote_key, until_us=until_us, traceparent=intent.request.traceparent,
            )  # fmt: skip
            span = telemetry.attempt_span(asked, order, order.traceparent)
            dialed_at = time.monotonic()
            attempted = await self._dial(
                order if span is None else replace(order, traceparent=span.traceparent)
            )
            took_s = time.monotonic() - dialed_at
        crash_point("call-answered")
        after = await self._ends.after(asked.callee, view, place.seq, attempted)
        self._dialed.discard((view.tenant, view.call, intent.attempt))
        telemetry.attempt_ended(span, after.view, intent.attempt, self._me.owner)
        if took_s is not None:
            added_s = time.monotonic() - begun_at - took_s
            usage = attempted.usage if attempted.outcome else None
            telemetry.attempted(asked, usage, seconds=took_s, added_s=added_s)
        return replace(after, live=attempted.live)

    async def _dial(self, order: Order) -> Attempted:
        try:
            return await self._dialer.dial(order)
        except Exception as e:  # a fault of ours, after which the callee may have acted
            log.exception("an attempt broke", extra={"call": order.call, "callee": order.callee.name})
            return Attempted(seen=Seen.BROKEN, error=CallError(type="internal", message=type(e).__name__))
