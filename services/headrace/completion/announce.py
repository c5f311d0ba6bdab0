"""The events that completion itself stores: exactly once each, whatever crashes between the commit and the publish.

A job's `completed` is stored once for each attempt generation that ended, `retried` once for each that began: the last
message of the subject says which generation was told last, and the next one expects its sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headrace.completion import job_rows
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, Undecodable
from headrace.contracts.messages import JobCompleted, JobEvent, JobRetried, Manifest
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import (
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SUBJECT_SEQUENCE,
    JetStreamError,
    StoredMessage,
    call,
    last_message,
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
            if await store_once(self._mesh, event, "completed"):
                log.info("job ended", extra={"job": event.job, "state": event.state, "count": event.count})
            crash_point("job-announced")

    async def clear(self, job: str, generation: int) -> None:
        """Remove the progress record of a job whose `generation` ended: the queue is empty when its work is done.

        The record of an intake that a cancellation closed stays: it refuses a batch that a producer, not
        knowing yet, sends with an expectation of "no record". So does that of a retry that has begun since.
        """
        stream, subject = self._mesh.topology.tasks, self._mesh.subjects.manifest(job)
        record = await last_message(self._mesh, stream, subject)
        if record is None:
            return
        try:
            manifest: Manifest = codec.MANIFEST.decode(record.data, record.headers)
            if manifest.closed == "cancelled" or manifest.generation > generation:
                return
        except Undecodable as e:
            log.warning("a progress record is unreadable", extra={"job": job, "reason": str(e)})
        # Up to this record and no further: a retry may store its first one at this moment.
        await call(self._mesh, f"STREAM.PURGE.{stream}", {"filter": subject, "seq": record.sequence + 1})

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
            await self.clear(event.job, event.generation)
        if endings:
            await self._store.write(note_announced, endings)
        return len(endings)


def note_announced(connection: job_rows.Connection, endings: Sequence[JobCompleted]) -> None:
    """Remember that the events are stored."""
    for event in endings:
        job_rows.completed(connection, event)


async def store_once(mesh: Mesh, event: JobCompleted | JobRetried, name: str) -> bool:
    """Store the event of its job and generation unless that, or a later one, is stored; whether it was stored now."""
    subject = mesh.subjects.job_event(event.job, name)
    expected = 0
    while True:
        if event.generation > 1:
            last = await last_message(mesh, mesh.topology.jobs, subject)
            if last is not None and _generation(last) >= event.generation:
                return False
            expected = last.sequence if last else 0
        try:
            await publish(
                mesh,
                mesh.topology.jobs,
                subject,
                codec.JOB_EVENT.encode(event),
                headers={codec.SCHEMA_HEADER: codec.JOB_EVENT.name},
                expected_last_subject_seq=expected,
            )
        except JetStreamError as e:
            if e.err_code not in TAKEN:
                raise
            if event.generation == 1:
                return False
        else:
            return True


def _generation(stored: StoredMessage) -> int:
    """The generation that a stored event tells of; 0 if it cannot be read (somebody published by hand)."""
    try:
        event: JobEvent = codec.JOB_EVENT.decode(stored.data, stored.headers)
    except Undecodable:
        return 0
    return event.generation if isinstance(event, JobCompleted | JobRetried) else 0
