"""The last event of a job: stored exactly once, whatever crashes between the commit and the publish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headrace.completion import job_rows
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, Undecodable
from headrace.contracts.messages import JobCompleted
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import (
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SUBJECT_SEQUENCE,
    JetStreamError,
    last_message,
    purge,
)
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.completion")

SWEEP_S = 5.0
AT_ONCE = 32
TAKEN = (WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE)
"""A compare-and-set with these was too late: the record is there already."""


class Announcer:
    """Publishes `completed` events by compare-and-set, and takes away what an ended job leaves in the broker."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._mesh = mesh
        self._store = store
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def announce(self, endings: Sequence[JobCompleted]) -> None:
        """Store each event unless it is stored already; raise if the broker cannot be reached (`sweep` tries again)."""
        if endings:
            async with asyncio.TaskGroup() as group:
                for event in endings:
                    group.create_task(self._store_event(event))

    async def _store_event(self, event: JobCompleted) -> None:
        async with self._slots:
            crash_point("job-announcing")
            try:
                await publish(
                    self._mesh,
                    self._mesh.topology.jobs,
                    self._mesh.subjects.job_event(event.job, "completed"),
                    codec.JOB_EVENT.encode(event),
                    headers={codec.SCHEMA_HEADER: codec.JOB_EVENT.name},
                    expected_last_subject_seq=0,
                )
            except JetStreamError as e:
                if e.err_code not in TAKEN:
                    raise
            else:
                log.info("job ended", extra={"job": event.job, "state": event.state, "count": event.count})
            crash_point("job-announced")

    async def clear(self, job: str) -> None:
        """Remove the progress record of an ended job, so that the queue is empty when its work is done.

        The record of an intake that a cancellation closed stays: it refuses a batch that a producer, not
        knowing yet, sends with an expectation of "no record".
        """
        subject = self._mesh.subjects.manifest(job)
        record = await last_message(self._mesh, self._mesh.topology.tasks, subject)
        if record is None:
            return
        try:
            if codec.MANIFEST.decode(record.data, record.headers).closed == "cancelled":
                return
        except Undecodable as e:
            log.warning("a progress record is unreadable", extra={"job": job, "reason": str(e)})
        await purge(self._mesh, self._mesh.topology.tasks, filter_=subject)

    async def sweep_for_ever(self) -> None:
        """Announce now and then what a crash, or a broker that was away, left out."""
        while True:
            try:
                await self.sweep()
            except* HeadraceError as e:
                log.warning("ended jobs are not announced yet", extra={"reason": str(e.exceptions[0])[:300]})
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> int:
        """Announce and clear every ended job that is not known to be announced; return how many."""
        endings = await self._store.read(job_rows.endings)
        await self.announce(endings)
        for event in endings:
            await self.clear(event.job)
        if endings:
            await self._store.write(note_announced, endings)
        return len(endings)


def note_announced(connection: job_rows.Connection, endings: Sequence[JobCompleted]) -> None:
    """Remember that the events are stored."""
    for event in endings:
        job_rows.completed(connection, event)
