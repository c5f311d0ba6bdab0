"""Retry: the items of an ended job that failed run again, as its next attempt generation, and the others do not.

The steps, each of which changes nothing when it is repeated, so that a crash anywhere and a repeat end the same:

1. one transaction notes the retry and its items, takes their outcomes out of the job's counters and brings the job
   back to `sealed`; from here on it happens (a start-up takes it up again), and the asker is answered
2. `retried` is stored, once
3. the tasks are stored again, in atomic batches with a progress record (`retry_storing`)
4. that all are stored is noted

The job ends anew when each index has its current outcome, as after a submit (`landing`, `announce`).
"""

from __future__ import annotations

import asyncio
import logging

from headrace.completion import job_rows, pipeline_rows, retry_rows
from headrace.completion.announce import Announcer, store_once
from headrace.completion.cancel import Spawn
from headrace.completion.condition import fitting
from headrace.completion.patience import write_patiently
from headrace.completion.query import Queries
from headrace.completion.retry_rows import Begun
from headrace.completion.retry_storing import RetryStorer
from headrace.completion.store import Connection, Store
from headrace.contracts.api import RetryRequest
from headrace.contracts.errors import HeadraceError, NotFound, Refused
from headrace.contracts.messages import JobRetried
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import last_message
from headrace.mesh.provision import get_function

log = logging.getLogger("headrace.completion")


class Retrier:
    """Begins retries and carries them to their end, each in its own task that `spawn` starts."""

    def __init__(
        self, mesh: Mesh, store: Store, announcer: Announcer, queries: Queries, spawn: Spawn
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._announcer = announcer
        self._queries = queries
        self._spawn = spawn
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def request(self, request: RetryRequest) -> Begun:
        """Begin a retry, and return once step 1 is durable. Nothing is changed if no item fits.

        Raise `NotFound` (job, function), `Refused` (it runs, it was cancelled, the condition may not run),
        `InvalidInput` (the condition is none), `Conflict` (another retry has that generation).
        """
        job, condition = request.job, request.where.strip()
        begun = await self._store.read(retry_rows.existing, job, request.generation, condition)
        if begun is None:
            begun = await self._begin(job, request.generation, condition)
        if begun.left_out:
            extra = {"job": job, "generation": begun.generation, "items": begun.left_out}
            log.warning("items do not carry their task and cannot run again", extra=extra)
        if begun.resubmitted:
            self.start(job, begun.generation)
        return begun

    async def _begin(self, job: str, generation: int | None, condition: str) -> Begun:
        try:
            _, generation = await self._store.read(retry_rows.check, job, generation)
        except NotFound:
            await self._refuse_if_new(job)
            raise
        await self._store.read(pipeline_rows.refuse_retry, job)
        # The last event of the generation before stands before what this one stores.
        await self._announcer.announce(await self._store.read(job_rows.endings, [job]))
        function = await self._store.read(_function_of, job)
        if function:
            await get_function(self._mesh, function)  # nobody would run it
        chosen = await fitting(self._queries, job, condition) if condition else None
        begun = await self._store.write(retry_rows.begin, job, generation, condition, chosen)
        crash_point("retry-noted")
        if begun.resubmitted and not begun.again:
            extra = {"job": job, "generation": begun.generation, "items": begun.resubmitted}
            log.info("job is retried", extra=extra)
        return begun

    async def _refuse_if_new(self, job: str) -> None:
        """Raise `Refused` for a job that the broker knows and the data plane does not know yet."""
        subject = self._mesh.subjects.job_event(job, "opened")
        if await last_message(self._mesh, self._mesh.topology.jobs, subject) is not None:
            msg = f"job {job} is still running (open): wait for its end, or cancel it"
            raise Refused(msg, code="still_running")

    def start(self, job: str, generation: int) -> None:
        """Carry the retry to its end in the background, if that is not under way."""
        key = job, generation
        if key not in self._running:
            task = self._spawn(self._finish(job, generation), f"retry {job}@{generation}")
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))

    async def resume(self) -> None:
        """Take up what a crash left in the middle."""
        for retry in await self._store.read(retry_rows.open_retries):
            self.start(retry.job, retry.generation)

    # --- the steps ---------------------------------------------------------------------------------
    async def _finish(self, job: str, generation: int) -> None:
        attempt = 0
        while True:
            try:
                await self._steps(job, generation)
            except HeadraceError as e:
                delay = backoff_s(attempt)
                extra = {
                    "job": job,
                    "generation": generation,
                    "reason": str(e)[:300],
                    "retry_in_s": round(delay, 2),
                }
                log.warning("a retry goes on later", extra=extra)
                attempt += 1
                await asyncio.sleep(delay)
            else:
                return

    async def _steps(self, job: str, generation: int) -> None:
        found = [
            r for r in await self._store.read(retry_rows.open_retries, job) if r.generation == generation
        ]
        if not found:  # it is stored, or the job was cancelled
            return
        retry = found[0]
        event = JobRetried(
            job=job, generation=generation, count=retry.count, where=retry.condition, at_us=retry.asked_us
        )
        await store_once(self._mesh, event, "retried")
        crash_point("retry-announced")
        if await RetryStorer(self._mesh, self._store, retry).run():
            crash_point("retry-all-stored")
            await write_patiently(self._store, "retry", retry_rows.all_stored, job, generation)
            crash_point("retry-ended")
            log.info("a retry is stored", extra={"job": job, "generation": generation, "items": retry.count})


def _function_of(connection: Connection, job: str) -> str:
    row = connection.execute("SELECT function FROM jobs WHERE job = ?", [job]).fetchone()
    return "" if row is None else str(row[0])
