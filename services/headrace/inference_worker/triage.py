"""Crash triage: what becomes of the items that were in an engine when it died.

At a death everything in the engine becomes a suspect: it is recorded, then given back, and runs apart at its next
delivery, on whichever worker (`incidents` has the rules, `apart` the turns). Nothing here keeps items from going
back: where the bucket of suspects cannot be reached they are ordinary items, and `max_tries` bounds what a poison
item can do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from headrace.contracts.errors import HeadraceError
from headrace.contracts.suspects import Cleared
from headrace.inference_worker.finishing import Finisher
from headrace.inference_worker.incidents import (
    Incident,
    after_crash,
    is_convicted,
    is_suspect,
    may_be_cleared,
)
from headrace.inference_worker.intake import Aborted, Item, now_us
from headrace.mesh.crash import crash_point
from headrace.mesh.suspects import SuspectBook

log = logging.getLogger("headrace.worker")

LEAVE_S: Final = 0.25
"""How long the items of a dead engine have to come out of it by themselves, with an answer perhaps. A hung engine lets
none of them go, and their leases go back all the same.
"""
REMEMBERED: Final = 1_000


class Triage:
    """The incidents of one worker. `abort` stops an item that is still in the dead engine; `on_convicted` hears that
    a culprit is known.
    """

    def __init__(
        self,
        *,
        book: SuspectBook,
        finisher: Finisher,
        worker: str,
        max_tries: int,
        abort: Callable[[Item, Aborted], None],
        on_convicted: Callable[[], None],
    ) -> None:
        self._book = book
        self._finisher = finisher
        self._worker = worker
        self._max_tries = max_tries
        self._abort = abort
        self._on_convicted = on_convicted
        self._cleared: dict[str, None] = {}
        self._side: set[asyncio.Task[Any]] = set()

    # --- before an item runs -------------------------------------------------------------------------
    async def look_up(self, item: Item) -> None:
        """Learn what is known of a redelivered item."""
        delivery = item.delivery
        try:
            item.record = await self._book.look_up(delivery.stream_seq, delivery.timestamp_us)
        except HeadraceError as e:
            log.warning("not known whether an item is a suspect", extra={"reason": str(e)[:200]})
        if is_suspect(item.record):
            await self.is_cleared(item)

    def must_run_apart(self, item: Item) -> bool:
        """Whether the item is a suspect, as far as was learned."""
        record = item.record
        return record is not None and is_suspect(record) and not self._is_cleared(item)

    async def is_cleared(self, item: Item) -> bool:
        """Whether a suspect may run among others, since another item was convicted meanwhile."""
        record = item.record
        if record is None or item.alone:
            return False
        if not self._is_cleared(item) and self._may_be_cleared(item):
            try:
                if await self._book.is_cleared(record.incident):
                    self._remember(record.incident)
            except HeadraceError as e:
                log.warning("not known whether a suspect is cleared", extra={"reason": str(e)[:200]})
        return self._is_cleared(item)

    def convict(self, item: Item) -> None:
        """End an item that two engines died of, and clear those that were suspects because of it."""
        record = item.record
        if record is None:
            raise ValueError("an item without a record cannot be convicted")
        self._remember(record.before)
        sequence = item.delivery.stream_seq
        self._book.clear(
            Cleared(incident=record.before, culprit=sequence, worker=self._worker, at_us=now_us())
        )
        log.error(
            "an item is convicted",
            extra={"job": item.task.job, "index": item.task.index, "crashes": record.crashes},
        )
        self._finisher.poison(item, record)
        self._on_convicted()

    # --- when an engine dies -------------------------------------------------------------------------
    def engine_died(self, why: str, inside: Iterable[Item]) -> None:
        """Open the incident; each item inside tells `left` when it is out."""
        incident = Incident(why, inside)
        for item in incident.inside:
            item.incident = incident
        if incident.inside:
            log.error(
                "items were in a dead engine", extra={"incident": incident.id, "items": len(incident.inside)}
            )
            asyncio.get_running_loop().call_later(LEAVE_S, self._pull_out, incident)

    def left(self, item: Item, *, suspect: bool) -> None:
        """An item of an incident is out of the engine; it has no outcome if it is a suspect."""
        incident, item.incident = item.incident, None
        if incident is not None and incident.left(item, suspect=suspect) and incident.suspects:
            task = asyncio.get_running_loop().create_task(self._conclude(incident))
            self._side.add(task)
            task.add_done_callback(self._side.discard)

    async def settled(self) -> None:
        """Return when the suspects of every incident are recorded and on their way."""
        while self._side:
            await asyncio.wait(self._side)

    def _pull_out(self, incident: Incident) -> None:
        for item in list(incident.inside):
            self._abort(item, Aborted.ENGINE_DIED)

    async def _conclude(self, incident: Incident) -> None:
        # Who came last is tried first, so its delay is the shortest.
        suspects = sorted(incident.suspects, key=lambda item: item.started_us, reverse=True)
        for item in suspects:
            item.record = after_crash(
                item.record,
                stored_us=item.delivery.timestamp_us,
                incident=incident.id,
                alone=incident.alone,
                error=incident.error,
                worker=self._worker,
                started_us=item.started_us,
            )
        records = {item.delivery.stream_seq: item.record for item in suspects if item.record is not None}
        try:
            await self._book.record(records)
        except HeadraceError as e:
            log.warning("suspects are not recorded, and run as others do", extra={"reason": str(e)[:200]})
        except Exception:
            log.exception("suspects are not recorded")  # and go back all the same
        crash_point("suspects-recorded")
        going_back = [item for item in suspects if not is_convicted(item.record)]
        for item in suspects:
            if is_convicted(item.record):
                self.convict(item)
        error = f"the engine died while the item was in it: {incident.error}"
        delays = sorted(self._finisher.delay_s(item) for item in going_back)
        for item, delay_s in zip(going_back, delays, strict=True):
            self._finisher.back_as_suspect(item, error, delay_s)

    # --- cleared incidents ---------------------------------------------------------------------------
    def _may_be_cleared(self, item: Item) -> bool:
        record = item.record
        return record is not None and may_be_cleared(record, item.delivery.delivered, self._max_tries)

    def _is_cleared(self, item: Item) -> bool:
        record = item.record
        return record is not None and record.incident in self._cleared and self._may_be_cleared(item)

    def _remember(self, incident: str) -> None:
        if len(self._cleared) >= REMEMBERED:
            del self._cleared[next(iter(self._cleared))]
        self._cleared[incident] = None
