"""Cancellation: what is not terminal of a job's stored items becomes `cancelled`, and nothing twice.

The steps, each of which changes nothing when it is repeated, so that a crash anywhere and a repeat end the same:

1. the intent is noted in the data plane (a start-up takes it up again from here)
2. the intake is closed: the job's progress record says `cancelled`, by compare-and-set, so that the next batch of the
   producer, or of a retry, is refused whole; how many items are stored is fixed from now on
3. `cancelled` with that count is stored, once; workers see it and abort what they run of the job
4. waiting and leased tasks are purged
5. results that are stored already are landed: finished work is kept
6. every index without an outcome (of a retry: of the generation that runs) gets a `cancelled` one; the job ends;
   `completed` is stored

A result that comes later still finds its index taken, and counts as a duplicate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from headrace.completion import job_rows
from headrace.completion.announce import TAKEN, Announcer
from headrace.completion.patience import write_patiently
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, NotFound
from headrace.contracts.messages import Cause, JobCancelled, JobEvent, JobOpened, JobSealed, Manifest
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import JetStreamError, count_subject, last_message, purge
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.completion")

LAST_RESULTS_S = 10.0
"""How long step 5 waits for results that are stored to land."""
NO_INPUT = "0" * 16

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class Canceller:
    """Cancels jobs, any number at once, each in its own task that `spawn` starts."""

    def __init__(self, mesh: Mesh, store: Store, announcer: Announcer, spawn: Spawn) -> None:
        self._mesh = mesh
        self._store = store
        self._announcer = announcer
        self._spawn = spawn
        self._running: dict[str, asyncio.Task[None]] = {}

    async def request(self, job: str, reason: str, cause: Cause = "requested") -> bool:
        """Begin to cancel `job` and return True once steps 1–3 are durable; False, changing nothing, if it has ended.

        Raise `NotFound` if neither the data plane nor the broker knows the job.
        """
        state = await self._store.read(job_rows.state_of, job)
        if state in job_rows.ENDED:
            return False
        if state is None and not await self._broker_knows(job):
            msg = f"no job {job!r}"
            raise NotFound(msg, code="unknown_job")
        if await self._store.write(job_rows.cancelling, job, reason, cause=cause) != "cancelling":
            return False  # it ended a moment ago
        crash_point("cancel-noted")
        try:
            await self._close(job, reason, cause)
        finally:
            self.start(job, reason, cause)  # what is noted is carried out, whatever is told to who asked
        return True

    def start(self, job: str, reason: str, cause: Cause = "requested") -> None:
        """Carry the cancellation of `job` to its end in the background, if that is not under way."""
        if job not in self._running:
            task = self._spawn(self._finish(job, reason, cause), f"cancel {job}")
            self._running[job] = task
            task.add_done_callback(lambda _: self._running.pop(job, None))

    async def resume(self) -> None:
        """Take up what a crash left in the middle."""
        for job, reason, cause in await self._store.read(job_rows.being_cancelled):
            self.start(job, reason, cause)

    # --- the steps ---------------------------------------------------------------------------------
    async def _finish(self, job: str, reason: str, cause: Cause) -> None:
        attempt = 0
        while True:
            try:
                await self._steps(job, reason, cause)
            except* HeadraceError as e:
                delay = backoff_s(attempt)
                extra = {"job": job, "reason": str(e.exceptions[0])[:300], "retry_in_s": round(delay, 2)}
                log.warning("cancellation goes on later", extra=extra)
                attempt += 1
                await asyncio.sleep(delay)
            else:
                return

    async def _steps(self, job: str, reason: str, cause: Cause) -> None:
        await self._close(job, reason, cause)
        purged = await purge(
            self._mesh, self._mesh.topology.tasks, filter_=self._mesh.subjects.tasks_of_job(job)
        )
        crash_point("cancel-purged")
        await self._last_results(job)
        at, ending = 0, None
        while at >= 0:
            at, ending = await write_patiently(self._store, "cancellation", job_rows.fill_cancelled, job, at)
            crash_point("cancel-filling")
        crash_point("cancel-committed")
        if ending is not None:
            log.info("job is cancelled", extra={"job": job, "purged": purged, "cancelled": ending.cancelled})
            await self._announcer.announce([ending])

    async def _close(self, job: str, reason: str, cause: Cause) -> None:
        """Steps 2 and 3."""
        count, shapes = await self._close_intake(job)
        crash_point("cancel-intake-closed")
        event = JobCancelled(
            job=job, count=count, reason=reason, at_us=job_rows.now_us(), cause=cause, shapes=shapes
        )
        try:
            await publish(
                self._mesh,
                self._mesh.topology.jobs,
                self._mesh.subjects.job_event(job, "cancelled"),
                codec.JOB_EVENT.encode(event),
                headers={codec.SCHEMA_HEADER: codec.JOB_EVENT.name},
                expected_last_subject_seq=0,
            )
        except JetStreamError as e:
            if e.err_code not in TAKEN:
                raise
            stored = await self._event(job, "cancelled")
            event = stored if isinstance(stored, JobCancelled) else event
        crash_point("cancel-announced")
        await write_patiently(self._store, "cancellation", job_rows.cancelled_event, event)

    async def _close_intake(self, job: str) -> tuple[int, dict[str, int]]:
        """Close the job's progress record unless it is closed; return how many items the job has for good, and of what
        shapes (none for a retry: the job's own are known).
        """
        stream, subject = self._mesh.topology.tasks, self._mesh.subjects.manifest(job)
        count, generation = await self._store.read(job_rows.count_and_generation, job)
        while True:
            record = await last_message(self._mesh, stream, subject)
            if record is not None:
                manifest: Manifest = codec.MANIFEST.decode(record.data, record.headers)
                if manifest.closed and manifest.generation >= generation:
                    return _all_items(manifest, count)
            elif generation == 1:
                ended = await self._event(job, "sealed") or await self._event(job, "cancelled")
                if isinstance(ended, JobSealed | JobCancelled):
                    return ended.count, ended.shapes
                opened = await self._event(job, "opened")
                fingerprint = opened.input_fingerprint if isinstance(opened, JobOpened) else NO_INPUT
                manifest = Manifest(job=job, input_fingerprint=fingerprint)
            else:  # a retry that had not begun to store
                manifest = Manifest(job=job, input_fingerprint=NO_INPUT, generation=generation)
            if manifest.generation < generation:
                manifest = replace(manifest, generation=generation, stored=0)
            closed = replace(manifest, closed="cancelled")
            try:
                await publish(
                    self._mesh,
                    stream,
                    subject,
                    codec.MANIFEST.encode(closed),
                    headers={codec.SCHEMA_HEADER: codec.MANIFEST.name},
                    expected_last_subject_seq=record.sequence if record else 0,
                )
            except JetStreamError as e:
                if e.err_code not in TAKEN:
                    raise
                continue  # a batch was stored in between: read again
            return _all_items(closed, count)

    async def _last_results(self, job: str) -> None:
        deadline, pause_s = time.monotonic() + LAST_RESULTS_S, 0.02
        subject = self._mesh.subjects.results_of_job(job)
        while left := await count_subject(self._mesh, self._mesh.topology.results, subject):
            if time.monotonic() > deadline:
                log.warning(
                    "results of a cancelled job are still landing", extra={"job": job, "results": left}
                )
                return
            await asyncio.sleep(pause_s)
            pause_s = min(0.25, pause_s * 2)

    # --- what the broker knows ---------------------------------------------------------------------
    async def _broker_knows(self, job: str) -> bool:
        if await self._event(job, "opened") is not None:
            return True
        return (
            await last_message(self._mesh, self._mesh.topology.tasks, self._mesh.subjects.manifest(job))
            is not None
        )

    async def _event(self, job: str, event: str) -> JobEvent | None:
        found = await last_message(
            self._mesh, self._mesh.topology.jobs, self._mesh.subjects.job_event(job, event)
        )
        return None if found is None else codec.JOB_EVENT.decode(found.data, found.headers)


def _all_items(record: Manifest, count: int | None) -> tuple[int, dict[str, int]]:
    """Items of the job and their shapes, by the closed record and the job's own count."""
    if record.generation == 1 or count is None:
        return record.stored, record.shapes
    return count, {}
