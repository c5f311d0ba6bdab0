"""Cancellation: every stored item gets exactly one outcome, whatever races and whatever crashes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from headrace.contracts import codec
from headrace.contracts.errors import NotFound
from headrace.contracts.messages import JobCancelled
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import JetStreamError
from headrace.mesh.settings import Settings
from tests.completion.world import (
    FUNCTION,
    SHAPE,
    Producer,
    assert_cancelled,
    cancel,
    error_of,
    register,
    result,
    serving,
    sql,
    until,
)

pytestmark = pytest.mark.anyio


async def test_midway(mesh: Mesh, settings: Settings) -> None:
    """S4: finished rows are kept, the rest is cancelled, and together they are all."""
    await register(mesh)
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(25)
        await job.work(range(7))
        reply = await cancel(mesh)
        assert reply["changed"] is True
        await assert_cancelled(job, count=25)
        status = await job.status()
        assert status.ok == 7
        again = await cancel(mesh)
        assert (again["changed"], again["state"]) == (False, "cancelled")
        assert "had ended before" in again["message"]
        # Workers that finished in the meantime come too late.
        await job.results(result("j", i) for i in range(5, 12))
        await until(job.results_empty)
        status = await job.status()
        assert (status.ok, status.cancelled, status.duplicates) == (7, 18, 7)
        event = await job.completed()
        assert event is not None
        assert (event.state, event.ok, event.cancelled) == ("cancelled", 7, 18)


async def test_the_producers_next_batch_is_refused(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open()
        await job.submit(10)
        await cancel(mesh)
        error = await error_of(job.submit(10))
        assert isinstance(error, JetStreamError)
        assert error.err_code in (jsapi.WRONG_LAST_SEQUENCE, jsapi.WRONG_LAST_SUBJECT_SEQUENCE)
        await assert_cancelled(job, count=10, ok=0)
        # After the end too: what the progress record says stays.
        assert isinstance(await error_of(job.submit(10)), JetStreamError)


async def test_before_the_first_batch(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open()
        await cancel(mesh)
        await assert_cancelled(job, count=0)
        assert isinstance(await error_of(job.submit(10)), JetStreamError)


async def test_a_producer_that_stores_while_it_is_cancelled(mesh: Mesh, settings: Settings) -> None:
    """Whatever batch was stored before the intake closed is counted; none is stored after."""
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open()

        async def produce() -> int:
            while True:
                error = await _or_none(job.submit(50))
                if error is not None:
                    return job.stored

        producing = asyncio.ensure_future(produce())
        await until(lambda: job.stored > 500)
        await cancel(mesh)
        stored = await producing
        await assert_cancelled(job, count=stored, ok=0)


async def _or_none(request: Any) -> JetStreamError | None:
    try:
        await request
    except JetStreamError as e:
        return e
    return None


async def test_a_completed_job_says_so_and_stays(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(3)
        await job.work(range(3))
        await job.ended()
        reply = await cancel(mesh)
        assert (reply["changed"], reply["state"], reply["ok"], reply["cancelled"]) == (
            False,
            "completed",
            3,
            0,
        )
        assert (
            await jsapi.last_message(mesh, mesh.topology.jobs, mesh.subjects.job_event("j", "cancelled"))
            is None
        )


async def test_an_unknown_job_and_a_name_that_is_none(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        assert isinstance(await error_of(cancel(mesh, "none")), NotFound)
        assert (await error_of(cancel(mesh, "a.b"))).code == "invalid"
        assert await sql(mesh, "SELECT count(*) FROM jobs") == [[0]]


async def test_many_requests_at_once(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(100)
        await asyncio.gather(*(cancel(mesh, reason=f"r{i}") for i in range(10)))
        await assert_cancelled(job, count=100, ok=0)
        count = await jsapi.count_subject(mesh, mesh.topology.jobs, mesh.subjects.job_event("j", "cancelled"))
        assert count == 1


async def test_against_results_that_stream_in(mesh: Mesh, settings: Settings) -> None:
    rng = random.Random(3)
    async with serving(settings):
        for round_ in range(5):
            job = Producer(mesh, f"j{round_}")
            await job.whole(300)

            async def work(job: Producer = job) -> None:
                for i in range(0, 300, 20):
                    await job.results(result(job.job, i + k) for k in range(20))
                    await asyncio.sleep(0)

            working = asyncio.ensure_future(work())
            await asyncio.sleep(rng.uniform(0, 0.05))
            await cancel(mesh, job.job)
            status = await job.ended()
            await working
            await until(job.results_empty)
            status = await job.status()
            # The job may have been complete before the cancellation was taken up.
            assert status.ok + status.cancelled == 300
            rows = await sql(
                mesh, f"SELECT count(*), count(DISTINCT \"index\") FROM outcomes WHERE job = '{job.job}'"
            )
            assert rows == [[300, 300]]
            assert (await job.audit()).balanced
            assert await job.count_completed_events() == 1


async def test_an_event_without_a_request(mesh: Mesh, settings: Settings) -> None:
    """Somebody else closed the intake and stored the event: completion does the rest."""
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open()
        await job.submit(8, closed="cancelled")
        await job.event(JobCancelled(job="j", count=8, reason="by hand"), "cancelled")
        await assert_cancelled(job, count=8, ok=0)


async def test_a_large_job_is_cancelled_in_parts(mesh: Mesh, settings: Settings, monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace.completion.job_rows.FILL_ROWS", 100)
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(1_050)
        await job.work(range(95, 105))
        await until(job.results_empty)
        await cancel(mesh)
        await assert_cancelled(job, count=1_050, ok=10)


async def test_tasks_are_gone_for_workers_at_once(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    async with serving(settings):
        job, other = Producer(mesh, "j"), Producer(mesh, "other")
        await job.whole(50)
        await other.whole(5)
        await cancel(mesh)
        await job.ended()
        subject = mesh.subjects.task(FUNCTION, "normal", SHAPE, "other")
        assert await jsapi.count_subject(mesh, mesh.topology.tasks, subject) == 5
        assert (await other.status()).queued == 5
        assert codec.MANIFEST.name == "manifest/1"
