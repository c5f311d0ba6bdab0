"""Pipelines: opened once, fed to their end, cancelled as a whole; each step can be repeated and taken up again.

A pipeline is durable when its record lies in the bucket; the data plane notes it after that, and at a start what it
does not know. Each stage but the first has a task of its own that feeds it (`stage_storing`): landing never waits for
it, and a stage that is full holds up nobody but the one that feeds it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from msgspec import structs

from headrace.client.jobs import TAKEN, open_job
from headrace.client.jobs import last_event as read_event
from headrace.client.sampling import ParamsTable
from headrace.completion import job_rows, pipeline_rows, stage_rows
from headrace.completion.cancel import Canceller, Spawn
from headrace.completion.patience import write_patiently
from headrace.completion.stage_rows import Stage
from headrace.completion.stage_storing import NextCommit, StageFeeder
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.errors import Conflict, HeadraceError, InvalidInput, NotFound
from headrace.contracts.messages import JobOpened
from headrace.contracts.pipeline import (
    PipelineOpenReply,
    PipelineOpenRequest,
    PipelineRecord,
    PipelineSpec,
)
from headrace.contracts.pipeline_checks import check_pipeline
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import JetStreamError, last_message, stream_info
from headrace.mesh.provision import get_function
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.completion")

DEFAULT_REASON: Final = "the pipeline was cancelled"


class Pipelines:
    """Every pipeline of a mesh; `spawn` starts the tasks, `next_commit` waits for landed results."""

    def __init__(
        self, mesh: Mesh, store: Store, canceller: Canceller, next_commit: NextCommit, spawn: Spawn
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._canceller = canceller
        self._next_commit = next_commit
        self._spawn = spawn
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelling: dict[str, asyncio.Task[None]] = {}
        bucket = mesh.topology.pipelines_bucket
        self._stream, self._key = f"KV_{bucket}", f"$KV.{bucket}."

    async def open(self, request: PipelineOpenRequest) -> PipelineOpenReply:
        """Record the pipeline and begin to feed it, unless that was done before; return once it is durable.

        Raise `InvalidInput` naming stage and field, `NotFound` for a function that is not registered, `Conflict` if
        another pipeline has the name, or a job of that name exists.
        """
        spec = request.spec
        check_pipeline(spec)
        mine = PipelineRecord(
            spec=spec,
            fingerprint=codec.fingerprint([spec, request.tenant]),
            tenant=request.tenant,
            opened_us=job_rows.now_us(),
            deadline_us=request.deadline_us,
        )
        record = await self._stored(spec.name)
        again = record is not None
        if record is None:
            await self._check_functions(spec)
            await self._check_jobs(spec)
            record = await self._create(mine)
        if record.fingerprint != mine.fingerprint:
            msg = f"pipeline {spec.name} exists and is declared otherwise: choose another name"
            raise Conflict(msg, code="pipeline_exists")
        crash_point("pipeline-recorded")
        await write_patiently(self._store, "pipeline", pipeline_rows.note, record)
        crash_point("pipeline-noted")
        await self._start(spec.name)
        known = await self._store.read(pipeline_rows.record, spec.name)
        return PipelineOpenReply(
            pipeline=spec.name,
            state="cancelled" if known and known[1] is not None else "running",
            jobs=[spec.job_of(stage) for stage in spec.stages],
            again=again,
            deadline_us=record.deadline_us,
        )

    async def cancel(self, pipeline: str, reason: str) -> None:
        """Begin to cancel every stage that has not ended, and return once the intent is durable: then it happens.

        One that has ended is left as it is. Raise `NotFound` if there is no such pipeline.
        """
        if await self._store.read(pipeline_rows.record, pipeline) is None:
            raise unknown(pipeline)
        if await write_patiently(self._store, "pipeline", pipeline_rows.cancel, pipeline, reason):
            crash_point("pipeline-cancel-noted")
            self._carry_out(pipeline)

    async def resume(self) -> None:
        """Note what was recorded and not noted, feed what is not fed, cancel what was to be cancelled."""
        info = await stream_info(self._mesh, self._stream, subjects_filter=f"{self._key}>")
        recorded = {subject.removeprefix(self._key) for subject in info["state"]["subjects"]}
        for name in sorted(recorded - await self._store.read(pipeline_rows.names)):
            record = await self._stored(name)
            if record is not None:
                await self._store.write(pipeline_rows.note, record)
        for pipeline in {stage.pipeline for stage in await self._store.read(stage_rows.stages)}:
            await self._start(pipeline)
        for pipeline in await self._store.read(pipeline_rows.being_cancelled):
            self._carry_out(pipeline)

    # --- feeding -------------------------------------------------------------------------------------
    async def _start(self, pipeline: str) -> None:
        found = await self._store.read(pipeline_rows.record, pipeline)
        if found is None:
            return
        for stage in await self._store.read(stage_rows.stages, pipeline):
            if stage.parent is not None and not stage.fed and stage.job not in self._running:
                self._feed(found[0], stage)

    def _feed(self, record: PipelineRecord, stage: Stage) -> None:
        feeder = StageFeeder(self._mesh, self._store, record, stage, self._next_commit)
        task = self._spawn(feeder.run(), f"feed {stage.job}")
        self._running[stage.job] = task
        task.add_done_callback(lambda _: self._running.pop(stage.job, None))

    # --- the record ----------------------------------------------------------------------------------
    async def _stored(self, name: str) -> PipelineRecord | None:
        found = await last_message(self._mesh, self._stream, f"{self._key}{name}")
        return None if found is None or not found.data else codec.PIPELINE.decode(found.data, found.headers)

    async def _create(self, record: PipelineRecord) -> PipelineRecord:
        try:
            await publish(
                self._mesh,
                self._stream,
                f"{self._key}{record.spec.name}",
                codec.PIPELINE.encode(record),
                headers={codec.SCHEMA_HEADER: codec.PIPELINE.name},
                expected_last_subject_seq=0,
            )
        except JetStreamError as e:
            stored = await self._stored(record.spec.name) if e.err_code in TAKEN else None
            if stored is None:
                raise
            return stored
        return record

    async def _check_functions(self, spec: PipelineSpec) -> None:
        for stage in spec.stages:
            try:
                function = await get_function(self._mesh, stage.function)
            except NotFound as e:
                raise NotFound(f"stage {stage.name}: {e}", code=e.code) from None
            try:
                ParamsTable(function, structs.asdict(stage.params))
            except InvalidInput as e:
                raise InvalidInput(
                    f"stage {stage.name}, params: {e}",
                    field=f"stage.{stage.name}.params.{e.field}",
                    code=e.code,
                ) from None
            if spec.lane_of(stage) not in function.lanes:
                lanes = ", ".join(function.lanes)
                msg = f"stage {stage.name}, lane: function {function.name} has {lanes}, not {spec.lane_of(stage)}"
                raise InvalidInput(msg, field=f"stage.{stage.name}.lane")

    async def _check_jobs(self, spec: PipelineSpec) -> None:
        for stage in spec.stages:
            job = spec.job_of(stage)
            if await read_event(self._mesh, job, "opened") is not None:
                msg = f"stage {stage.name}: job {job} exists: name another pipeline, or give the stage a job of its own"
                raise Conflict(msg, code="job_exists")

    # --- cancelling ----------------------------------------------------------------------------------
    def _carry_out(self, pipeline: str) -> None:
        """Cancel the stages in the background, if that is not under way."""
        if pipeline not in self._cancelling:
            task = self._spawn(self._cancel(pipeline), f"cancel pipeline {pipeline}")
            self._cancelling[pipeline] = task
            task.add_done_callback(lambda _: self._cancelling.pop(pipeline, None))

    async def _cancel(self, pipeline: str) -> None:
        attempt = 0
        while True:
            try:
                found = await self._store.read(pipeline_rows.record, pipeline)
                if found is not None:
                    await self._cancel_stages(found[0], found[1] or DEFAULT_REASON)
            except HeadraceError as e:
                delay = backoff_s(attempt)
                attempt += 1
                extra = {"pipeline": pipeline, "reason": str(e)[:300], "retry_in_s": round(delay, 2)}
                log.warning("a pipeline is cancelled later", extra=extra)
                await asyncio.sleep(delay)
            else:
                return

    async def _cancel_stages(self, record: PipelineRecord, reason: str) -> None:
        # The last first: none is to be fed by the end of the one before it.
        for stage in reversed(record.spec.stages):
            job = record.spec.job_of(stage)
            if await read_event(self._mesh, job, "opened") is None:
                # Opened for this, so that nothing can be submitted to it later.
                opened = JobOpened(
                    job=job,
                    function=stage.function,
                    input_fingerprint=record.fingerprint,
                    tenant=record.tenant,
                    pipeline=record.spec.name,
                    stage=stage.name,
                    at_us=job_rows.now_us(),
                )
                await open_job(self._mesh, opened, None)
            await self._canceller.request(job, reason)


def unknown(pipeline: str) -> NotFound:
    """The error of a pipeline that nobody knows."""
    return NotFound(f"no pipeline {pipeline!r}", code="unknown_pipeline")
