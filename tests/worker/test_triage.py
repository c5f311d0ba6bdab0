"""Crash triage: one poison item is convicted within two crashes, and every neighbour finishes (A2, S1, S2)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from headrace.contracts import codec
from headrace.contracts.messages import Result, TextPrompt
from headrace.contracts.names import Lane
from headrace.contracts.suspects import Cleared, Suspect
from headrace.inference_worker import engine_host
from headrace.inference_worker.engines.background import in_daemon
from headrace.inference_worker.engines.protocol import EngineDied, Output, Work
from headrace.inference_worker.service import WorkerService
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import call, last_message, stream_info
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Settler
from headrace.mesh.suspects import SuspectBook
from tests.worker.harness import (
    lease,
    left,
    one_loop,
    put,
    results,
    running,
    stored,
    task,
    until,
    until_empty,
    with_worker,
)
from tests.worker.test_items import Stub

pytestmark = pytest.mark.anyio

SIM = {"time_scale": "0.05", "output_median": "40", "poison": "POISON", "hang": "HANG"}


def prompts(n: int, bad: dict[int, str], **more: Any) -> list[Any]:
    return [
        task(i, prompt=TextPrompt(text=f"{bad.get(i, 'good')} {i}"), prompt_tokens=3, max_tokens=64, **more)
        for i in range(n)
    ]


def sim(settings: Settings, **worker: Any) -> Settings:
    options = {**SIM, **worker.pop("engine_options", {})}
    return with_worker(settings, **{"engine": "sim", "slots": 16, "engine_options": options, **worker})


async def records(mesh: Mesh) -> dict[str, Suspect | Cleared]:
    """The bucket as it stands."""
    bucket = mesh.topology.suspects_bucket
    info = await stream_info(mesh, f"KV_{bucket}", subjects_filter=f"$KV.{bucket}.>")
    found: dict[str, Suspect | Cleared] = {}
    for subject in info["state"]["subjects"]:
        stored = await last_message(mesh, f"KV_{bucket}", subject)
        assert stored is not None
        found[subject.rpartition(".")[2]] = codec.SUSPECT.decode(stored.data, stored.headers)
    return found


def by_index(found: list[Result]) -> dict[int, Result]:
    assert Counter(r.index for r in found) == dict.fromkeys({r.index for r in found}, 1), (
        "none has two outcomes"
    )
    return {r.index: r for r in found}


def show(found: dict[int, Result], *workers: WorkerService) -> None:
    print(
        "deaths", [w.host.deaths for w in workers], "states", Counter(r.status for r in found.values()),
        "attempts", Counter(r.attempt for r in found.values()),
    )  # fmt: skip


async def test_one_poison_item_is_convicted_within_two_crashes_and_its_neighbours_finish(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(sim(settings)) as worker:
        await put(mesh, prompts(100, {37: "POISON"}))
        await until_empty(mesh)
        found = by_index(await results(mesh))
        show(found, worker)
        assert worker.host.deaths == 2
    poison = found.pop(37)
    assert poison.status == "dead"
    assert poison.error is not None
    assert poison.error.type == "poison"
    assert "2 engines died with this item inside" in poison.error.message
    assert "as poison asked" in poison.error.message, "the last error is named"
    assert poison.attempt == 2
    assert poison.task is not None, "it carries its task, for whoever wants to look at it"
    assert len(found) == 99
    assert {r.status for r in found.values()} == {"ok"}
    assert max(r.attempt for r in found.values()) == 2
    kept = await records(mesh)
    convicted = [r for r in kept.values() if isinstance(r, Suspect) and r.crashes == 2]
    assert [(r.alone, r.started_us > 0) for r in convicted] == [(True, True)]
    assert f"incident-{convicted[0].before}" in kept


async def test_two_workers_convict_a_poison_item_by_what_they_tell_each_other(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(sim(settings, name="w1")) as one, running(sim(settings, name="w2")) as two:
        await put(mesh, prompts(200, {90: "POISON"}))
        await until_empty(mesh)
        found = by_index(await results(mesh))
        show(found, one, two)
        assert one.host.deaths + two.host.deaths == 2
    assert found.pop(90).status == "dead"
    assert len(found) == 199
    assert {r.status for r in found.values()} == {"ok"}


async def test_many_poison_items_among_their_neighbours_end_alone(mesh: Mesh, settings: Settings) -> None:
    bad = dict.fromkeys((2, 5, 8, 11, 14), "POISON")  # all in the engine at once
    async with running(sim(settings)) as worker:
        await put(mesh, prompts(60, bad))
        await until_empty(mesh, within_s=50)
        found = by_index(await results(mesh))
        show(found, worker)
        assert worker.host.deaths <= 2 * len(bad)
    assert {i for i, r in found.items() if r.status == "dead"} == set(bad)
    assert {r.error.type for r in found.values() if r.error is not None} == {"poison"}
    assert sum(r.status == "ok" for r in found.values()) == 55
    assert max(r.attempt for r in found.values()) <= 3, "nobody is in more than two crashes with others"


async def test_with_two_tries_a_neighbour_still_finishes(mesh: Mesh, settings: Settings) -> None:
    bad = dict.fromkeys((2, 9), "POISON")
    async with running(sim(settings, max_tries=2)) as worker:
        await put(mesh, prompts(30, bad))
        await until_empty(mesh, within_s=50)
        found = by_index(await results(mesh))
        show(found, worker)
    assert {i for i, r in found.items() if r.status != "ok"} == set(bad)


async def test_a2_the_only_engine_dies_and_all_that_was_in_it_is_delivered_again(
    mesh: Mesh, settings: Settings
) -> None:
    made: list[Stub] = []
    inside: set[asyncio.Future[None]] = set()

    class Mortal(Stub):
        """The first one dies, with everything in it, and nobody's fault."""

        async def run(self, work: Work) -> Output:
            if self is not made[0]:
                return Output()
            wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            inside.add(wait)
            if len(inside) == 10:
                for other in inside:
                    other.set_exception(EngineDied("the child process is gone"))
            await wait
            raise AssertionError

    def make(_: object) -> Stub:
        made.append(Mortal())
        return made[-1]

    async with running(with_worker(settings, slots=10), make) as worker:
        await put(mesh, [task(i) for i in range(10)])
        await until(lambda: _is(worker.host.deaths == 1))
        assert await stored(mesh) == 0, "nothing that was in it is settled"
        assert await left(mesh) == 10
        await until_empty(mesh)
    found = by_index(await results(mesh))
    assert [(r.status, r.attempt) for r in found.values()] == [("ok", 2)] * 10


