"""The account of a job, and its proof.

Items move from tasks to results to rows while the three sources are read one after the other, so one reading cannot
be exact. It is a sandwich: manifest, tasks, results, rows, results, tasks, manifest. Then

    upper = tasks + results + rows, read in the direction of the flow: sees each item at least once
    lower = rows + tasks, read against it: sees an item twice only while its task is leased
            (its result or row is there, and the ack of the task is on its way, or lost with its worker)

and the account balances iff `lower - leased ≤ submitted` (at the end) and `submitted ≤ upper` (at the beginning).
At rest both are the same sum. A difference is read again until it is settled or stands. Results do not count in
`lower`: two may be stored for one item (a worker died between storing one and acking), which landing settles.

What is printed keeps `submitted = ok + failed + dead + cancelled + queued + landing` while the difference can be one
of time. If it stands, the raw numbers are printed: an account that does not balance must not look as if it did.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct
from msgspec.structs import asdict, replace

from headrace.completion.job_rows import ENDED
from headrace.completion.sources import Intake, Landed, SourceReader, count_landed
from headrace.completion.store import Connection, Store
from headrace.contracts.api import JobAudit, JobsRequest, JobStatus, Sources
from headrace.contracts.errors import NotFound
from headrace.contracts.names import Lane
from headrace.mesh.connection import Mesh

READINGS = 10
PAUSE_S = 0.15
MAX_GAPS = 1_000
AT_ONCE = 8

_SELECT = """
SELECT job, state, count, landed, ok, failed, dead, cancelled, duplicates, tokens_in, tokens_out, function, model, lane,
    coalesce(epoch_us(opened_at), 0), epoch_us(ended_at) FROM jobs"""


class JobRow(Struct, frozen=True):
    """A job as the table `jobs` has it."""

    job: str
    state: str = "open"
    count: int | None = None
    landed: int = 0
    ok: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    duplicates: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    function: str = ""
    model: str | None = None
    lane: str = "normal"
    opened_us: int = 0
    ended_us: int | None = None


class Reading(Struct, frozen=True):
    """One sandwich."""

    row: JobRow
    landed: Landed | None
    first: Intake
    last: Intake
    tasks_first: int
    tasks_last: int
    results_first: int
    results_last: int
    leased: int

    @property
    def rows(self) -> int:
        """Indices that have an outcome."""
        return self.row.landed if self.landed is None else self.landed.indices

    @property
    def balanced(self) -> bool:
        """Whether this reading is consistent with every stored item being somewhere exactly once."""
        upper = self.tasks_first + self.results_first + self.rows
        lower = self.rows + self.tasks_last - min(self.leased, self.tasks_last)
        # Between the purge of a cancelled job's tasks and the rows that stand for them, the stored `cancelled` event
        # is what accounts for them.
        enough = self.row.state == "cancelling" or self.first.stored <= upper
        return enough and lower <= self.last.stored and self._counters_agree

    @property
    def _counters_agree(self) -> bool:
        if self.landed is None:
            return True
        mine = (self.row.landed, self.row.ok, self.row.failed, self.row.dead, self.row.cancelled)
        return mine == (
            self.landed.indices,
            self.landed.ok,
            self.landed.failed,
            self.landed.dead,
            self.landed.cancelled,
        )


class Accounting:
    """Status and audit of jobs."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._store = store
        self._sources = SourceReader(mesh, store)

    async def status(self, job: str) -> JobStatus:
        """The account of `job`; raise `NotFound` if neither the data plane nor the broker knows it."""
        row = await self._row(job)
        if row is not None and row.state in ENDED:
            return _status(row, row.count or 0, 0, 0)
        reading = await self._settled(job, count=False)
        return await self._report(reading)

    async def audit(self, job: str) -> JobAudit:
        """The account of `job` with its proof: every source is read, and the outcomes are counted anew."""
        reading = await self._settled(job, count=True)
        status = await self._report(reading)
        # With nothing in the broker after the manifest was read, all that it counts has its outcome, or is lost.
        nothing_left = reading.tasks_first == reading.results_first == 0 and reading.row.state != "cancelling"
        missing = await self._sources.gaps(job, reading.first.stored, MAX_GAPS) if nothing_left else []
        landed = reading.landed
        return JobAudit(
            **asdict(status),
            balanced=reading.balanced and not missing,
            missing=missing,
            sources=Sources(
                manifest_stored=reading.last.stored,
                manifest_closed=reading.last.closed,
                tasks_in_broker=reading.tasks_last,
                results_in_broker=reading.results_last,
                rows_landed=landed.rows if landed else 0,
                distinct_indices=landed.indices if landed else 0,
            ),
        )

    async def jobs(self, request: JobsRequest) -> list[JobStatus]:
        """Jobs, newest first; those that have not ended are read from all sources."""
        rows = await self._store.read(_list, request.limit, request.state)
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(row: JobRow) -> JobStatus:
            if row.state in ENDED:
                return _status(row, row.count or 0, 0, 0)
            async with slots:
                return await self._report(await self._read(row.job, count=False))

        return list(await asyncio.gather(*map(one, rows)))

    # --- reading -----------------------------------------------------------------------------------
    async def _settled(self, job: str, *, count: bool) -> Reading:
        """Read until the account balances or the difference stands."""
        for _ in range(READINGS - 1):
            reading = await self._read(job, count=count)
            if reading.balanced:
                return reading
            await asyncio.sleep(PAUSE_S)
        return await self._read(job, count=count)

    async def _read(self, job: str, *, count: bool) -> Reading:
        s = self._sources
        first = await s.intake(job)
        tasks_first = sum((await s.tasks(job)).values())
        results_first = await s.results(job)
        row, landed = await self._store.read(_account, job, count)
        results_last = await s.results(job)
        tasks = await s.tasks(job)
        last = await s.intake(job)
        tasks_last = sum(tasks.values())
        if row is None and first is None and last is None and not tasks_last:
            msg = f"no job {job!r}"
            raise NotFound(msg, code="unknown_job")
        row = row or JobRow(job=job)
        # Results that somebody published by hand have no producer whose word could be taken.
        nobody = Intake(row.landed, "")
        first, last = first or last or nobody, last or first or nobody
        excess = (landed.indices if landed else row.landed) + tasks_last > last.stored
        leased = await s.leased(list(tasks)) if excess and tasks else 0
        return Reading(row, landed, first, last, tasks_first, tasks_last, results_first, results_last, leased)

    async def _row(self, job: str) -> JobRow | None:
        return (await self._store.read(_account, job, False))[0]  # noqa: FBT003

    async def _report(self, reading: Reading) -> JobStatus:
        submitted, rows = reading.last.stored, reading.rows
        open_items = max(0, submitted - rows)
        if not reading.balanced:
            queued, landing = reading.tasks_last, reading.results_last
        elif reading.row.state == "cancelling":
            landing = min(reading.results_last, open_items)
            queued = open_items - landing
        else:
            queued = min(reading.tasks_last, open_items)
            landing = open_items - queued
        status = _status(reading.row, submitted, queued, landing)
        if not reading.tasks_last or status.state in ENDED:
            return status
        running = await self._sources.running(status.job)
        return _with_running(status, min(running.items, queued), running.oldest_us)


