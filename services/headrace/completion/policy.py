"""What ends a job early without anybody asking: its deadline, or too many of its items failing.

Both stand in the job's `opened` event and in its row, so a restart knows of them, and a deadline that passed while
everything was down acts at the start. Ending is a cancellation like any other, with its cause: see `cancel`.

The limit of failures is compared once `LEAST_RAN` items have come to an end by running (before that one bad item would
be a large share), and only while a job runs for the first time: who retries what failed expects more of it to fail. A
retry has the job's deadline if that lies ahead of it.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct

from headrace.completion.cancel import Canceller
from headrace.completion.job_rows import now_us
from headrace.completion.landing import Landing
from headrace.completion.store import Connection, Store
from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import Cause

log = logging.getLogger("headrace.completion")

LEAST_RAN: Final = 20
"""Items that must have run before their failures are weighed. A job of fewer items ends by itself."""
LOOK_EVERY_S: Final = 0.5
"""How long a job that was just opened may go unnoticed; known deadlines and commits are looked at when they come."""
REST_S: Final = 0.1
"""Between two looks, however often there is a commit."""

# A share is compared as a quotient: 29 of 100 is not more than 0.29, where 29 > 0.29 * 100 by rounding.
_DUE = """
SELECT job, deadline_at <= make_timestamp($now::BIGINT), epoch_us(deadline_at), ok + failed + dead, failed + dead,
    max_failed
FROM jobs WHERE state IN ('open', 'sealed') AND (
    deadline_at <= make_timestamp($now::BIGINT)
    OR (coalesce(generation, 1) = 1 AND ok + failed + dead >= $least
        AND (failed + dead) / (ok + failed + dead) > max_failed)
)"""

_NEXT = "SELECT epoch_us(min(deadline_at)) FROM jobs WHERE state IN ('open', 'sealed')"


class Due(Struct, frozen=True):
    """A job that has to end: `failed` of `ran` items failed or are dead, `limit` is the share that may."""

    job: str
    late: bool | None
    deadline_us: int | None
    ran: int
    failed: int
    limit: float | None

    @property
    def cause(self) -> Cause:
        """The deadline comes first: items that missed it have failed because of it."""
        return "deadline" if self.late else "failures"

    @property
    def reason(self) -> str:
        """A sentence for people."""
        if self.late:
            at = datetime.fromtimestamp((self.deadline_us or 0) / 1e6, UTC).isoformat(timespec="seconds")
            return f"the deadline passed: {at.removesuffix('+00:00')}Z"
        limit = f"{100 * (self.limit or 0.0):.6g} %"
        return f"stopped early: {self.failed:,} of {self.ran:,} landed items failed (limit {limit})"


class Policies:
    """Looks after each commit, and whenever a deadline passes, which jobs have to end."""

    def __init__(self, store: Store, canceller: Canceller, landing: Landing) -> None:
        self._store = store
        self._canceller = canceller
        self._landing = landing

    async def run(self) -> None:
        """Look for ever."""
        while True:
            wait_s = LOOK_EVERY_S
            try:
                wait_s = await self.look()
            except HeadraceError as e:
                log.warning("deadlines and failure limits wait", extra={"reason": str(e)[:300]})
            await self._landing.next_commit(wait_s)
            await asyncio.sleep(REST_S)

    async def look(self) -> float:
        """End what has to; return how many seconds later to look again if nothing lands before."""
        due, next_us = await self._store.read(due_jobs, now_us())
        for job in due:
            await self._end(job)
        return LOOK_EVERY_S if next_us is None else min(LOOK_EVERY_S, max(0.0, (next_us - now_us()) / 1e6))

    async def _end(self, due: Due) -> None:
        extra = {"job": due.job, "cause": due.cause, "reason": due.reason}
        try:
            if await self._canceller.request(due.job, due.reason, due.cause):
                log.info("job is ended early", extra=extra)
        except HeadraceError as e:
            log.warning("job is ended later", extra=extra | {"error": str(e)[:300]})


def due_jobs(connection: Connection, at_us: int) -> tuple[list[Due], int | None]:
    """The jobs that have to end at `at_us`, and the next deadline, if there is one."""
    rows = connection.execute(_DUE, {"now": at_us, "least": LEAST_RAN}).fetchall()
    ahead = connection.execute(_NEXT).fetchone()
    return [Due(*row) for row in rows], ahead[0] if ahead else None