async def test_suspects_run_alone_and_ordinary_items_wait_for_them(mesh: Mesh, settings: Settings) -> None:
    """The record alone makes a suspect: as from another worker, or from before a restart."""
    beside: dict[str, int] = {}
    inside: set[str] = set()

    class Watched(Stub):
        async def run(self, work: Work) -> Output:
            name = work.id.partition("@")[0]
            inside.add(name)
            for other in inside:
                beside[other] = max(beside.get(other, 0), len(inside))
            await asyncio.sleep(0.05)
            inside.discard(name)
            return Output()

    async with running(with_worker(settings, engine="echo", model="stub")):
        pass  # registers the function, so that its consumers are there
    await put(mesh, [task(i, job="suspect") for i in range(3)])
    await make_suspects(mesh, 3)
    await put(mesh, [task(i, job="good") for i in range(40)])
    async with running(with_worker(settings, slots=8, model="stub"), lambda _: Watched(engine="echo")):
        await until_empty(mesh)
    print(beside)
    assert {k: v for k, v in beside.items() if k.startswith("suspect")} == {
        f"suspect/{i}": 1 for i in range(3)
    }
    assert max(v for k, v in beside.items() if k.startswith("good")) > 1
    assert {r.status for r in await results(mesh)} == {"ok"}