def _status(row: JobRow, submitted: int, queued: int, landing: int) -> JobStatus:
    return JobStatus(
        job=row.job,
        state=row.state,
        submitted=submitted,
        ok=row.ok,
        failed=row.failed,
        dead=row.dead,
        cancelled=row.cancelled,
        queued=queued,
        landing=landing,
        duplicates=row.duplicates,
        tokens_in=row.tokens_in,
        tokens_out=row.tokens_out,
        function=row.function,
        model=row.model,
        lane=Lane(row.lane),
        opened_us=row.opened_us,
        ended_us=row.ended_us,
    )


def _with_running(status: JobStatus, running: int, oldest_us: int | None) -> JobStatus:
    return replace(status, running=running, oldest_running_us=oldest_us if running else None)


# --- SQL ------------------------------------------------------------------------------------------
def _account(connection: Connection, job: str, count: bool) -> tuple[JobRow | None, Landed | None]:  # noqa: FBT001
    """The job's row and, if asked, its outcomes counted, both of one snapshot."""
    row = connection.execute(f"{_SELECT} WHERE job = ?", [job]).fetchone()
    return JobRow(*row) if row else None, count_landed(connection, job) if count else None


def _list(connection: Connection, limit: int, state: str | None) -> list[JobRow]:
    rows = connection.execute(
        f"{_SELECT} WHERE $state IS NULL OR state = $state ORDER BY opened_at DESC, job DESC LIMIT $limit",
        {"state": state, "limit": limit},
    ).fetchall()
    return [JobRow(*row) for row in rows]
