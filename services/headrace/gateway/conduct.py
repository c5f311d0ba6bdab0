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
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from headrace.contracts.account import CallView, advance, view_of
from headrace.contracts.calls import CallAnswer, CallMessage
from headrace.contracts.errors import InvalidInput, NotFound, Refused
from headrace.contracts.ledger import (
    DANGEROUS,
    AttemptFailed,
    CallError,
    CallOutcome,
    CallRecord,
    Evidence,
    Failed,
)
from headrace.contracts.messages import Blob
from headrace.gateway import telemetry
from headrace.gateway.answers import answer_of, conflict, in_progress, refused
from headrace.gateway.book import Book
from headrace.gateway.budgets import Budgets, reservations
from headrace.gateway.callees import Callee, Callees, read_body, worst_case
from headrace.gateway.dialing import Attempted, Dialer, Order
from headrace.gateway.keys import fingerprint
from headrace.gateway.ledger import Ledger, Overtaken
from headrace.gateway.records import (
    LEASE_GRACE_S,
    SECOND_US,
    Asked,
    Me,
    end_of,
    given_up,
    intent_of,
    name_of,
    superseded,
)
from headrace.gateway.verdicts import Seen
from headrace.mesh.connection import backoff_s
from headrace.mesh.crash import crash_point

log = logging.getLogger("headrace.gateway")

FOREVER_S = 10.0**9
LOOK_AGAIN_S = 0.1
"""How often an asker that waits for a call of somebody else looks at it."""

PAUSE_HERE_S = 2.0
"""A longer pause before the next attempt is spent in the queue."""
OWN_AGAIN_S = 1.0
"""The same for a message whose lease lapsed while its gateway still works on it."""


class Later(Struct, frozen=True):
    """Not decided now: the message stays where it is, and is looked at again after `delay_s`."""

    delay_s: float
    awaiting: str = ""
    """`approval` while a person has to answer."""
    call: str = ""
    """Id of the call that waits so."""


class NotYet(Exception):
    """The call goes back to the queue: no intent is written, nothing is taken."""

    def __init__(self, later: Later) -> None:
        super().__init__(f"not before {later.delay_s:g} s")
        self.later = later


class OtherBody(Exception):
    """The key stands for another body, as what was said of it beside the ledger shows."""


class Denied(Refused):
    """A person said no: that stands in the evidence, however often it is asked again."""

    code = "denied"


class Gate(Protocol):
    """Who may call what, and how much at once."""

    async def admit(self, asked: Asked) -> Later | None:
        """Raise `Refused` for what is denied; return `Later` while a person has yet to approve."""
        ...

    async def turn(self, asked: Asked) -> Callable[[], None]:
        """Wait for a place at the callee; call what is returned when it is free again. Raise `NotYet` without one."""
        ...


