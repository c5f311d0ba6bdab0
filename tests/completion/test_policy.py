"""Jobs that end early by themselves: at their deadline, or when too many of their items fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.completion.job_rows import now_us
from headrace.completion.jobs import apply
from headrace.completion.landing import land
from headrace.completion.policy import LEAST_RAN, Due, due_jobs
from headrace.completion.retry_rows import begin
from headrace.completion.store import Store
from headrace.contracts.messages import ItemError, JobOpened, JobSealed, Task, TextPrompt
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.completion.world import (
    INPUT,
    Process,
    Producer,
    assert_cancelled,
    error_of,
    process,
    result,
    serving,
    sql,
    until,
)

pytestmark = pytest.mark.anyio
FOREVER = 2**60


def soon(seconds: float) -> int:
    return now_us() + int(seconds * 1e6)


# --- when a job is due --------------------------------------------------------------------------------
def opened(**policy: object) -> JobOpened:
    return JobOpened(job="j", function="f", input_fingerprint=INPUT, at_us=1, **policy)  # type: ignore[arg-type]


async def due(store: Store, at_us: int = 0) -> list[Due]:
    return (await store.read(due_jobs, at_us or now_us()))[0]


@pytest.mark.parametrize(
    ("ok", "failed", "limit", "ends"),
    [
        (LEAST_RAN - 2, 1, 0.0, False),  # too few to tell
        (LEAST_RAN - 1, 1, 0.0, True),
        (LEAST_RAN, 0, 0.0, False),
        (19, 1, 0.05, False),  # just as many as may
        (18, 2, 0.05, True),
        (71, 29, 0.29, False),  # 0.29 * 100 is less than 29 by rounding
        (0, LEAST_RAN, 1.0, False),
    ],
)
async def test_more_than_the_limit_and_enough_to_tell(
    store: Store, ok: int, failed: int, limit: float, ends: bool
) -> None:
    await store.write(apply, [opened(max_failed=limit)])
    statuses = ["ok"] * ok + ["failed"] * (failed - failed // 2) + ["dead"] * (failed // 2)
    await store.write(land, [result("j", i, status) for i, status in enumerate(statuses)])
    found = await due(store)
    assert [d.cause for d in found] == (["failures"] if ends else [])
    if ends:
        assert f"{failed} of {ok + failed} landed items failed" in found[0].reason


async def test_without_a_limit_any_number_may_fail(store: Store) -> None:
    await store.write(apply, [opened()])
    await store.write(land, [result("j", i, "failed") for i in range(100)])
    assert await due(store) == []


async def test_the_deadline_is_named_before_the_failures_that_it_made(store: Store) -> None:
    await store.write(apply, [opened(max_failed=0.1, deadline_us=1_764_547_200_000_000)])
    await store.write(land, [result("j", i, "failed") for i in range(30)])
    (found,) = await due(store)
    assert (found.cause, found.reason) == ("deadline", "the deadline passed: 2025-12-01T00:00:00Z")


async def test_an_ended_job_is_left_alone(store: Store) -> None:
    await store.write(apply, [opened(max_failed=0.0, deadline_us=1)])
    await store.write(land, [result("j", i, "failed") for i in range(30)])
    await store.write(apply, [JobSealed(job="j", count=30, input_fingerprint=INPUT)])
    assert await due(store) == []
    assert (await store.read(due_jobs, now_us()))[1] is None


async def test_a_retry_is_free_of_the_limit_and_of_a_deadline_that_passed(store: Store) -> None:
    passes = soon(60)
    await store.write(apply, [opened(max_failed=0.1, deadline_us=passes)])
    task = Task(job="j", index=0, function="f", prompt=TextPrompt(text="hi"))
    await store.write(land, [result("j", i, "failed", task=task) for i in range(30)])
    await store.write(apply, [JobSealed(job="j", count=30, input_fingerprint=INPUT)])
    await store.write(begin, "j", None, "", [0])
    assert await due(store) == []  # 29 of 29 failed before
    assert [d.cause for d in await due(store, passes)] == ["deadline"]  # it lies ahead of the retry
    await store.write(land, [result("j", 0, "failed", generation=2, task=task)])
    await store.write(lambda c: c.execute("UPDATE jobs SET deadline_at = make_timestamp(1)"))
    await store.write(begin, "j", None, "", [0])
    # An `opened` that is delivered again does not bring it back.
    await store.write(apply, [opened(max_failed=0.1, deadline_us=1)])
    assert await due(store, FOREVER) == []


# --- a running service --------------------------------------------------------------------------------
async def test_too_many_failures_end_the_job(mesh: Mesh, settings: Settings) -> None:
    """B9's neighbour: who set a limit does not pay for the other 960."""
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6, 9))
        await job.whole(1_000, max_failed=0.1)
        await job.work(range(33))
        await job.work(range(33, 40), "failed")
        await assert_cancelled(job, count=1_000, ok=None)
        status = await job.status()
        assert (status.state, status.cause, status.failed) == ("cancelled", "failures", 7)
        assert status.reason is not None
        assert "landed items failed (limit 10 %)" in status.reason
        event = await job.completed()
        assert event is not None
        assert (event.cause, event.reason, event.cancelled) == ("failures", status.reason, 960)
        found = await sql(
            mesh,
            "SELECT error_type, error_message, count(*) FROM outcomes WHERE status = 'cancelled' GROUP BY ALL",
        )
        assert found == [["stopped_early", status.reason, 960]]