async def make_suspects(mesh: Mesh, n: int, **more: Any) -> None:
    """Deliver the first `n` tasks once, record them as a crash leaves them, and give them back."""
    book = SuspectBook(mesh)
    taken = await lease(mesh, n)
    fields = {"crashes": 1, "incident": "before", "error": "it broke", **more}
    await book.record(
        {
            d.stream_seq: Suspect(stored_us=d.timestamp_us, started_us=i + 1, **fields)
            for i, d in enumerate(taken)
        }
    )
    for d in taken:
        Settler(mesh).nak(d, 0.05)
    await mesh.flush()


async def test_a_convicted_record_ends_an_item_without_running_it(mesh: Mesh, settings: Settings) -> None:
    """Its process died with it alone inside, for the second time: there was nobody left to settle it."""
    ran: list[str] = []

    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            ran.append(work.id)
            return Output()

    async with running(with_worker(settings, engine="echo", model="stub")):
        pass
    await put(mesh, [task(0)])
    await make_suspects(mesh, 1, crashes=2, alone=True, before="the-first", error="the process died: SIGSEGV")
    async with running(with_worker(settings, model="stub"), lambda _: Engine(engine="echo")):
        await until_empty(mesh)
    [dead] = await results(mesh)
    assert ran == []
    assert (dead.status, dead.attempt) == ("dead", 2)
    assert dead.error is not None
    assert dead.error.type == "poison"
    assert "SIGSEGV" in dead.error.message
    assert "incident-the-first" in await records(mesh), "its co-suspects are cleared"


async def test_a_suspect_that_only_waited_for_its_turn_has_lost_no_try(
    mesh: Mesh, settings: Settings
) -> None:
    """Others ended the process around it, three times: its lease lapsed, and it never ran."""
    async with running(with_worker(settings)):
        pass
    await put(mesh, [task(0)])
    await make_suspects(mesh, 1)
    for _ in range(3):
        [taken] = await lease(mesh, 1)
        Settler(mesh).nak(taken, 0.01)
    async with running(with_worker(settings, max_tries=2)):
        await until_empty(mesh)
    assert [(r.status, r.attempt) for r in await results(mesh)] == [("ok", 5)]


async def test_a_trial_begins_when_nothing_else_is_left_here(mesh: Mesh, settings: Settings) -> None:
    """What waits in a process that a trial ends would lose a try for nothing."""
    seen: list[tuple[int, int]] = []
    workers: list[WorkerService] = []

    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            runner = workers[0].runner
            assert runner is not None
            if work.id.startswith("suspect"):
                seen.append((len(runner.running), len(runner.waiting)))
            await asyncio.sleep(0.1)
            return Output()

    async with running(with_worker(settings, engine="echo", model="stub")):
        pass
    await put(mesh, [task(i, job="suspect") for i in range(3)])
    await make_suspects(mesh, 3)
    for lane in (Lane.URGENT, Lane.NORMAL, Lane.BULK):  # each brings one more than fits, by its probe
        await put(mesh, [task(i, job=f"good-{lane}") for i in range(4)], lane=lane)
    limits = with_worker(settings, model="stub", slots=2)
    async with running(limits, lambda _: Engine(engine="echo", slots=2)) as worker:
        workers.append(worker)
        await until_empty(mesh)
    assert seen == [(1, 0)] * 3
    assert {r.status for r in await results(mesh)} == {"ok"}


