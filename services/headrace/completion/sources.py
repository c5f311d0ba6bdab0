"""What the broker knows of jobs: the producer's manifest, stored tasks and results, leases, reports of workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from headrace.completion.account_parts import Intake
from headrace.contracts import codec
from headrace.contracts.errors import InvalidInput, NotFound, Undecodable
from headrace.contracts.messages import JobCancelled, JobSealed, Manifest, WorkerReport
from headrace.contracts.subjects import Subjects, TaskAddress
from headrace.contracts.topology import Topology
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import consumer_info, last_message, next_message, stream_info

REPORT_AGE_US = 10_000_000
"""A worker's report that is older says nothing about now."""
REPORTS_KEPT_S = 0.5
LOOKED_AT, LOOKED_AT_ONCE = 5_000, 250
"""Tasks of a job that are looked at one by one where its account does not balance, at most, and in one piece."""


class Running(Struct, frozen=True):
    """What the workers say they run of a job; `oldest_us` is when the oldest of it began."""

    items: int = 0
    oldest_us: int | None = None


class SourceReader:
    """Reads the sources of jobs."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._subjects: Subjects = mesh.subjects
        self._topology: Topology = mesh.topology
        self._reports: tuple[float, list[WorkerReport]] = (-REPORTS_KEPT_S, [])
        self._reading = asyncio.Lock()

    async def intake(self, job: str) -> Intake | None:
        """The producer's word: its progress record, or once that is gone the event that closed the job.

        What a retry's record says of the retry comes beside the count of the whole job.
        """
        record = await last_message(self._mesh, self._topology.tasks, self._subjects.manifest(job))
        manifest: Manifest | None = None
        if record is not None:
            manifest = codec.MANIFEST.decode(record.data, record.headers)
            if manifest.generation == 1:
                return Intake(manifest.stored, manifest.closed, manifest.shapes)
        closed = await self._closed(job)
        if manifest is None or closed is None:
            return closed
        return replace(closed, generation=manifest.generation, again=manifest.stored)

    async def _closed(self, job: str) -> Intake | None:
        """What the job's events say."""
        for name in ("sealed", "cancelled"):
            found = await last_message(self._mesh, self._topology.jobs, self._subjects.job_event(job, name))
            if found is not None:
                event = codec.JOB_EVENT.decode(found.data, found.headers)
                if isinstance(event, JobSealed | JobCancelled):
                    return Intake(event.count, name, event.shapes)
        opened = await last_message(self._mesh, self._topology.jobs, self._subjects.job_event(job, "opened"))
        return None if opened is None else Intake(0, "")

    async def tasks(self, job: str) -> dict[str, int]:
        """Stored tasks of the job by subject, waiting and leased."""
        return await self._count(self._topology.tasks, self._subjects.tasks_of_job(job))

    async def stored_tasks(self, job: str) -> AsyncIterator[list[tuple[str, int, int]]]:
        """Shape token, index and generation of the job's stored tasks, oldest first, up to `LOOKED_AT` of them."""
        keys: list[tuple[str, int, int]] = []
        seq = 0
        for at in range(1, LOOKED_AT + 1):
            found = await next_message(
                self._mesh, self._topology.tasks, self._subjects.tasks_of_job(job), seq + 1
            )
            if found is not None:
                seq = found.sequence
                with contextlib.suppress(Undecodable):
                    task = codec.TASK.decode(found.data, found.headers)
                    address = self._address(found.subject)
                    keys.append((f"t{address.shape if address else 0}", task.index, task.generation))
            if keys and (found is None or at % LOOKED_AT_ONCE == 0):
                yield keys
                keys = []
            if found is None:
                return

    async def jobs_in_queue(self) -> tuple[set[str], set[str]]:
        """Jobs that have tasks in the broker, and jobs that have a progress record there."""
        tasks, records = set[str](), set[str]()
        record = self._subjects.manifest("x").removesuffix("x")
        for subject in await self._count(self._topology.tasks, f"{self._subjects.prefix}.tasks.>"):
            if subject.startswith(record):
                records.add(subject.removeprefix(record))
            elif (address := self._address(subject)) is not None:
                tasks.add(address.job)
        return tasks, records

    def by_shape(self, tasks: Mapping[str, int]) -> dict[str, int]:
        """Counts by shape token of counts by task subject."""
        counts: dict[str, int] = {}
        for subject, n in tasks.items():
            address = self._address(subject)
            # What somebody published by hand on a subject that is no task's is one item too many, of whatever shape.
            shape = "t0" if address is None else f"t{address.shape}"
            counts[shape] = counts.get(shape, 0) + n
        return counts

    async def results(self, job: str) -> int:
        """Stored results of the job that are not acked by completion."""
        return sum((await self._count(self._topology.results, self._subjects.results_of_job(job))).values())

    async def _count(self, stream: str, filter_: str) -> dict[str, int]:
        info = await stream_info(self._mesh, stream, subjects_filter=filter_)
        subjects: dict[str, int] = info["state"].get("subjects") or {}
        return subjects

    async def leased(self, task_subjects: Iterable[str]) -> dict[str, int]:
        """Messages that the consumers of these subjects have handed out and not got back: by shape, of all jobs."""
        leased: dict[str, int] = {}
        addresses = [a for a in map(self._address, task_subjects) if a is not None]
        for function, lane, shape in {(a.function, a.lane, a.shape) for a in addresses}:
            spec = self._topology.task_consumer(function, lane, shape)
            try:
                info = await consumer_info(self._mesh, spec.stream, spec.durable)
            except NotFound:
                continue  # no worker of that function has ever been here: nothing is leased
            leased[f"t{shape}"] = leased.get(f"t{shape}", 0) + int(info["num_ack_pending"])
        return leased

    def _address(self, subject: str) -> TaskAddress | None:
        try:
            return self._subjects.parse_task(subject)
        except InvalidInput:
            return None

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
