"""Workers that are killed, stopped, doubled and cut off (A1, A8, A9, A18, S8), in their own processes where
it matters.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter

import pytest

from headrace.contracts.errors import Conflict
from headrace.contracts.messages import TextPrompt
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.worker.conftest import StartWorker
from tests.worker.harness import (
    left,
    one_loop,
    put,
    results,
    running,
    stored,
    task,
    until,
    until_empty,
    until_stored,
    with_worker,
)

pytestmark = pytest.mark.anyio


@one_loop
async def test_a1_three_kills_at_thirty_percent_lose_nothing(mesh: Mesh, start_worker: StartWorker) -> None:
    n = 1_000
    worker = start_worker(ack_wait_s=1.0, engine="echo", slots=64, engine_options={"delay_ms": "40"})
    await put(mesh, [task(i) for i in range(n)])
    for kill in range(1, 4):
        await until_stored(mesh, n * 3 * kill // 10)
        worker.kill()
        assert await left(mesh) + await stored(mesh) >= n, "at no moment is an item in neither place"
        worker.start()
    await until_empty(mesh, within_s=60)
    found = await results(mesh)
    assert {r.index for r in found} == set(range(n))
    assert all(r.status == "ok" for r in found)
    again = [r for r in found if r.attempt > 1]
    assert again, "what was leased to a killed worker was delivered again"
    # A repeat is possible only for a result that was stored and not yet acked when the kill came.
    assert len(found) - n <= 3 * 64 * 2


@one_loop
@pytest.mark.parametrize("point", ["item-finished", "result-published", "task-acked"])
async def test_a_worker_that_dies_between_two_steps_of_an_item_loses_none(
    point: str, mesh: Mesh, start_worker: StartWorker
) -> None:
    worker = start_worker(ack_wait_s=1.0, slots=50)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    await put(mesh, [task(i) for i in range(50)])
    worker.start(HEADRACE_CRASH_AT=point)
    assert worker.wait(10) == -signal.SIGKILL
    stored_then, left_then = await stored(mesh), await left(mesh)
    assert stored_then + left_then >= 50
    worker.start()
    await until_empty(mesh)
    found = await results(mesh)
    assert {r.index for r in found} == set(range(50))
    repeated = len(found) - 50
    if point.startswith("item-finished"):
        assert stored_then == 0
        assert repeated == 0, "a result that was never stored cannot be there twice"
    elif point == "task-acked":
        assert left_then < 50
        assert repeated <= stored_then - (50 - left_then), "what was acked is not run again"
    else:
        assert 0 < repeated <= stored_then, "stored and not acked: again, for landing to tell apart"


@one_loop
async def test_a8_a_task_three_times_longer_than_its_lease_finishes_in_one_try(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(with_worker(settings, ack_wait_s=1.0, engine_options={"delay_ms": "3000"})):
        await put(mesh, [task(0), task(1)])
        await until_stored(mesh, 2)
        await until_empty(mesh)
    found = await results(mesh)
    assert sorted((r.index, r.attempt, r.status) for r in found) == [(0, 1, "ok"), (1, 1, "ok")]


async def test_a8_a_lapsed_lease_gives_a_duplicate_that_names_its_attempt(
    mesh: Mesh, settings: Settings
) -> None:
    settings = with_worker(settings, ack_wait_s=1.0, engine_options={"delay_ms": "2500"})
    async with running(settings) as worker:
        await put(mesh, [task(0)])

        async def leased() -> bool:
            return len(worker.leases) == 1

        await until(leased)
        await worker.leases.stop()  # as if the thread were starved: nobody renews any more
        await until_stored(mesh, 2)
        await until_empty(mesh)
    found = await results(mesh)
    assert {r.index for r in found} == {0}
    assert sorted(r.attempt for r in found)[:2] == [1, 2]


@one_loop
async def test_a9_two_workers_halve_the_time_and_run_each_item_once(mesh: Mesh, settings: Settings) -> None:
    slow = with_worker(settings, slots=4, engine_options={"delay_ms": "100"})
    walls: list[float] = []
    for job, workers in (("one", 1), ("two", 2)):
        await asyncio.sleep(0)
        async with running(with_worker(slow, **_worker(slow, "w1"))) as first:
            second = running(with_worker(slow, **_worker(slow, "w2")))
            if workers == 2:
                await second.__aenter__()
            started, before = time.monotonic(), await stored(mesh)
            await put(mesh, [task(i, job=job) for i in range(80)])
            await until_stored(mesh, before + 80)
            walls.append(time.monotonic() - started)
            await until_empty(mesh)
            if workers == 2:
                await second.__aexit__(None, None, None)
            assert first.runner is not None
    found = await results(mesh)
    assert Counter((r.job, r.index) for r in found) == {(j, i): 1 for j in ("one", "two") for i in range(80)}
    share = Counter(r.worker for r in found if r.job == "two")
    assert 30 <= share["w1"] <= 50
    assert walls[1] < 0.65 * walls[0], walls


async def test_a9_an_idle_worker_gets_what_a_full_one_cannot_start(mesh: Mesh, settings: Settings) -> None:
    slow = with_worker(settings, name="full", slots=1, engine_options={"delay_ms": "4000"})
    async with running(slow):
        await put(mesh, [task(0, job="long")])
        await asyncio.sleep(0.2)
        # The full worker's probes of other shapes are open still, and the idle one's too: any may get these.
        async with running(with_worker(settings, name="idle", slots=4, engine_options={"delay_ms": "10"})):
            started = time.monotonic()
            await put(mesh, [task(i, job="short", max_tokens=100) for i in range(20)])

            async def all_short() -> bool:
                return await left(mesh, "short") == 0

            await until(all_short, within_s=3.5)
            assert time.monotonic() - started < 3.0
        await until_empty(mesh)
    found = await results(mesh)
    assert Counter(r.index for r in found if r.job == "short") == dict.fromkeys(range(20), 1)
    assert {r.worker for r in found if r.job == "short"} == {"idle"}


async def test_a18_a_task_after_a_broker_restart_is_taken_within_two_seconds(
    mesh: Mesh, nats_server: NatsServer, settings: Settings
) -> None:
    async with running(with_worker(settings)):
        await put(mesh, [task(0)])
        await until_stored(mesh, 1)
        nats_server.kill()
        await asyncio.sleep(0.5)
        nats_server.restart()

        async def back() -> bool:
            return mesh.connected

        await until(back)
        started = time.monotonic()
        await put(mesh, [task(1)])
        await until_stored(mesh, 2, within_s=5)
        assert time.monotonic() - started < 2.0


@one_loop
async def test_s8_sigterm_finishes_what_runs_and_leaves_the_rest_to_others(
    mesh: Mesh, start_worker: StartWorker
) -> None:
    worker = start_worker(slots=8, engine_options={"delay_ms": "500"}, grace_s=10.0)
    await put(mesh, [task(i) for i in range(100)])
    await until_stored(mesh, 8)
    started = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait(10) == 0
    assert time.monotonic() - started < 3.0
    done = await stored(mesh)
    assert 8 <= done <= 24, "nothing new was started"
    assert await left(mesh) == 100 - done, "what was finished is acked, the rest is in the queue"
    other = start_worker(slots=100)
    # Given back, and not left to lapse: the lease would be 5 s.
    await until_empty(mesh, within_s=3)
    assert Counter(r.index for r in await results(mesh)) == dict.fromkeys(range(100), 1)
    other.signal(signal.SIGTERM)
    assert other.wait(10) == 0


@one_loop
async def test_s8_what_does_not_finish_in_the_grace_is_handed_over(
    mesh: Mesh, start_worker: StartWorker
) -> None:
    worker = start_worker(slots=8, engine_options={"delay_ms": "60000"}, grace_s=0.5, ack_wait_s=5.0)
    await put(mesh, [task(i) for i in range(8)])
    await asyncio.sleep(0.5)
    worker.signal(signal.SIGTERM)
    assert worker.wait(5) == 0
    assert await stored(mesh) == 0
    start_worker(ack_wait_s=5.0)
    await until_empty(mesh, within_s=3)
    assert sorted((r.index, r.attempt) for r in await results(mesh)) == [(i, 2) for i in range(8)]


@one_loop
async def test_a_second_sigterm_ends_the_worker_at_once(mesh: Mesh, start_worker: StartWorker) -> None:
    worker = start_worker(slots=1, engine_options={"delay_ms": "60000"}, grace_s=60.0)
    await put(mesh, [task(0)])
    await asyncio.sleep(0.3)
    worker.signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    assert worker.process is not None
    assert worker.process.poll() is None
    worker.signal(signal.SIGTERM)
    assert worker.wait(2) == 1
    assert await left(mesh) == 1


async def test_an_engine_that_dies_is_restarted_and_its_items_run_again(
    mesh: Mesh, settings: Settings
) -> None:
    options = {"die_on": "poison", "delay_ms": "20"}
    tasks = [task(i, prompt=TextPrompt(text="fine")) for i in range(30)]
    tasks[7] = task(7, prompt=TextPrompt(text="poison"))
    async with running(with_worker(settings, slots=8, max_tries=2, engine_options=options)) as worker:
        await put(mesh, tasks)
        await until_empty(mesh)
        assert worker.host.deaths == 2
    found = {r.index: r for r in await results(mesh)}
    assert len(found) == 30
    poison = found.pop(7)
    assert poison.status == "dead"
    assert poison.error is not None
    assert "the engine died" in poison.error.message
    assert sum(r.status == "ok" for r in found.values()) >= 14, (
        "at most those beside it in both deaths die with it"
    )


async def test_a_function_of_another_model_is_refused_in_one_sentence(mesh: Mesh, settings: Settings) -> None:
    async with running(with_worker(settings, model="a")):
        pass
    async with running(with_worker(settings, model="a")):
        pass
    with pytest.raises(Conflict, match="model 'a' and this worker's engine has 'b'"):
        async with running(with_worker(settings, model="b")):
            pass
    with pytest.raises(Conflict, match="items of any length and this worker's engine only 100"):
        async with running(with_worker(settings, model="a", context=100)):
            pass


def _worker(settings: Settings, name: str) -> dict[str, object]:
    fields = {f: getattr(settings.worker, f) for f in settings.worker.__struct_fields__}
    return {**fields, "name": name}