async def test_a_record_of_another_task_with_the_same_sequence_says_nothing(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(with_worker(settings)):
        pass
    await put(mesh, [task(0)])
    await SuspectBook(mesh).record({1: Suspect(stored_us=1, crashes=2, alone=True, error="another's")})
    [taken] = await lease(mesh, 1)
    Settler(mesh).nak(taken, 0.01)
    async with running(with_worker(settings)):
        await until_empty(mesh)
    assert [(r.status, r.attempt) for r in await results(mesh)] == [("ok", 2)]


async def test_without_the_bucket_triage_is_off_and_nothing_is_lost(mesh: Mesh, settings: Settings) -> None:
    await call(mesh, f"STREAM.DELETE.KV_{mesh.topology.suspects_bucket}")
    async with running(sim(settings, max_tries=2)) as worker:
        await put(mesh, prompts(40, {5: "POISON"}))
        await until_empty(mesh)
        found = by_index(await results(mesh))
        show(found, worker)
    assert len(found) == 40
    assert found[5].status == "dead"


async def test_s1_an_engine_that_stands_still_gives_its_leases_back_and_its_culprit_is_found(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(sim(settings, token_timeout_s=0.6)) as worker:
        await put(mesh, prompts(60, {20: "HANG"}))
        await until_empty(mesh)
        found = by_index(await results(mesh))
        show(found, worker)
        assert worker.host.deaths == 2
    hung = found.pop(20)
    assert hung.status == "dead"
    assert hung.error is not None
    assert hung.error.type == "poison"
    assert "no token for 0.6 s" in hung.error.message
    assert {r.status for r in found.values()} == {"ok"}


async def test_s1_leases_go_back_within_the_time_out_though_the_engine_never_stops(
    mesh: Mesh, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_host, "STOP_S", 1.0)

    made: list[Stub] = []

    class Stuck(Stub):
        """The first is as a step thread that never comes back: no token, no answer, and `stop` waits for it."""

        async def run(self, work: Work) -> Output:
            if self is made[0]:
                await asyncio.Event().wait()
            return Output()

        async def stop(self) -> None:
            if self is made[0]:
                await in_daemon(threading.Event().wait)

    def make(_: object) -> Stub:
        made.append(Stuck())
        return made[-1]

    async with running(with_worker(settings, token_timeout_s=0.5), make) as worker:
        await put(mesh, [task(i) for i in range(4)])
        await until(lambda: _is(len(worker.leases) == 4))
        since = time.monotonic()
        await until(lambda: _is(not worker.leases), within_s=5)
        took = time.monotonic() - since
        print(f"leases back after {took:.2f} s")
        assert took < 0.5 + 0.125 + 0.25 + 0.5, "time-out, tick, the time to leave, and a slow machine"
        await until_empty(mesh)
        assert worker.host.deaths == 1
    assert sorted((r.index, r.status, r.attempt) for r in await results(mesh)) == [
        (i, "ok", 2) for i in range(4)
    ]


async def _is(value: bool) -> bool:
    return value


@one_loop
async def test_a_draining_worker_gives_its_suspects_back(mesh: Mesh, settings: Settings) -> None:
    class Slow(Stub):
        async def run(self, work: Work) -> Output:
            await asyncio.sleep(30)
            return Output()

    async with running(with_worker(settings, engine="echo", model="stub")):
        pass
    await put(mesh, [task(i) for i in range(5)])
    await make_suspects(mesh, 5)
    limits = with_worker(settings, grace_s=0.2, model="stub")
    async with running(limits, lambda _: Slow(engine="echo")) as worker:
        assert worker.runner is not None
        apart = worker.runner.apart
        await until(lambda: _is(apart.busy and len(worker.runner.held()) >= 1))
        before = time.monotonic()
    assert time.monotonic() - before < 3
    assert not worker.leases
    async with running(with_worker(settings, model="stub"), lambda _: Stub2()):
        await until_empty(mesh, within_s=4)  # given back, and not left to lapse: the lease is 5 s
    assert {r.status for r in await results(mesh)} == {"ok"}


class Stub2(Stub):
    def __init__(self) -> None:
        super().__init__(engine="echo")

    async def run(self, work: Work) -> Output:
        return Output()
