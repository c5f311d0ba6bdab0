"""Completion killed at every step, and a disk that is full: every outcome once, every job announced once."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from pathlib import Path

import pytest
import uvloop

from headrace.completion.service import database_path
from headrace.contracts import codec
from headrace.contracts.messages import Choice
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.completion.world import (
    Process,
    Producer,
    process,
    register,
    result,
    serving,
    sql,
    until,
    with_options,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> object:
    """Completion is a process of its own here, and runs on uvloop as in production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


async def assert_each_once(job: Producer, count: int) -> None:
    status = await job.ended(40)
    await until(job.results_empty, 40)
    assert (status.state, status.ok, status.submitted) == ("completed", count, count)
    found = await sql(job.mesh, 'SELECT count(*), count(DISTINCT "index"), max("index") FROM outcomes')
    assert found == [[count, count, count - 1]]
    assert await job.count_completed_events() == 1
    audit = await job.audit()
    assert audit.balanced, audit

    async def manifest_gone() -> bool:
        return (
            await jsapi.last_message(job.mesh, job.mesh.topology.tasks, job.mesh.subjects.manifest(job.job))
            is None
        )

    await until(manifest_gone)


LANDING = ("landing-before-commit", "landing-committed", "landing-acked")


@pytest.mark.parametrize(
    "point",
    [
        *(f"{p}:{n}" for p in LANDING for n in (1, 4)),
        "job-announcing",
        "job-announced",
        "job-events-committed",
    ],
)
async def test_killed_at_each_point(mesh: Mesh, settings: Settings, tmp_path: Path, point: str) -> None:
    """A13: between commit and ack, in mid-transaction, and around the last event."""
    few = with_options(settings, batch_rows=100)
    job = Producer(mesh, "j")
    await job.whole(1_000)
    await job.work(range(1_000), remove=False)
    await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
    async with process(few, tmp_path, crash_at=point) as first:
        assert await first.wait() == -signal.SIGKILL
    async with process(few, tmp_path):
        await assert_each_once(job, 1_000)


