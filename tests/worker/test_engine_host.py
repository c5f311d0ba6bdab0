"""The engine's life: restarts with back-off, giving up, and the watchdog that counts tokens (S1, S2)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.messages import Choice
from headrace.inference_worker import engine_host
from headrace.inference_worker.engine_host import EngineHost
from headrace.inference_worker.engines.protocol import EngineDied, Output, Work
from headrace.inference_worker.retries import RetryPolicy
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.worker.harness import put, results, running, task, until, until_empty, with_worker
from tests.worker.test_items import Stub

pytestmark = pytest.mark.anyio


class Counted(Stub):
    """Says how often it was started and stopped; `broken` engines do not start."""

    def __init__(self, log: list[str], *, broken: bool = False) -> None:
        super().__init__()
        self.log = log
        self.broken = broken

    async def start(self) -> None:
        self.log.append("start")
        if self.broken:
            raise HeadraceError("no memory")

    async def stop(self) -> None:
        self.log.append("stop")


async def test_a_death_is_counted_once_and_a_new_engine_is_made() -> None:
    log: list[str] = []
    made: list[Counted] = []

    def factory() -> Any:
        made.append(Counted(log))
        return made[-1]

    host = EngineHost(factory)
    await host.start()
    back = asyncio.Event()
    host.on_up = back.set
    keeper = asyncio.create_task(host.keep_alive())
    for _ in range(5):
        host.died("it broke")
    assert not host.up
    await asyncio.wait_for(back.wait(), 5)
    assert host.up
    assert host.deaths == 1
    assert log == ["start", "stop", "start"]
    assert host.engine is made[1]
    await host.stop()
    keeper.cancel()


async def test_an_engine_that_does_not_start_again_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_host, "backoff_s", lambda *_, **__: 0.001)
    log: list[str] = []
    made: list[Counted] = []

    def factory() -> Any:
        made.append(Counted(log, broken=bool(made)))
        return made[-1]

    host = EngineHost(factory)
    await host.start()
    host.died("it broke")
    with pytest.raises(Unavailable, match="did not start again in 6 tries: no memory"):
        await asyncio.wait_for(host.keep_alive(), 5)


async def test_s1_running_items_and_no_token_is_a_death(mesh: Mesh, settings: Settings) -> None:
    class Hung(Stub):
        hangs = True

        def __init__(self) -> None:
            super().__init__()
            self.stopped = asyncio.Event()

        async def run(self, work: Work) -> Output:
            if Hung.hangs:
                await self.stopped.wait()
                raise EngineDied("stopped")
            return Output(choices=[Choice(text="x")])

        async def stop(self) -> None:
            Hung.hangs = False
            self.stopped.set()

    limits = with_worker(settings, token_timeout_s=0.5)
    async with running(limits, lambda _: Hung()) as worker:
        await put(mesh, [task(i) for i in range(3)])

        async def died() -> bool:
            return worker.host.deaths == 1

        await until(died, within_s=3)
        await until_empty(mesh)
    assert sorted((r.index, r.status, r.attempt) for r in await results(mesh)) == [
        (i, "ok", 2) for i in range(3)
    ]


async def test_an_idle_engine_makes_no_token_and_lives(mesh: Mesh, settings: Settings) -> None:
    async with running(with_worker(settings, token_timeout_s=0.2)) as worker:
        await asyncio.sleep(0.6)
        assert worker.host.deaths == 0


def test_retries_are_spaced_exponentially_with_jitter_and_a_cap() -> None:
    policy = RetryPolicy(base_s=1.0, cap_s=20.0)
    for tries, full in ((1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (6, 20.0), (1_000, 20.0)):
        delays = [policy.delay_s(tries) for _ in range(50)]
        assert all(full / 2 <= d <= full for d in delays)
        assert len(set(delays)) > 10
