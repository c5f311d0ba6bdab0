"""The life of a host: stops that drain, brokers that die, handlers longer than a lease, agents side by side."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from headrace.agent import Agent, Context, RetryLater, load_agent
from headrace.agent.service import AgentService
from headrace.contracts.errors import InvalidInput, NotFound
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.agent.crew import Sums
from tests.agent.processes import crew
from tests.agent.world import dead_letters, hosting, is_empty, leased, send, state_of, until, waiting

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def state(mesh: Mesh, agent: str) -> dict[str, int]:
    record = await state_of(mesh, agent)
    assert record is not None
    return msgspec.json.decode(record.state) or {}


def slow(name: str = "slow", *, seconds: float) -> tuple[Agent, asyncio.Event]:
    agent, started = Agent(name), asyncio.Event()

    @agent.on("x")
    async def x(ctx: Context[dict[str, int]]) -> None:
        ctx.state["runs"] = ctx.state.get("runs", 0) + 1
        started.set()
        await asyncio.sleep(seconds)
        ctx.send(name, "echo")

    @agent.on("echo")
    async def echo(ctx: Context[dict[str, int]]) -> None:
        ctx.state["echoes"] = ctx.state.get("echoes", 0) + 1

    return agent, started


async def test_a_stop_lets_the_running_handler_finish_and_leaves_the_rest(
    mesh: Mesh, settings: Settings
) -> None:
    agent, started = slow(seconds=0.5)
    async with hosting(settings, agent):
        for _ in range(3):
            await send(mesh, "slow", "x")
        await started.wait()
    assert await state(mesh, "slow") == {"runs": 1}
    record = await state_of(mesh, "slow")
    assert record is not None
    assert record.outbox == [], "what was sent is noted as sent"
    assert await waiting(mesh, "slow") == 3  # two that were not begun, and its own
    await until(lambda: _none_leased(mesh, "slow"), "nothing is held back by a lease")


async def _none_leased(mesh: Mesh, agent: str) -> bool:
    return await leased(mesh, agent) == 0


async def test_a_handler_that_outlasts_the_grace_is_given_back(mesh: Mesh, settings: Settings) -> None:
    agent, started = slow(seconds=600.0)
    settings = msgspec.structs.replace(settings, grace_s=0.2)
    async with hosting(settings, agent):
        await send(mesh, "slow", "x")
        await started.wait()
    assert await state(mesh, "slow") == {}
    short, _ = slow(seconds=0.0)
    async with hosting(settings, short):
        await until(lambda: is_empty(mesh, "slow"), "handled by the next run")
        assert await state(mesh, "slow") == {"runs": 1, "echoes": 1}


async def test_what_waits_for_a_dependency_does_not_hold_up_a_stop(mesh: Mesh, settings: Settings) -> None:
    agent, waits = Agent("waits"), asyncio.Event()

    @agent.on("x")
    async def x(ctx: Context[dict[str, int]]) -> None:
        waits.set()
        raise RetryLater(delay_s=300.0)

    settings = msgspec.structs.replace(settings, grace_s=200.0)
    async with asyncio.timeout(60):
        async with hosting(settings, agent):
            await send(mesh, "waits", "x")
            await waits.wait()
    assert await waiting(mesh, "waits") == 1


async def test_a_handler_longer_than_its_lease_runs_once(mesh: Mesh, settings: Settings) -> None:
    agent, _ = slow(seconds=3.0)
    settings = msgspec.structs.replace(settings, ack_wait_s=1.0)
    async with hosting(settings, agent) as host:
        await send(mesh, "slow", "x")
        await until(lambda: host.runners["slow"].handled == 2, "it and its own mail are handled")
        assert await state(mesh, "slow") == {"runs": 1, "echoes": 1}


async def test_pause_and_resume_while_mail_comes(mesh: Mesh, settings: Settings) -> None:
    """Again and again, faster than they can take effect: nothing is lost, and at last it runs."""
    agent = Agent("paused")

    @agent.on("x")
    async def x(ctx: Context[dict[str, list[int]]], msg: int) -> None:
        ctx.state.setdefault("seen", []).append(msg)

    async with hosting(settings, agent):
        for n in range(60):
            await send(mesh, "paused", "x", n)
            if n % 6 == 0:
                await send(mesh, "paused", ("pause", "stop")[n % 4 == 0], lane="control")
                await send(mesh, "paused", "resume", lane="control")
        await until(lambda: is_empty(mesh, "paused"), "all handled")
        record = await state_of(mesh, "paused")
        assert record is not None
        assert msgspec.json.decode(record.state) == {"seen": list(range(60))}
        assert not record.stopped
        assert await dead_letters(mesh) == []


async def test_a_broker_that_is_killed_while_agents_work(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path
) -> None:
    with crew(nats_server, tmp_path / "m", ("relay", "sink")) as (both,):
        await both.restart()
        for n in range(30):
            await send(mesh, "relay", "number", {"n": n})
            if n in (10, 20):
                nats_server.kill()
                await asyncio.to_thread(nats_server.restart)
                await until(lambda: mesh.connected, "connected again")
        await until(lambda: is_empty(mesh, "relay"), "the relay has handled all")
        await until(lambda: is_empty(mesh, "sink"), "the sink has handled all")
        for agent, numbers in (("relay", 30), ("sink", 60)):
            record = await state_of(mesh, agent)
            assert record is not None
            assert msgspec.json.decode(record.state, type=Sums).seen == list(range(numbers))
        assert both.process is not None
        both.process.send_signal(signal.SIGTERM)
        assert await both.died(30) == 0, both.tail()


async def test_the_death_of_a_host_is_not_that_of_its_agents_mail(mesh: Mesh, settings: Settings) -> None:
    """Twenty agents of one process pass a number round."""
    ring = 20

    def member(i: int) -> Agent:
        agent = Agent(f"ring-{i}")

        @agent.on("hop")
        async def hop(ctx: Context[dict[str, int]], msg: int) -> None:
            ctx.state["last"] = msg
            if msg:
                ctx.send(f"ring-{(i + 1) % ring}", "hop", msg - 1)
            else:
                ctx.reply("round")

        return agent

    async with hosting(settings, *(member(i) for i in range(ring))) as host:
        await send(mesh, "ring-0", "hop", 50)
        await until(lambda: sum(r.handled for r in host.runners.values()) == 51, "51 hops")
        assert await state(mesh, f"ring-{50 % ring}") == {"last": 0}


def test_agents_are_loaded_by_name() -> None:
    assert load_agent("tests.agent.crew:relay").name == "relay"
    with pytest.raises(NotFound, match="no_such_module"):
        load_agent("no_such_module:agent")
    with pytest.raises(NotFound, match="nothing"):
        load_agent("tests.agent.crew:nothing")
    for wrong in ("tests.agent.crew", ":x", "tests.agent.crew:", "tests.agent.crew:Number"):
        with pytest.raises(InvalidInput):
            load_agent(wrong)


def test_a_host_needs_agents_of_different_names() -> None:
    settings = Settings(url="nats://127.0.0.1:1")
    with pytest.raises(InvalidInput):
        AgentService(settings, [])
    with pytest.raises(InvalidInput):
        AgentService(settings, [Agent("a"), Agent("a")])