async def test_a_job_within_its_limit_runs_to_its_end(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(40, max_failed=0.1)
        await job.work(range(4), "failed")
        await job.work(range(4, 40))
        status = await job.ended()
        assert (status.state, status.failed, status.cause, status.reason) == (
            "completed_with_errors",
            4,
            None,
            None,
        )


async def test_the_deadline_ends_the_job(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        at = soon(1.0)
        await job.whole(50, deadline_us=at)
        await job.work(range(5))
        assert (await until(lambda: _status_of(job))).deadline_us == at
        await assert_cancelled(job, count=50, ok=5)
        assert now_us() >= at
        status = await job.status()
        assert (status.cause, status.deadline_us) == ("deadline", at)
        assert status.ended_us is not None
        assert 0 <= status.ended_us - at < 10_000_000
        found = await sql(
            mesh, "SELECT error_type, count(*) FROM outcomes WHERE status = 'cancelled' GROUP BY ALL"
        )
        assert found == [["deadline", 45]]


async def _status_of(job: Producer):
    return (
        await job.status()
        if (await sql(job.mesh, "SELECT job FROM jobs WHERE deadline_at IS NOT NULL"))
        else None
    )


async def test_a_job_that_is_still_submitted_ends_too(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open(deadline_us=soon(0.5))
        await job.submit(10)
        await assert_cancelled(job, count=10, ok=0)
        assert isinstance(await error_of(job.submit(1)), jsapi.JetStreamError)


async def test_a_deadline_survives_restarts_and_acts_at_the_start_if_it_passed(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """Known to the row, known to an event that nobody has applied yet: both end when completion is back."""
    known, unheard = Producer(mesh, "known"), Producer(mesh, "unheard")
    at = soon(3.0)
    async with process(settings, tmp_path) as running:
        await known.whole(20, deadline_us=at)
        await known.work(range(5))
        await until(known.results_empty)
        running.kill()
        await unheard.whole(10, deadline_us=at)
        await until(lambda: now_us() >= at)
        await running.start()
        for job, count in ((known, 20), (unheard, 10)):
            status = await job.ended()
            assert (status.state, status.cause, status.submitted) == ("cancelled", "deadline", count)
            assert (await job.audit()).balanced
            assert await job.count_completed_events() == 1
    assert (await _rows(settings, tmp_path, mesh)) == 30


async def _rows(settings: Settings, folder: Path, mesh: Mesh) -> int:
    async with process(settings, folder):
        return int((await sql(mesh, "SELECT count(*) FROM outcomes"))[0][0])


@pytest.mark.parametrize("at", ["cancel-noted", "cancel-announced", "cancel-purged", "cancel-committed"])
async def test_killed_while_it_ends_a_job(mesh: Mesh, settings: Settings, tmp_path: Path, at: str) -> None:
    job = Producer(mesh, "j", shapes=(6,))
    running = Process(settings, tmp_path, crash_at=f"{at}:1")
    await running.start()
    await job.whole(40, deadline_us=soon(1.0), max_failed=0.5)
    await job.work(range(5))
    await running.wait()
    running.crash_at = ""
    await running.start()
    try:
        status = await job.ended()
        assert (status.state, status.cause) == ("cancelled", "deadline")
        await assert_cancelled(job, count=40, ok=5)
    finally:
        running.kill()


async def test_items_that_miss_the_deadline_while_it_ends_the_job_have_one_outcome_each(
    mesh: Mesh, settings: Settings
) -> None:
    """Workers fail what they may not start any more, at the moment at which completion ends the job."""
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6, 9))
        at = soon(1.0)
        await job.whole(400, deadline_us=at, max_failed=0.01)
        await job.work(range(10))
        await until(lambda: now_us() >= at - 50_000)
        late = ItemError(type="deadline", message="the deadline passed before the item could start")
        for first in range(10, 400, 30):
            await job.results(
                result("j", i, "failed", error=late, shape=job.shape_of(i)) for i in range(first, first + 30)
            )
        await until(job.results_empty)
        status = await job.ended()
        # Also where the last failure landed before the deadline was acted upon, and nothing was left to cancel.
        await assert_cancelled(job, count=400)
        assert status.cause == "deadline"
        assert await job.count_completed_events() == 1
        assert status.ok == 10
        audit = await job.audit()
        assert (audit.doubled, audit.sources.rows_landed) == ([], 400)
        found = await sql(mesh, "SELECT DISTINCT error_type FROM outcomes WHERE status <> 'ok'")
        assert found == [["deadline"]]


async def test_a_deadline_that_passes_while_the_broker_is_away(
    nats_server: NatsServer, mesh: Mesh, settings: Settings
) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        at = soon(2.0)
        await job.whole(20, deadline_us=at)
        await job.work(range(2))
        await until(job.results_empty)
        await until(lambda: _status_of(job))
        await asyncio.to_thread(nats_server.kill)
        await until(lambda: now_us() > at)
        await asyncio.to_thread(nats_server.restart)
        status = await job.ended(40)
        assert (status.state, status.cause, status.ok) == ("cancelled", "deadline", 2)
        assert (await job.audit()).balanced
