"""Feeding one stage: each of its rows is stored once, in the order of its index, whatever crashes or gets lost.

As a producer does: up to 999 tasks and the progress record that counts them, by one atomic commit that expects the
record before it to be the last of its subject. Where it stands is always read from that record, and what a row is from
the data plane. A row that could not be made is counted by the record too, and its outcome is stored after it: what a
crash left out there can only be of the last batch, and is stored at the next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

from headrace.client.jobs import TAKEN, Stored, drop_old_manifests, manifest_message, open_job, seal_job
from headrace.client.jobs import last_event as read_event
from headrace.client.uploads import Uploader
from headrace.completion import counting, job_rows, stage_rows
from headrace.completion.patience import write_patiently
from headrace.completion.stage_mapping import Child
from headrace.completion.stage_rows import Stage
from headrace.completion.stage_source import STOPPED, StageRows
from headrace.completion.stage_tasks import StageTasks
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.errors import Conflict, HeadraceError
from headrace.contracts.messages import JobOpened, JobSealed, Manifest
from headrace.contracts.pipeline import PipelineRecord
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import STREAM_IS_FULL, JetStreamError, last_message
from headrace.mesh.provision import get_function
from headrace.mesh.publisher import MAX_BATCH, AtomicBatch, publish_all

log = logging.getLogger("headrace.completion")

FIRST_BATCH: Final = 128
_KEEP_EVERY: Final = 50
_REST_S: Final = 0.05
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 0.5

NextCommit = Callable[[float], Awaitable[None]]
"""Returns after the next commit of results, or when so many seconds are over."""


class StageFeeder:
    """Feeds one stage of a pipeline until it is sealed, or its job is cancelled."""

    def __init__(
        self, mesh: Mesh, store: Store, record: PipelineRecord, stage: Stage, next_commit: NextCommit
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._record = record
        self._stage = stage
        self._spec = record.spec.stages[stage.number]
        self._next_commit = next_commit
        self._uploader = Uploader(mesh)
        self._limit = FIRST_BATCH
        self._commits = 0
        self._pause_s = _FIRST_PAUSE_S

    async def run(self) -> None:
        """Feed to the end, however often the broker or the data plane is away."""
        attempt = 0
        while True:
            before = self._commits
            try:
                await self._feed()
            except* HeadraceError as e:
                attempt = 0 if self._commits > before else attempt
                delay = backoff_s(attempt)
                attempt += 1
                extra = {
                    "job": self._stage.job,
                    "reason": str(e.exceptions[0])[:300],
                    "retry_in_s": round(delay, 2),
                }
                log.warning("a stage is fed later", extra=extra)
                await asyncio.sleep(delay)
            else:
                return

    # --- the steps -----------------------------------------------------------------------------------
    async def _feed(self) -> None:
        await self._open()
        function = await get_function(self._mesh, self._spec.function)
        tasks = StageTasks(self._mesh, self._record, self._stage.number, function)
        rows = StageRows(self._store, self._record, self._stage, most_bytes=tasks.limit)
        at = await self._where()
        if at is not None and not at.closed:
            await self._tell_unfit_of_last_batch(at, rows, tasks)
        while at is not None and not at.closed:
            children = await rows.take(at.items, self._limit)
            if rows.stopped:
                at = None
            elif children is None:
                at = await self._commit(at, [], tasks, "sealed")
            elif children:
                at = await self._commit(at, children, tasks)
                self._pause_s = _FIRST_PAUSE_S
            else:
                await self._wait()
        if at is not None and at.closed == "sealed":
            await self._seal(at)
        await write_patiently(self._store, "pipeline", stage_rows.mark_fed, self._stage.job)

    async def _open(self) -> None:
        record = self._record
        opened = JobOpened(
            job=self._stage.job,
            function=self._spec.function,
            input_fingerprint=record.fingerprint,
            tenant=record.tenant,
            lane=record.spec.lane_of(self._spec),
            source=f"stage {self._stage.stage} of pipeline {record.spec.name}",
            at_us=job_rows.now_us(),
            deadline_us=record.deadline_us,
            max_failed=self._spec.max_failed,
            pipeline=record.spec.name,
            stage=self._stage.stage,
        )
        await open_job(self._mesh, opened, await read_event(self._mesh, self._stage.job, "opened"))
        crash_point("pipeline-opened")

    async def _wait(self) -> None:
        """Nothing to feed at the moment."""
        await self._next_commit(self._pause_s)
        await asyncio.sleep(_REST_S)
        self._pause_s = min(_LAST_PAUSE_S, self._pause_s * 1.5)

    async def _where(self) -> Stored | None:
        """What is stored of the stage; None if its job was cancelled.

        The record is read before the job's state: it is removed only once the job has ended.
        """
        job = self._stage.job
        subject = self._mesh.subjects.manifest(job)
        found = await last_message(self._mesh, self._mesh.topology.tasks, subject)
        state = await self._store.read(job_rows.state_of, job)
        if state in STOPPED:
            return None
        if state in job_rows.ENDED:
            return Stored(closed="ended")
        if found is not None:
            manifest: Manifest = codec.MANIFEST.decode(found.data, found.headers)
            if manifest.closed == "cancelled":
                return None
            if manifest.generation > 1:
                return Stored(closed="ended")
            if manifest.input_fingerprint != self._record.fingerprint:
                msg = f"job {job} has tasks of another input: a stage is fed by its pipeline alone"
                raise Conflict(msg, code="job_exists")
            return Stored(manifest.stored, 0, found.sequence, manifest.closed, manifest.shapes)
        # A record that counts nothing comes first, so that each later commit expects a sequence that was there once.
        empty = Manifest(job=job, input_fingerprint=self._record.fingerprint)
        try:
            batch = AtomicBatch(self._mesh, self._mesh.topology.tasks)
            ack = await batch.commit(manifest_message(self._mesh, empty), expected_last_subject_seq=0)
        except JetStreamError as e:
            if e.err_code not in TAKEN:
                raise
            return await self._where()
        crash_point("pipeline-record-stored")
        return Stored(0, 0, ack.seq)

    async def _commit(
        self,
        at: Stored,
        children: Sequence[Child],
        tasks: StageTasks,
        closed: Literal["", "sealed"] = "",
    ) -> Stored | None:
        """Store one more batch; return where the stage stands then, whoever brought it there."""
        batch = await asyncio.to_thread(tasks.batch, children, at.items)
        shapes = Counter(at.shapes) + batch.shapes
        manifest = Manifest(
            job=self._stage.job,
            input_fingerprint=self._record.fingerprint,
            stored=at.items + batch.rows,
            closed=closed,
            shapes=dict(shapes),
        )
        try:
            await self._uploader.store(batch.uploads)
            atomic = AtomicBatch(self._mesh, self._mesh.topology.tasks)
            await atomic.stage(batch.messages)
            ack = await atomic.commit(
                manifest_message(self._mesh, manifest), expected_last_subject_seq=at.seq
            )
        except JetStreamError as e:
            if e.err_code in STREAM_IS_FULL:
                self._limit = max(1, self._limit // 2)  # a smaller batch may still fit
                raise
            if e.err_code not in TAKEN:
                raise
            msg = "somebody was there before: a cancellation, or this batch itself, its ack lost"
            raise Conflict(msg, code="moved") from None
        if closed:
            crash_point("pipeline-all-stored")
        crash_point("pipeline-batch-stored")
        self._commits += 1
        await publish_unfit(self._mesh, tasks, batch.unfit)
        self._limit = min(MAX_BATCH - 1, max(1, batch.rows) * 2)
        if self._commits % _KEEP_EVERY == 0:
            await drop_old_manifests(self._mesh, self._stage.job)
        return Stored(manifest.stored, 0, ack.seq, closed, dict(shapes))

    async def _tell_unfit_of_last_batch(self, at: Stored, rows: StageRows, tasks: StageTasks) -> None:
        first = max(0, at.items - MAX_BATCH)
        while first < at.items:
            children = await rows.take(first, at.items - first)
            if not children:
                return
            unfit = [(first + k, child) for k, child in enumerate(children)]
            batch = await asyncio.to_thread(tasks.unfit, unfit)
            keys = [(index, 1) for index, _ in batch]
            landed = await self._store.read(counting.which_landed, self._stage.job, keys)
            await publish_unfit(self._mesh, tasks, [b for b in batch if (b[0], 1) not in landed])
            first += len(children)

    async def _seal(self, at: Stored) -> None:
        sealed = JobSealed(
            job=self._stage.job,
            count=at.items,
            input_fingerprint=self._record.fingerprint,
            at_us=job_rows.now_us(),
            shapes=dict(at.shapes),
        )
        await seal_job(self._mesh, sealed)
        crash_point("pipeline-sealed")
        extra = {"pipeline": self._stage.pipeline, "job": self._stage.job, "items": at.items}
        log.info("a stage is fed", extra=extra)


async def publish_unfit(mesh: Mesh, tasks: StageTasks, unfit: Sequence[tuple[int, Child]]) -> None:
    """Store the outcomes of rows that could not be made."""
    messages = [tasks.failed(index, child) for index, child in unfit]
    for first in range(0, len(messages), MAX_BATCH):
        await publish_all(mesh, mesh.topology.results, messages[first : first + MAX_BATCH])
    if messages:
        crash_point("pipeline-unfit-told")
