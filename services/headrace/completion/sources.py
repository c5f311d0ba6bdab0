"""The three places that know of a job's items, each read by itself: manifest, broker, data plane."""

from __future__ import annotations

import asyncio
import time

from msgspec import Struct

from headrace.completion.store import Connection, Store
from headrace.contracts import codec
from headrace.contracts.errors import NotFound, Undecodable
from headrace.contracts.messages import JobCancelled, JobSealed, Manifest, WorkerReport
from headrace.contracts.subjects import Subjects
from headrace.contracts.topology import Topology
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import consumer_info, last_message, stream_info

REPORT_AGE_US = 10_000_000
"""A worker's report that is older says nothing about now."""
REPORTS_KEPT_S = 0.5

_ROWS = """
SELECT count(*), count(DISTINCT "index"), coalesce(min("index"), 0), coalesce(max("index"), -1)
FROM outcomes WHERE job = ?"""

_STATUSES = """
SELECT count(*) FILTER (status = 'ok'), count(*) FILTER (status = 'failed'), count(*) FILTER (status = 'dead'),
    count(*) FILTER (status = 'cancelled')
FROM (SELECT arg_max(status, generation) AS status FROM outcomes WHERE job = ? GROUP BY "index")"""

# Between one outcome and the next, before the first and after the last: what is not there.
_GAPS = """
SELECT before + 1, i - 1 FROM (
    SELECT i, lag(i, 1, -1) OVER (ORDER BY i) AS before FROM (
        SELECT DISTINCT "index" AS i FROM outcomes WHERE job = $job AND "index" < $count
        UNION ALL SELECT $count
    )
) WHERE i - before > 1 ORDER BY 1 LIMIT $limit"""


class Intake(Struct, frozen=True):
    """How many items the producer says it stored, and whether it is done: `sealed`, `cancelled` or open."""

    stored: int
    closed: str


class Landed(Struct, frozen=True):
    """What the outcomes themselves say, counted anew: rows of all generations, indices, and the latest by status."""

    rows: int
    indices: int
    ok: int
    failed: int
    dead: int
    cancelled: int


class Running(Struct, frozen=True):
    """What the workers say they run of a job; `oldest_us` is when the oldest of it began."""

    items: int = 0
    oldest_us: int | None = None


def count_landed(connection: Connection, job: str) -> Landed:
    """Count the outcomes of `job` by reading them, and not by its counters."""
    rows, indices, _, _ = connection.execute(_ROWS, [job]).fetchall()[0]
    return Landed(rows, indices, *connection.execute(_STATUSES, [job]).fetchall()[0])


def gaps(connection: Connection, job: str, count: int, limit: int) -> list[tuple[int, int]]:
    """Inclusive ranges of the indices 0..count-1 that have no outcome, at most `limit`."""
    rows = connection.execute(_GAPS, {"job": job, "count": count, "limit": limit}).fetchall()
    return [(int(first), int(last)) for first, last in rows]


class SourceReader:
    """Reads the sources of jobs."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._mesh = mesh
        self._store = store
        self._subjects: Subjects = mesh.subjects
        self._topology: Topology = mesh.topology
        self._reports: tuple[float, list[WorkerReport]] = (-REPORTS_KEPT_S, [])
        self._reading = asyncio.Lock()

    async def intake(self, job: str) -> Intake | None:
        """The producer's word: its progress record, or once that is gone the event that closed the job."""
        record = await last_message(self._mesh, self._topology.tasks, self._subjects.manifest(job))
        if record is not None:
            manifest: Manifest = codec.MANIFEST.decode(record.data, record.headers)
            return Intake(manifest.stored, manifest.closed)
        for name in ("sealed", "cancelled"):
            found = await last_message(self._mesh, self._topology.jobs, self._subjects.job_event(job, name))
            if found is not None:
                event = codec.JOB_EVENT.decode(found.data, found.headers)
                if isinstance(event, JobSealed | JobCancelled):
                    return Intake(event.count, name)
        opened = await last_message(self._mesh, self._topology.jobs, self._subjects.job_event(job, "opened"))
        return None if opened is None else Intake(0, "")

    async def tasks(self, job: str) -> dict[str, int]:
        """Stored tasks of the job by subject, waiting and leased."""
        return await self._count(self._topology.tasks, self._subjects.tasks_of_job(job))

    async def results(self, job: str) -> int:
        """Stored results of the job that are not acked by completion."""
        return sum((await self._count(self._topology.results, self._subjects.results_of_job(job))).values())

    async def _count(self, stream: str, filter_: str) -> dict[str, int]:
        info = await stream_info(self._mesh, stream, subjects_filter=filter_)
        subjects: dict[str, int] = info["state"].get("subjects") or {}
        return subjects

    async def leased(self, task_subjects: list[str]) -> int:
        """Messages that the consumers of these subjects have handed out and not got back."""
        total = 0
        for address in {self._subjects.parse_task(s) for s in task_subjects}:
            spec = self._topology.task_consumer(address.function, address.lane, address.shape)
            try:
                total += int((await consumer_info(self._mesh, spec.stream, spec.durable))["num_ack_pending"])
            except NotFound:
                continue  # no worker of that function has ever been here: nothing is leased
        return total

    async def landed(self, job: str) -> Landed:
        """What the data plane holds, read from the outcomes themselves."""
        return await self._store.read(count_landed, job)

    async def gaps(self, job: str, count: int, limit: int = 1_000) -> list[tuple[int, int]]:
        """`gaps` on a reader's thread."""
        return await self._store.read(gaps, job, count, limit)

    async def running(self, job: str) -> Running:
        """What the workers' reports say of the job."""
        items, oldest = 0, 0
        for report in await self._recent_reports():
            items += report.running.get(job, 0)
            began = report.oldest.get(job, 0)
            oldest = min(oldest or began, began or oldest)
        return Running(items, oldest or None)

    async def _recent_reports(self) -> list[WorkerReport]:
        # Many may watch many jobs: the bucket is read at most twice a second for all of them.
        async with self._reading:
            read_at, reports = self._reports
            if time.monotonic() - read_at >= REPORTS_KEPT_S:
                reports = await self._read_reports()
                self._reports = (time.monotonic(), reports)
        oldest = time.time_ns() // 1_000 - REPORT_AGE_US
        return [r for r in reports if r.at_us >= oldest]

    async def _read_reports(self) -> list[WorkerReport]:
        bucket = self._topology.workers_bucket
        stream = f"KV_{bucket}"
        info = await stream_info(self._mesh, stream, subjects_filter=f"$KV.{bucket}.>")
        found = await asyncio.gather(
            *(last_message(self._mesh, stream, s) for s in info["state"]["subjects"])
        )
        reports: list[WorkerReport] = []
        for stored in found:
            if stored is not None and stored.data:
                try:
                    reports.append(codec.WORKER_REPORT.decode(stored.data, stored.headers))
                except Undecodable:
                    continue  # of a newer worker, say: it is missing in `running`, which is no part of the account
        return reports
