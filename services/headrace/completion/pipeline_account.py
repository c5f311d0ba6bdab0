"""Status and audit of pipelines: the account of each stage's job, and of what fed it.

The law over the whole: each ok row of a stage arrives once at each stage that it feeds, in one order; each arrival is
divided once, into the rows that its value says, which take the next indices without gap or overlap; and the rows that
are stored are the first of those, and all of them once the stage is sealed. A stage that collects has one row for each
group, and each group its ok members. What the values say is counted anew by an audit.

How far a stage is stored is read first, then one snapshot of the data plane: so no order of events breaks the law.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import asdict

from headrace.completion import pipeline_rows, stage_reading, stage_rows
from headrace.completion.accounting import Accounting
from headrace.completion.job_rows import ENDED
from headrace.completion.pipeline_proof import Feeding, feeding_of
from headrace.completion.pipelines import unknown
from headrace.completion.sources import SourceReader
from headrace.completion.stage_mapping import Mapper, Upstream
from headrace.completion.stage_rows import Stage
from headrace.completion.store import Connection, Store
from headrace.contracts.api import JobStatus
from headrace.contracts.errors import NotFound
from headrace.contracts.pipeline import (
    PipelineAudit,
    PipelineEntry,
    PipelineRecord,
    PipelineStatus,
    StageAudit,
    StageSpec,
    StageStatus,
)

_COUNTS: Final = (
    "submitted", "ok", "failed", "dead", "cancelled", "queued", "landing", "running", "duplicates",
)  # fmt: skip
READINGS: Final = 10
PAUSE_S: Final = 0.15


class PipelineAccounting:
    """Reads pipelines for the front door."""

    def __init__(self, store: Store, sources: SourceReader, accounting: Accounting) -> None:
        self._store = store
        self._sources = sources
        self._accounting = accounting

    async def status(self, pipeline: str) -> PipelineStatus:
        """Every stage with its counts; `NotFound` if there is no such pipeline."""
        record, reason, stages = await self._read(pipeline)
        found: list[StageStatus] = []
        for stage in stages:
            status = await self._job_status(stage.job)
            feeding = await self._store.read(feeding_of, stage, record)
            found.append(StageStatus(**_stage_fields(stage, record, status, feeding)))
        return PipelineStatus(
            pipeline=pipeline,
            state=state_of([s.state for s in found], cancelled=reason is not None),
            stages=found,
            opened_us=record.opened_us,
            deadline_us=record.deadline_us,
            reason=reason,
        )

    async def audit(self, pipeline: str) -> PipelineAudit:
        """Every stage with its proof, and of what fed it; a difference is read again until it is settled or stands."""
        record, reason, stages = await self._read(pipeline)
        found = [await self._audited(stage, record) for stage in stages]
        return PipelineAudit(
            pipeline=pipeline,
            state=state_of([s.state for s in found], cancelled=reason is not None),
            balanced=all(stage.balanced for stage in found),
            stages=found,
        )

    async def newest(self, limit: int) -> list[PipelineEntry]:
        """Pipelines, newest first."""
        return await self._store.read(_newest, limit)

    # --- reading -------------------------------------------------------------------------------------
    async def _read(self, pipeline: str) -> tuple[PipelineRecord, str | None, list[Stage]]:
        found = await self._store.read(pipeline_rows.record, pipeline)
        if found is None:
            raise unknown(pipeline)
        return *found, await self._store.read(stage_rows.stages, pipeline)

    async def _job_status(self, job: str) -> JobStatus | None:
        try:
            return await self._accounting.status(job)
        except NotFound:
            return None

    async def _audited(self, stage: Stage, record: PipelineRecord) -> StageAudit:
        reading = 1
        while True:
            found, at_rest = await self._audit_once(stage, record)
            if found.balanced or at_rest or reading == READINGS:
                return found
            await asyncio.sleep(PAUSE_S)
            reading += 1

    async def _audit_once(self, stage: Stage, record: PipelineRecord) -> tuple[StageAudit, bool]:
        """One reading, and whether nothing of it moves any more."""
        intake = await self._sources.intake(stage.job)
        feeding = await self._store.read(feeding_of, stage, record, prove=True)
        spec = record.spec.stages[stage.number]
        expected = feeding.assigned
        if stage.parent is not None and not spec.collect and Mapper(spec).divides:
            expected = await self._expected(stage, spec, feeding)
        try:
            job = await self._accounting.audit(stage.job)
        except NotFound:
            job = None
        problems = [*feeding.problems]
        if job is not None and not job.balanced:
            problems.append("the account of its job does not balance")
        if stage.parent is not None:
            stored = 0 if intake is None else intake.stored
            problems += _compared(stored, feeding, expected, closed="" if intake is None else intake.closed)
        audit = StageAudit(
            **_stage_fields(stage, record, job, feeding),
            balanced=not problems,
            arrived=feeding.arrived,
            fed=feeding.fed,
            assigned=feeding.assigned,
            expected=expected,
            problems=problems,
        )
        return audit, feeding.child in ENDED and (stage.parent is None or feeding.parent_ended)

    async def _expected(self, stage: Stage, spec: StageSpec, feeding: Feeding) -> int:
        """The rows that the values say, of the first `feeding.fed` arrivals."""
        mapper = Mapper(spec)
        total, arrival, page = 0, -1, stage_reading.PageSize()
        while arrival + 1 < feeding.fed:
            limit = min(page.rows, feeding.fed - arrival - 1)
            numbers, rows = await self._store.read(stage_reading.arrived, stage, arrival, limit)
            if not numbers:
                break
            page.seen(rows)
            total += await asyncio.to_thread(_count, mapper, rows)
            arrival = numbers[-1]
        return total


def _count(mapper: Mapper, rows: Sequence[Upstream]) -> int:
    return sum(len(mapper.children(row)) for row in rows)


def _compared(stored: int, feeding: Feeding, expected: int, *, closed: str) -> list[str]:
    problems: list[str] = []
    if expected != feeding.assigned:
        problems.append(f"the values say {expected:,} rows, {feeding.assigned:,} are assigned")
    if stored > feeding.assigned:
        problems.append(f"{stored:,} rows are stored, {feeding.assigned:,} are assigned")
    if closed == "sealed" and stored != feeding.assigned:
        problems.append(f"it was sealed with {stored:,} rows of {feeding.assigned:,}")
    return problems


def _newest(connection: Connection, limit: int) -> list[PipelineEntry]:
    rows = connection.execute(
        """SELECT p.pipeline, epoch_us(p.opened_at), p.cancel_reason IS NOT NULL,
            list(coalesce(j.state, 'waiting') ORDER BY s.number)
        FROM pipelines AS p JOIN stages AS s ON s.pipeline = p.pipeline LEFT JOIN jobs AS j ON j.job = s.job
        GROUP BY ALL ORDER BY 2 DESC, 1 LIMIT ?""",
        [limit],
    ).fetchall()
    return [
        PipelineEntry(
            pipeline=name, state=state_of(states, cancelled=cancelled), stages=len(states), opened_us=opened
        )
        for name, opened, cancelled, states in rows
    ]


# --- what is told -----------------------------------------------------------------------------------
def state_of(states: list[str], *, cancelled: bool) -> str:
    """The state of a pipeline by those of its stages."""
    if not all(state in ENDED for state in states):
        return "cancelling" if cancelled else "running"
    if cancelled or "cancelled" in states:
        return "cancelled"
    return "completed_with_errors" if "completed_with_errors" in states else "completed"


def _stage_fields(
    stage: Stage, record: PipelineRecord, status: JobStatus | None, feeding: Feeding
) -> dict[str, Any]:
    spec = record.spec.stages[stage.number]
    counts = {} if status is None else {k: v for k, v in asdict(status).items() if k in _COUNTS}
    waiting = 0
    if stage.parent is not None and feeding.child not in ENDED:
        stored = 0 if status is None else status.submitted
        undivided = 0 if spec.collect else feeding.arrived - feeding.fed
        waiting = max(0, undivided) + max(0, feeding.assigned - stored)
    return {
        "stage": stage.stage,
        "job": stage.job,
        "function": spec.function,
        "state": "waiting" if status is None else status.state,
        "waiting": waiting,
        "lost": feeding.lost,
        "unfit": feeding.unfit,
        **counts,
    }
