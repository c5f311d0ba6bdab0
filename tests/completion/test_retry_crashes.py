"""A retry with completion killed at every step of it: it ends the same, and nothing runs or is told twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.completion.again import assert_whole, ended_job, outcome, redrive, retry, stored_tasks
from tests.completion.world import Process, Producer, cancel, error_of, process, register, sql, until

pytestmark = pytest.mark.anyio

FAILED = 700
"""Several batches: 128, then twice as many each."""


@pytest.fixture
def anyio_backend() -> object:
    """Completion is a process of its own here, and runs on uvloop as in production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture(autouse=True)
async def function(mesh: Mesh) -> None:
    await register(mesh)


async def ask_of_dying(running: Process, request: Coroutine[Any, Any, Any]) -> None:
    """Ask a service that is killed by it, or soon after: there may be an answer or none."""
    asking = asyncio.ensure_future(request)
    assert await running.wait() == -9
    asking.cancel()
    await asyncio.wait((asking,))
    if not asking.cancelled():
        asking.exception()


async def all_stored(job: Producer) -> bool:
    return await sql(job.mesh, "SELECT stored FROM retries") == [[True]]


async def run_all(job: Producer, count: int = FAILED) -> None:
    """A worker's part; what is stored must be each item once."""
    await until(lambda: all_stored(job), 30)
    tasks = [t for _, _, t, _ in await stored_tasks(job)]
    assert [t.index for t in tasks] == list(range(5, 5 + count))
    assert {t.generation for t in tasks} == {2}
    await jsapi.purge(job.mesh, job.mesh.topology.tasks, filter_=job.mesh.subjects.tasks_of_job(job.job))
    await job.results(outcome(t) for t in tasks)


STORING = (
    "retry-noted", "retry-announced", "retry-record-stored", "retry-batch-stored:1", "retry-batch-stored:2",
    "retry-batch-stored:3", "retry-all-stored", "retry-ended",
)  # fmt: skip


@pytest.mark.parametrize("point", STORING)
async def test_killed_while_it_stores(mesh: Mesh, settings: Settings, tmp_path: Path, point: str) -> None:
    async with process(settings, tmp_path, crash_at=point) as first:
        job = await ended_job(mesh, 5, failed=FAILED)
        await ask_of_dying(first, retry(mesh, generation=2))
    async with process(settings, tmp_path):
        # The start takes it up. Asking again, as who got no answer does, is the same retry.
        reply = await retry(mesh, generation=2)
        assert (reply.generation, reply.resubmitted) == (2, FAILED)
        await run_all(job)
        await assert_whole(job, 5 + FAILED, generation=2, ok=5 + FAILED, duplicates=0)


async def test_killed_before_the_commit_it_never_was(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    async with process(settings, tmp_path, crash_at="retry-before-commit") as first:
        job = await ended_job(mesh, 5, failed=3)
        await ask_of_dying(first, retry(mesh, generation=2))
    async with process(settings, tmp_path):
        assert (await job.status()).generation == 1
        await assert_whole(job, 8, generation=1, ok=5, failed=3)
        assert (await retry(mesh, generation=2)).resubmitted == 3
        await run_all(job, 3)
        await assert_whole(job, 8, generation=2, ok=8)


@pytest.mark.parametrize(
    "point",
    ["landing-before-commit", "landing-committed", "landing-acked", "job-announcing", "job-announced",
     "job-events-committed"],
)  # fmt: skip
async def test_killed_while_it_lands(mesh: Mesh, settings: Settings, tmp_path: Path, point: str) -> None:
    async with process(settings, tmp_path):
        job = await ended_job(mesh, 5, failed=40)
        await retry(mesh)
        await until(lambda: all_stored(job))
    async with process(settings, tmp_path, crash_at=point) as second:
        await run_all(job, 40)
        assert await second.wait() == -9
    async with process(settings, tmp_path):
        await assert_whole(job, 45, generation=2, ok=45)


@pytest.mark.parametrize(
    ("point", "after_batches"),
    [("cancel-noted", 0), ("cancel-noted", 2), ("cancel-intake-closed", 0), ("cancel-intake-closed", 1),
     ("cancel-announced", 1), ("cancel-purged", 1), ("cancel-filling", 0), ("cancel-committed", 1)],
)  # fmt: skip
async def test_killed_while_it_is_cancelled(
    mesh: Mesh, settings: Settings, tmp_path: Path, point: str, after_batches: int
) -> None:
    """Killed in the middle of its storing, then in the middle of its cancellation."""
    stored = f"retry-batch-stored:{after_batches}" if after_batches else "retry-noted"
    async with process(settings, tmp_path, crash_at=stored) as first:
        job = await ended_job(mesh, 5, failed=FAILED)
        await ask_of_dying(first, retry(mesh, generation=2))
    async with process(settings, tmp_path, crash_at=point) as second:
        await ask_of_dying(second, cancel(mesh))
    async with process(settings, tmp_path):

        async def ended() -> bool:
            event = await job.completed()
            return event is not None and event.generation == 2

        await until(ended, 30)
        await assert_whole(job, 5 + FAILED, generation=2, ok=5, cancelled=FAILED)


async def test_killed_at_random_moments(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    count = 3_000
    async with process(settings, tmp_path):
        job = await ended_job(mesh, 5, failed=count)
        await retry(mesh)
    running = Process(settings, tmp_path)
    for _ in range(4):
        await running.start()
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        running.kill()
    async with process(settings, tmp_path):
        await run_all(job, count)
        await assert_whole(job, 5 + count, generation=2, ok=5 + count)


@pytest.mark.parametrize("point", ["letter-published", "letter-noted"])
async def test_a_redrive_killed_on_its_way_is_one(
    mesh: Mesh, settings: Settings, tmp_path: Path, point: str
) -> None:
    """Asked again at once, the broker knows the letter's message: it is stored once."""
    from tests.completion.test_dead import dead_task_letter

    async with process(settings, tmp_path, crash_at=point) as first:
        await dead_task_letter(mesh, b"no task")
        await until(lambda: _letters(mesh))
        await ask_of_dying(first, redrive(mesh, id="1"))
    async with process(settings, tmp_path):
        if point == "letter-published":
            assert (await redrive(mesh, id="1")).redriven == 1
        else:
            assert (await error_of(redrive(mesh, id="1"))).code == "already_redriven"
        subject = mesh.subjects.tasks_of_job("j")
        assert await jsapi.count_subject(mesh, mesh.topology.tasks, subject) == 1


async def _letters(mesh: Mesh) -> bool:
    return await sql(mesh, "SELECT count(*) FROM dead") == [[1]]
