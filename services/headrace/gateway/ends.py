"""What ends an attempt, written for as long as it takes, and what is known when somebody else was quicker."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from headrace.contracts.account import CallView, advance, view_of
from headrace.contracts.errors import Refused
from headrace.contracts.ledger import AttemptFailed, CallError, CallRecord, Evidence
from headrace.gateway.book import Book
from headrace.gateway.callees import Callee
from headrace.gateway.dialing import Attempted
from headrace.gateway.ledger import Ledger, Overtaken
from headrace.gateway.records import Me, end_of, given_up
from headrace.gateway.way import Place
from headrace.mesh.connection import backoff_s
from headrace.mesh.crash import crash_point

log = logging.getLogger("headrace.gateway")

FOREVER_S = 10.0**9


class Ends:
    """Writes the records that end attempts, for one gateway."""

    def __init__(
        self,
        *,
        me: Me,
        ledger: Ledger,
        book: Book,
        testify: Callable[[Evidence], Awaitable[None]],
        now_us: Callable[[], int],
    ) -> None:
        self._me = me
        self._ledger = ledger
        self._book = book
        self._testify = testify
        self._now_us = now_us

    async def after(self, callee: Callee, view: CallView, seq: int, attempted: Attempted) -> Place:
        """Write what came of the last attempt; `again` of the place if another one follows."""
        pause_s = backoff_s(len(view.attempts) - 1, base=0.2, cap=callee.settings.retry_cap_s)
        pause_s = max(pause_s, attempted.retry_after_s or 0.0)
        more = len(view.attempts) < callee.settings.max_attempts and pause_s <= callee.settings.retry_cap_s
        record = end_of(self._me, callee, view, attempted, more=more, now_us=self._now_us())
        place = await self.write(view, seq, record, attempted)
        crash_point("end-acked")
        return Place(place.view, place.seq, again=place.again, pause_s=pause_s)

    async def give_up(self, view: CallView, seq: int, why: Refused) -> Place:
        """End a call whose next attempt is refused."""
        error = CallError(type=why.code, message=str(why)[:2_048])
        return await self.write(view, seq, given_up(self._me, view, error, self._now_us()))

    async def write(
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