class Place(Struct, frozen=True):
    """A call and the sequence of its last record. `again`: a further attempt follows, after `pause_s`."""

    view: CallView | None
    seq: int
    again: bool = False
    pause_s: float = 0.0
    live: CallOutcome | None = None
    """What the callee just said, where its record says less."""


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
        self._alive = alive
        self._keep = keep
        self._now_us = now_us
        self._pause = pause
        self._under_way: set[tuple[str, str]] = set()
        self._traces: dict[str, str] = {}
        """The trace of the call that an asking asks for, by its request."""
        self._dialed: set[tuple[str, str, int]] = set()
        """Attempts that were begun here and have no end yet."""

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
                standing = await self._standing(asked, place.view, place.seq)
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
                place = await self._give_up(place.view, place.seq, e)
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
            return self._meanwhile(asked.message, view)
        return Later(LOOK_AGAIN_S)

    # --- where it stands ---------------------------------------------------------------------------
    async def _standing(self, asked: Asked, view: CallView, seq: int) -> CallAnswer | Later | Place:
        """The answer that the ledger has already; or the place from which the call goes on."""
        end, callee = view.last.end, asked.callee
        if view.last.state == "open":
            return await self._open(asked, view, seq)
        if view.last.state == "in_doubt":
            if callee.effect in ("read", "idempotent"):
                place = await self._write(view, seq, superseded(self._me, view, self._now_us()))
                if place.again or place.view is None:
                    return place
                return await self._standing(asked, place.view, place.seq)
            if callee.settings.repeat_charged and callee.effect == "cost_bearing":
                return Place(view, seq)
        elif view.state == "retrying" and (wait_s := self._retry_in_s(view)) > 0:
            return Later(wait_s)
        elif view.state == "retrying" or (
            view.state == "failed" and isinstance(end, Failed) and end.retryable
        ):
            return Place(view, seq)
        return answer_of(view, replayed=True)

    def _retry_in_s(self, view: CallView) -> float:
        """How long the callee asked to be left alone, as far as that is still to come."""
        end = view.last.end
        if not isinstance(end, AttemptFailed) or end.retry_after_us is None:
            return 0.0
        return (end.at_us + end.retry_after_us - self._now_us()) / SECOND_US

    async def _open(self, asked: Asked, view: CallView, seq: int) -> CallAnswer | Later | Place:
        """An intent without an end: of a living owner, of a dead one, or ours, and its answer was lost."""
        intent = view.last.intent
        mine = (intent.owner, intent.epoch) == (self._me.owner, self._me.epoch)
        if mine and (view.tenant, view.call, intent.attempt) not in self._dialed:
            return Place(view, seq)  # its answer was lost: it was never dialed
        if (
            not mine
            and intent.lease_until_us > self._now_us()
            and await self._alive(intent.owner, intent.epoch)
        ):
            return self._meanwhile(asked.message, view)
        if asked.callee.settings.kind == "function":
            return Place(view, seq)  # its result comes, whoever waits for it
        error = CallError(type="owner_died", message="the gateway that made the call died while it was open")
        place = await self._after(asked.callee, view, seq, Attempted(seen=Seen.DIED, error=error))
        if place.again or place.view is None:
            return place
        return answer_of(place.view, replayed=True)

    def _meanwhile(self, message: CallMessage, view: CallView) -> CallAnswer | Later:
        """What an asking gets while the call is open.

        The very message that it is open for, delivered once more, stays: if its gateway dies it is all that is left.
        """
        if message.request == view.last.intent.asked_by:
            return Later(OWN_AGAIN_S)
        if message.until_us is not None and message.until_us > self._now_us():
            return Later(LOOK_AGAIN_S)
        return answer_of(view)

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
        after = await self._after(asked.callee, view, place.seq, attempted)
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

    async def _after(self, callee: Callee, view: CallView, seq: int, attempted: Attempted) -> Place:
        """Write what came of the last attempt."""
        pause_s = backoff_s(len(view.attempts) - 1, base=0.2, cap=callee.settings.retry_cap_s)
        pause_s = max(pause_s, attempted.retry_after_s or 0.0)
        more = len(view.attempts) < callee.settings.max_attempts and pause_s <= callee.settings.retry_cap_s
        record = end_of(self._me, callee, view, attempted, more=more, now_us=self._now_us())
        place = await self._write(view, seq, record, attempted)
        crash_point("end-acked")
        return Place(place.view, place.seq, again=place.again, pause_s=pause_s)

    async def _give_up(self, view: CallView, seq: int, why: Refused) -> Place:
        error = CallError(type=why.code, message=str(why)[:2_048])
        return await self._write(view, seq, given_up(self._me, view, error, self._now_us()))

    async def _write(
        self, view: CallView, seq: int, record: CallRecord, attempted: Attempted | None = None
    ) -> Place:
        """Write `record`, for as long as it takes. If somebody else was quicker, what we know becomes evidence."""
        try:
            seq = await self._book.write(record, view, seq, patience_s=FOREVER_S)
        except Overtaken:
            if attempted is not None:
                log.warning(
                    "a call was taken over meanwhile: its outcome is evidence", extra={"call": view.call}
                )
                await self._testify(
                    Evidence(
                        call=view.call, tenant=view.tenant, kind="late_outcome", attempt=view.last.intent.attempt,
                        by=f"{self._me.owner}@{self._me.epoch}", outcome=attempted.outcome, usage=attempted.usage,
                        error=None if attempted.outcome else attempted.error, at_us=self._now_us(),
                    )
                )  # fmt: skip
            stored = await self._ledger.call(view.tenant, view.call)
            return Place(view_of(stored.records), stored.seq)
        return Place(advance(view, record), seq, again=isinstance(record, AttemptFailed))
