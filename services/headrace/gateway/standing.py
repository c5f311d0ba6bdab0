"""Where a call stands that the ledger knows already: answered, to be waited for, or to be gone on with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet

from headrace.contracts.account import CallView
from headrace.contracts.calls import CallAnswer, CallMessage
from headrace.contracts.ledger import AttemptFailed, CallError, Failed
from headrace.gateway.answers import answer_of
from headrace.gateway.dialing import Attempted
from headrace.gateway.ends import Ends
from headrace.gateway.records import SECOND_US, Asked, Me, superseded
from headrace.gateway.verdicts import Seen
from headrace.gateway.way import Later, Place

LOOK_AGAIN_S = 0.1
"""How often an asker that waits for a call of somebody else looks at it."""
OWN_AGAIN_S = 1.0
"""The same for a message whose lease lapsed while its gateway still works on it."""

Attempt = tuple[str, str, int]
"""Tenant, call and number."""


class Standing:
    """Decides for one gateway. `dialed` has the attempts that were begun here and have no end yet."""

    def __init__(
        self,
        *,
        me: Me,
        ends: Ends,
        alive: Callable[[str, int], Awaitable[bool]],
        dialed: AbstractSet[Attempt],
        now_us: Callable[[], int],
    ) -> None:
        self._me = me
        self._ends = ends
        self._alive = alive
        self._dialed = dialed
        self._now_us = now_us

    async def of(self, asked: Asked, view: CallView, seq: int) -> CallAnswer | Later | Place:
        """The answer that the ledger has already; or the place from which the call goes on."""
        end, callee = view.last.end, asked.callee
        if view.last.state == "open":
            return await self._open(asked, view, seq)
        if view.last.state == "in_doubt":
            if callee.effect in ("read", "idempotent"):
                place = await self._ends.write(view, seq, superseded(self._me, view, self._now_us()))
                if place.again or place.view is None:
                    return place
                return await self.of(asked, place.view, place.seq)
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
            return self.meanwhile(asked.message, view)
        if asked.callee.settings.kind == "function":
            return Place(view, seq)  # its result comes, whoever waits for it
        error = CallError(type="owner_died", message="the gateway that made the call died while it was open")
        place = await self._ends.after(asked.callee, view, seq, Attempted(seen=Seen.DIED, error=error))
        if place.again or place.view is None:
            return place
        return answer_of(place.view, replayed=True)

    def meanwhile(self, message: CallMessage, view: CallView) -> CallAnswer | Later:
        """What an asking gets while the call is open.

        The very message that it is open for, delivered once more, stays: if its gateway dies it is all that is left.
        """
        if message.request == view.last.intent.asked_by:
            return Later(OWN_AGAIN_S)
        if message.until_us is not None and message.until_us > self._now_us():
            return Later(LOOK_AGAIN_S)
        return answer_of(view)
