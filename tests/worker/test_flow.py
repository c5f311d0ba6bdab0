"""What is pulled when: lanes, refill, probes, cancellation, reports, a full stream of results."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headrace.contracts import codec
from headrace.contracts.messages import JobCancelled
from headrace.contracts.names import Lane
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import Work
from headrace.inference_worker.engines.registry import create_engine
from headrace.inference_worker.intake import Aborted
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import call, last_message, purge, stream_info
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings, WorkerSettings
from tests.worker.harness import (
    lease,
    left,
    put,
    results,
    running,
    stored,
    task,
    tokens,
    until,
    until_empty,
    until_stored,
    with_worker,
)

pytestmark = pytest.mark.anyio


async def cancel(mesh: Mesh, job: str) -> int:
    """What completion does: the event, then the purge."""
    event = codec.JOB_EVENT.encode(JobCancelled(job=job, count=0))
    await publish(mesh, mesh.topology.jobs, mesh.subjects.job_event(job, "cancelled"), event)
    return await purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job(job))


async def test_a_late_urgent_job_passes_a_bulk_backlog(mesh: Mesh, settings: Settings) -> None:
    await asyncio.sleep(0)
    async with running(with_worker(settings, slots=8, engine_options={"delay_ms": "20"})):
        await put(mesh, [task(i, job="bulk") for i in range(1_000)], lane=Lane.BULK)
        await until_stored(mesh, 100)
        # Another lane and another shape, while the worker is as busy as it can be.
        await put(mesh, [task(i, job="urgent", max_tokens=200) for i in range(100)], lane=Lane.URGENT)
        submitted = time.monotonic()

        async def urgent_done() -> bool:
            return await left(mesh, "urgent") == 0

        await until(urgent_done)
        took = time.monotonic() - submitted
        order = [r.job for r in await results(mesh)]
        await purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("bulk"))
    first = order.index("urgent")
    last = len(order) - 1 - order[::-1].index("urgent")
    assert order[first:last].count("bulk") < 40, "16 : 1"
    assert took < 2.0, "100 items, 8 at once, 20 ms each, are 0.25 s"


async def test_refill_is_continuous_and_keeps_the_batch_full(mesh: Mesh, settings: Settings) -> None:
    # Against the same items preloaded: mean batch in steps of the engine, which know no wall clock.
    # Half as long as on the machine that sim models: a step of 5 ms is still twice the way to the broker and
    # back.
    n, options = 256, {"time_scale": "0.5", "output_median": "32", "capacity_tokens": "200000"}
    tasks = [task(i, prompt=tokens(20 + i % 30), max_tokens=64) for i in range(n)]
    async with running(with_worker(settings, engine="sim", slots=32, engine_options=options)) as worker:
        await put(mesh, tasks)
        await until_stored(mesh, n, within_s=60)
        fed = worker.host.engine.stats()["steps"]
    engine = create_engine("sim", EngineOptions(slots=32, extra={**options, "time_scale": "0"}))
    await engine.start()
    works = [engine.prepare(_work(t)) for t in tasks]
    await asyncio.gather(*(engine.run(w) for w in works))
    preloaded = engine.stats()["steps"]
    await engine.stop()
    assert preloaded / fed > 0.95, (preloaded, fed)


async def test_no_more_is_leased_than_may_start(mesh: Mesh, settings: Settings) -> None:
    async with running(with_worker(settings, slots=8, engine_options={"delay_ms": "30"})) as worker:
        await put(mesh, [task(i) for i in range(200)])
        while await left(mesh) > 20:
            assert worker.runner is not None
            assert len(worker.runner.running) <= 8
            assert len(worker.leases) - worker.runner.finisher.unsettled <= 8 + len(worker.runner.waiting)
            assert len(worker.runner.waiting) <= 1
            await asyncio.sleep(0.01)
        await until_empty(mesh)


async def test_cancelling_aborts_what_runs_within_two_seconds_and_keeps_what_is_finished(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(
        with_worker(settings, slots=8, ack_wait_s=1.0, engine_options={"delay_ms": "30000"})
    ) as worker:
        await put(mesh, [task(i, job="gone") for i in range(25)])
        runner = worker.runner
        assert runner is not None

        async def full() -> bool:
            return len(runner.running) == 8

        await until(full)
        purged = await cancel(mesh, "gone")
        started = time.monotonic()
        assert purged == 25

        async def aborted() -> bool:
            return not runner.running

        await until(aborted, within_s=2.0)
        assert time.monotonic() - started < 2.0
        assert len(worker.leases) == 0
        # The slots are free for others, and nothing of the job comes back when its leases would have lapsed.
        await asyncio.sleep(1.2)
        assert not runner.running
        assert await stored(mesh) == 0
        assert runner.waiting.items() == []


async def test_cancelling_one_job_leaves_the_others(mesh: Mesh, settings: Settings) -> None:
    async with running(with_worker(settings, slots=8, engine_options={"delay_ms": "1500"})):
        await put(mesh, [task(i, job=job) for i in range(3) for job in ("gone", "kept")])
        await asyncio.sleep(0.2)
        await cancel(mesh, "gone")
        await until_stored(mesh, 3)
        await until_empty(mesh)
    assert sorted((r.job, r.index, r.attempt) for r in await results(mesh)) == [
        ("kept", i, 1) for i in range(3)
    ]


async def test_a_worker_reports_every_second_what_it_runs(mesh: Mesh, settings: Settings) -> None:
    subject = f"$KV.{mesh.topology.workers_bucket}.w7"
    async with running(with_worker(settings, name="w7", slots=4, engine_options={"delay_ms": "3000"})):
        await put(mesh, [task(i, job="a") for i in range(3)])

        async def seen() -> Any:
            stored = await last_message(mesh, f"KV_{mesh.topology.workers_bucket}", subject)
            report = codec.WORKER_REPORT.decode(stored.data) if stored else None
            return report if report and report.running else None

        report = await until(seen, within_s=3.0)
        seen_us = time.time_ns() // 1_000
    assert report.running == {"a": 3}
    assert 0 <= seen_us - report.oldest["a"] < 3_000_000
    assert (report.worker, report.function, report.state, report.slots) == ("w7", "generate", "running", 4)
    assert report.in_flight == 3
    assert report.tokens_in_flight == 3 * 12
    last = await last_message(mesh, f"KV_{mesh.topology.workers_bucket}", subject)
    assert last is not None
    assert codec.WORKER_REPORT.decode(last.data).state == "draining"


async def test_a_full_stream_of_results_stops_the_pulling_and_loses_nothing(
    mesh: Mesh, settings: Settings
) -> None:
    info = await stream_info(mesh, mesh.topology.results)
    narrow = {**info["config"], "max_msgs": 500}
    await call(mesh, f"STREAM.UPDATE.{mesh.topology.results}", narrow)
    async with running(with_worker(settings, slots=16)) as worker:
        await put(mesh, [task(i) for i in range(5_000)])
        await until_stored(mesh, 400)
        await asyncio.sleep(1.0)
        assert worker.runner is not None
        held = worker.runner.finisher.unsettled
        assert 0 < held < 1_100, "what cannot be stored is bounded"
        assert await left(mesh) >= 4_500
        await call(mesh, f"STREAM.UPDATE.{mesh.topology.results}", {**narrow, "max_msgs": -1})
        await until_empty(mesh, within_s=30)
    found = await results(mesh)
    assert sorted({r.index for r in found}) == list(range(5_000))


def _work(t: Any) -> Any:
    return Work(id=str(t.index), prompt=t.prompt, params=t.params, max_tokens=t.params.max_tokens)


def test_settings_of_the_worker_name_the_marks() -> None:
    assert (WorkerSettings().high_water, WorkerSettings().low_water) == (1.0, 0.85)


async def test_what_a_dead_worker_held_is_taken_over_at_once(mesh: Mesh, settings: Settings) -> None:
    """The broker's count of a backlog leaves out what lapsed: the first that comes tells that there is more."""
    n = 200
    settings = with_worker(settings, ack_wait_s=1.0, slots=256, engine_options={"delay_ms": "6000"})
    async with running(settings):
        pass  # registers the function, so that its consumers are there
    await put(mesh, [task(i) for i in range(n)])
    assert len(await lease(mesh, n)) == n
    async with running(settings) as worker:
        runner = worker.runner
        assert runner is not None

        async def some() -> bool:
            return bool(runner.running)

        async def all_of_them() -> bool:
            return len(runner.running) == n

        await until(some)
        first = time.monotonic()
        await until(all_of_them, within_s=5.0)
        print(f"{n} lapsed tasks run {time.monotonic() - first:.2f} s after the first")
        await purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
        for item in list(runner.running):
            runner.abort(item, Aborted.JOB_CANCELLED)
