"""Status and audit: the sources of a job, read in the order of the sandwich until a difference is settled or stands.

What one reading says, and when it balances, stands in `sandwich`. What is printed keeps
`submitted = ok + failed + dead + cancelled + queued + landing` while the difference can be one of time. If it
stands, the raw numbers are printed: an account that does not balance must not look as if it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from msgspec.structs import asdict, replace

from headrace.completion import account_rows, counting
from headrace.completion.account_parts import Intake, JobRow, Side, add_to, by_number, summed
from headrace.completion.job_rows import ENDED
from headrace.completion.sandwich import Reading
from headrace.completion.sources import SourceReader
from headrace.completion.store import Store
from headrace.contracts.api import (
    JobAudit,
    JobsRequest,
    JobStatus,
    ShapeAccount,
    Sources,
    TenantAudit,
)
from headrace.contracts.errors import NotFound
from headrace.contracts.names import Lane

T = TypeVar("T")
R = TypeVar("R")

READINGS: Final = 10
PAUSE_S: Final = 0.15
MAX_RANGES: Final = 1_000
AT_ONCE: Final = 8
NAMED: Final = 100
"""Jobs that do not balance are named up to here."""


class Accounting:
    """Status and audit of jobs, and of all of them together."""

    def __init__(self, sources: SourceReader, store: Store) -> None:
        self._store = store
        self._sources = sources

    async def status(self, job: str) -> JobStatus:
        """The account of `job`; raise `NotFound` if neither the data plane nor the broker knows it."""
        row, _ = await self._store.read(account_rows.account, job, False)  # noqa: FBT003
        if row is not None and row.state in ENDED:
            return _ended(row)
        return await self._report(await self._settled(job, count=False))

    async def audit(self, job: str) -> JobAudit:
        """The account of `job` with its proof: every source is read, and the outcomes are counted anew."""
        reading = await self._settled(job, count=True)
        status = await self._report(reading)
        first, last, landed = reading.first, reading.last, reading.landed
        missing: counting.Ranges = []
        if (
            not first.all_tasks
            and not first.results
            and not reading.waiting
            and reading.row.state != "cancelling"
        ):
            # With nothing in the broker after the manifest was read, all that it counts has its outcome, or is lost.
            missing = await self._store.read(counting.gaps, job, first.intake.stored, MAX_RANGES)
        doubled: counting.Ranges = []
        if landed is not None and landed.repeated:
            doubled = await self._store.read(counting.doubled, job, MAX_RANGES)
        return JobAudit(
            **asdict(status),
            balanced=reading.balanced and not missing and not doubled,
            missing=missing,
            doubled=doubled,
            shapes=reading.shapes(),
            sources=Sources(
                manifest_stored=last.intake.stored,
                manifest_closed=last.intake.closed,
                tasks_in_broker=last.all_tasks,
                results_in_broker=last.results,
                rows_landed=landed.rows if landed else 0,
                distinct_indices=landed.indices if landed else 0,
            ),
        )

    async def tenant(self) -> TenantAudit:
        """The account of all jobs: those that ended by one statement over the tables, the others from all sources."""
        queued, recorded = await self._sources.jobs_in_queue()
        plane = await self._store.read(account_rows.tenant, queued, recorded)
        # An ended job whose rows and counters disagree is read like a live one: a retry may just have opened it.
        names = [*plane.live, *(r.row.job for r in plane.doubtful[:NAMED])]
        found = await _at_once(names, self._settled_or_gone)
        readings = [*(r for r in found if r is not None), *plane.doubtful[NAMED:]]
        sums = {a.shape: a for a in plane.shapes}
        for reading in readings:
            add_to(sums, reading.shapes() if reading.balanced else [reading.total()])
        unbalanced = [r.row.job for r in readings if not r.balanced]
        total = summed(sums.values())
        return TenantAudit(
            jobs=plane.ended + len(readings),
            open_jobs=sum(r.row.state not in ENDED for r in readings),
            duplicates=plane.duplicates + sum(r.row.duplicates for r in readings),
            balanced=not unbalanced,
            unbalanced=unbalanced[:NAMED],
            shapes=sorted(sums.values(), key=lambda a: by_number(a.shape)),
            submitted=total.submitted,
            ok=total.ok,
            failed=total.failed,
            dead=total.dead,
            cancelled=total.cancelled,
            queued=total.queued,
            landing=total.landing,
        )

    async def jobs(self, request: JobsRequest) -> list[JobStatus]:
        """Jobs, newest first; those that have not ended are read from all sources."""
        rows = await self._store.read(account_rows.newest, request.limit, request.state)

        async def one(row: JobRow) -> JobStatus:
            return (
                _ended(row)
                if row.state in ENDED
                else await self._report(await self._read(row.job, count=False))
            )

        return await _at_once(rows, one)

    # --- reading -----------------------------------------------------------------------------------
    async def _settled(self, job: str, *, count: bool) -> Reading:
        """Read until the account balances or the difference stands."""
        for _ in range(READINGS - 1):
            reading = await self._read(job, count=count)
            if reading.balanced:
                return reading
            await asyncio.sleep(PAUSE_S)
            if reading.excess and (excused := await self._excused(job, reading)).balanced:
                return excused
        reading = await self._read(job, count=count)
        return reading if reading.balanced or not reading.excess else await self._excused(job, reading)

    async def _excused(self, job: str, reading: Reading) -> Reading:
        """`reading` with the tasks that have their outcome already, found by looking at them, taken for leased.

        They are leased as a rule. A broker that was killed may have forgotten that, and then they wait once more until
        a worker takes them: each is in two places, and known to be one item.
        """
        settled: dict[str, int] = {}
        async for keys in self._sources.stored_tasks(job):
            landed = await self._store.read(counting.which_landed, job, [key[1:] for key in keys])
            for shape, index, generation in keys:
                settled[shape] = settled.get(shape, 0) + ((index, generation) in landed)
            if sum(settled.values()) >= reading.excess + sum(reading.leased.values()):
                break
        shapes = {*settled, *reading.leased}
        return replace(reading, leased={s: max(settled.get(s, 0), reading.leased.get(s, 0)) for s in shapes})

    async def _settled_or_gone(self, job: str) -> Reading | None:
        try:
            return await self._settled(job, count=True)
        except NotFound:
            return None  # a job of which nothing is left but a task that was just taken away

    async def _read(self, job: str, *, count: bool) -> Reading:
        s = self._sources
        first = await s.intake(job)
        tasks_first = await s.tasks(job)
        results_first = await s.results(job)
        row, landed = await self._store.read(account_rows.account, job, count)
        results_last = await s.results(job)
        # Whatever has a row and is still stored when the tasks are read now is leased at this moment.
        leased = await s.leased(tasks_first) if count else {}
        tasks_last = await s.tasks(job)
        last = await s.intake(job)
        if row is None and first is None and last is None and not tasks_last:
            msg = f"no job {job!r}"
            raise NotFound(msg, code="unknown_job")
        row = row or JobRow(job=job)
        # Results that somebody published by hand have no producer whose word could be taken.
        nobody = Intake(row.landed, "")
        first, last = first or last or nobody, last or first or nobody
        reading = Reading(
            row,
            landed,
            Side(first, s.by_shape(tasks_first), results_first),
            Side(last, s.by_shape(tasks_last), results_last),
            leased,
        )
        # A status is asked often: it looks at the leases only where there seems to be too much.
        return reading if count or reading.balanced else replace(reading, leased=await s.leased(tasks_last))

    async def _report(self, reading: Reading) -> JobStatus:
        status = _status(reading.row, reading.total())
        if not reading.last.all_tasks or status.state in ENDED:
            return status
        running = await self._sources.running(status.job)
        items = min(running.items, status.queued)
        return replace(status, running=items, oldest_running_us=running.oldest_us if items else None)


def _ended(row: JobRow) -> JobStatus:
    """The account of an ended job, from its row alone."""
    return _status(row, ShapeAccount(shape="", submitted=row.count or 0))


def _status(row: JobRow, account: ShapeAccount) -> JobStatus:
    early = row.state in ("cancelling", "cancelled")
    return JobStatus(
        job=row.job,
        state=row.state,
        submitted=account.submitted,
        ok=row.ok,
        failed=row.failed,
        dead=row.dead,
        cancelled=row.cancelled,
        queued=account.queued,
        landing=account.landing,
        duplicates=row.duplicates,
        tokens_in=row.tokens_in,
        tokens_out=row.tokens_out,
        function=row.function,
        model=row.model,
        lane=Lane(row.lane),
        opened_us=row.opened_us,
        ended_us=row.ended_us,
        generation=row.generation,
        cause=(row.cause or "requested") if early else None,
        reason=(row.reason or None) if early else None,
        deadline_us=row.deadline_us,
    )


async def _at_once(given: Iterable[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """What `work` makes of each, in order, a few at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(value: T) -> R:
        async with slots:
            return await work(value)

    return list(await asyncio.gather(*map(one, given)))