async def test_killed_at_random_moments(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    job = Producer(mesh, "j")
    await job.whole(6_000)
    await job.work(range(6_000), remove=False)
    await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
    running = Process(with_options(settings, batch_rows=50), tmp_path)
    landed = 0
    for _ in range(4):
        await running.start()
        await asyncio.sleep(rng.uniform(0.0, 0.15))
        running.kill()
    async with process(settings, tmp_path):
        landed = (await job.ended(40)).ok
        assert landed == 6_000
        await assert_each_once(job, 6_000)


async def test_rows_stay_readable_after_a_kill(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    job = Producer(mesh, "j")
    await job.whole(500)
    await job.work(range(200))
    async with process(settings, tmp_path) as first:
        await until(job.results_empty)
        first.kill()
    async with process(settings, tmp_path):
        assert await sql(mesh, "SELECT count(*) FROM outcomes WHERE text LIKE 'answer%'") == [[200]]
        status = await job.status()
        assert (status.ok, status.queued) == (200, 300)


async def test_the_broker_killed_while_landing(
    nats_server: NatsServer, mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    job = Producer(mesh, "j")
    await job.whole(2_000)
    await job.work(range(2_000), remove=False)
    await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))

    async def some_landed() -> bool:
        left = await jsapi.count_subject(mesh, mesh.topology.results, mesh.subjects.results_of_job("j"))
        return left < 2_000

    async with process(with_options(settings, batch_rows=100), tmp_path):
        await until(some_landed)
        nats_server.kill()
        await until(lambda: not mesh.connected)
        nats_server.restart()
        await until(lambda: mesh.connected)
        await assert_each_once(job, 2_000)


async def test_a_full_disk_acks_nothing_and_lands_all_once_there_is_space(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """A4, by a limit on the size of files: the same refused write, without a disk to fill."""
    job = Producer(mesh, "j")
    await job.whole(100)
    async with process(with_options(settings, batch_rows=10), tmp_path) as running:
        await job.work(range(50))
        await until(job.results_empty)
        size = database_path(settings).stat().st_size
        wal = Path(f"{database_path(settings)}.wal")
        size = max(size, wal.stat().st_size if wal.exists() else 0)
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (size + 50_000, resource.RLIM_INFINITY))
        await job.results(
            result("j", i, choices=[Choice(text=os.urandom(5_000).hex())]) for i in range(50, 100)
        )
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
        await until(lambda: running.log.read_text().count("not written yet") >= 3)
        info = await jsapi.consumer_info(mesh, mesh.topology.results, "completion")
        stored = await jsapi.count_subject(mesh, mesh.topology.results, mesh.subjects.results_of_job("j"))
        status = await job.status()
        # What is acked is landed: nothing of the rest was acked.
        assert status.ok + stored == 100
        assert stored > 0
        assert info["num_ack_pending"] > 0
        assert (status.state, status.landing) == ("sealed", stored)
        assert (await job.audit()).balanced
        resource.prlimit(
            running.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        await assert_each_once(job, 100)
        assert running.process.poll() is None


async def test_completed_is_announced_once_over_restarts(mesh: Mesh, settings: Settings) -> None:
    job = Producer(mesh, "j")
    await job.whole(5)
    await job.work(range(5))
    for _ in range(3):
        async with serving(settings):
            await assert_each_once(job, 5)


async def test_ended_but_unannounced_jobs_are_announced_at_the_start(mesh: Mesh, settings: Settings) -> None:
    job = Producer(mesh, "j")
    await job.whole(5)
    await job.work(range(5))
    async with serving(settings) as service:
        await assert_each_once(job, 5)
        # As a crash between commit and publish leaves it, for events that the consumer has acked.
        await service._store.write(lambda c: c.execute("UPDATE jobs SET announced = false"))
    await jsapi.purge(mesh, mesh.topology.jobs, filter_=mesh.subjects.job_event("j", "completed"))
    async with serving(settings):
        await until(job.completed)
        await assert_each_once(job, 5)


async def test_results_of_half_a_megabyte_land(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    """DuckDB may not checkpoint so wide a table within the default limit: it is raised then, and everything lands."""
    job = Producer(mesh, "j")
    await job.whole(300)
    await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
    async with process(settings, tmp_path) as running:
        for start in range(0, 300, 10):
            await job.results(
                result("j", i, choices=[Choice(text=os.urandom(250_000).hex())])
                for i in range(start, start + 10)
            )
        await assert_each_once(job, 300)
        running.kill()
        await running.start()
        await assert_each_once(job, 300)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_memory_is_flat_over_100_000_rows(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    """A7 for completion: everything landed, streams empty, and its memory does not grow with the count."""
    await register(mesh)
    text = "the quick brown fox jumps over the lazy dog " * 8
    job = Producer(mesh, "j")
    await job.open()
    # A small buffer is full before half of the rows are there: what grows after it would be ours.
    settings = with_options(settings, memory_limit="48MB")
    async with process(settings, tmp_path) as running:
        peaks: list[float] = []
        for start in range(0, 100_000, 10_000):
            await job.results(
                result("j", i, custom_id=f"request-{i}", choices=[Choice(text=f"{text}{i}")])
                for i in range(start, start + 10_000)
            )
            await until(job.results_empty, 60)
            peaks.append(running.peak_rss_mb())
        print("peak RSS in MB after each 10,000 rows:", [round(p) for p in peaks])
        status = await job.status()
        assert status.ok == 100_000
        assert peaks[-1] < 300
        # A leak of half a kilobyte a row would be 25 MB here.
        assert peaks[-1] - peaks[4] < 25
        results = await jsapi.stream_info(mesh, mesh.topology.results)
        assert results["state"]["messages"] == 0
        assert codec.RESULT.name == "result/1"
