"""Gateways killed at every named point, for every effect: the callee's own log is compared with the ledger."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import uvloop

from headrace.contracts.ledger import EFFECTS, Effect
from headrace.gateway.keys import call_id
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.gateway.governed import Governed, governed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

POINTS = (
    "call-accepted",
    "intent-before-publish",
    "intent-acked",
    "call-answered",
    "end-acked",
    "call-replied",
)
ENDS = ("completed", "failed", "in_doubt")


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


def heard(world: Governed, effect: Effect, key: str, call: str) -> list[bool]:
    """Whether the callee acted, for each time that it heard of the call."""
    name = f"hr-{call}" if effect in ("idempotent", "money", "destructive") else key
    return [entry["applied"] for entry in world.heard(name)]


@pytest.mark.parametrize("point", POINTS)
async def test_killed_there_and_asked_again(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, point: str
) -> None:
    """For each effect in turn: at most one call where a repeat is forbidden, and an end that agrees with the callee."""
    with governed(nats_server, mesh, tmp_path / "m") as world:
        for effect in EFFECTS:
            key = f"{point}-{effect}"
            call = call_id("t", "a", key)
            await world.start(crash_at=point)
            asking = asyncio.create_task(world.ask(effect, key, wait_s=1.0))
            assert await world.gateway.died(20) == -signal.SIGKILL, world.gateway.tail()
            await asyncio.gather(asking, return_exceptions=True)
            before = heard(world, effect, key, call)
            await world.start()
            answer = await world.ask_until(effect, key, ENDS)
            acted = heard(world, effect, key, call)
            view = await world.view(call)
            assert view is not None
            if effect in ("cost_bearing", "money", "destructive"):
                assert sum(acted) <= 1, (point, effect, acted)
                if before:
                    assert acted == before  # whatever was heard before the kill is not repeated
            if answer.state == "completed":
                assert sum(acted) >= 1
            if answer.state == "failed":
                assert not any(acted)
            assert view.state == answer.state
            if effect in ("read", "idempotent"):
                assert answer.state == "completed"
            again = await world.ask(effect, key)
            assert (again.state, again.replayed) == (answer.state, True)
            other = await world.ask(effect, key, extra="another body")
            assert other.state == "conflict"
            assert heard(world, effect, key, call) == acted
            world.gateway.kill()
        fold = await world.fold()
        assert fold.differences() == []


async def test_a_call_in_doubt_is_known_within_the_restart(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path
) -> None:
    """G8: killed in mid-call, started again, the key asked again: in doubt at once, and no second call."""
    with governed(nats_server, mesh, tmp_path / "m", timeout_s=60.0) as world:
        await world.start()
        asking = asyncio.create_task(world.ask("cost_bearing", "k", wait_s=2.0, behave="hangs"))
        async with asyncio.timeout(20):
            while not world.heard("k"):
                await asyncio.sleep(0.01)
        world.gateway.kill()
        await asyncio.gather(asking, return_exceptions=True)
        await world.start()
        answer = await world.ask_until("cost_bearing", "k", ENDS, behave="hangs")
        assert answer.state == "in_doubt"
        assert answer.held_micro > 0
        assert len(world.heard("k")) == 1


async def test_a_gateway_that_was_stopped_past_its_lease_is_fenced(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, settings: Settings
) -> None:
    """G12: one call; the late result is evidence, and what was in doubt is completed from it."""
    with governed(nats_server, mesh, tmp_path / "m", timeout_s=1.0) as world:
        await world.start()
        asking = asyncio.create_task(world.ask("cost_bearing", "k", wait_s=1.0, behave="late", delay=0.5))
        async with asyncio.timeout(20):
            while not world.heard("k"):
                await asyncio.sleep(0.01)
        process = world.gateway.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        other = Governed.__new__(Governed)
        other.mesh, other.callee, other.server = world.mesh, world.callee, world.server
        folder = tmp_path / "other"
        folder.mkdir()
        text = (tmp_path / "m" / "headrace.toml").read_text().replace('name = "g1"', 'name = "g2"')
        (folder / "headrace.toml").write_text(text)
        from tests.chaos.processes import Part

        other.gateway = Part("gateway", folder)
        try:
            await other.start()
            answer = await other.ask_until("cost_bearing", "k", ("in_doubt",), behave="late", delay=0.5)
            assert answer.state == "in_doubt"
            process.send_signal(signal.SIGCONT)
            done = await other.ask_until("cost_bearing", "k", ("completed",), behave="late", delay=0.5)
            assert done.replayed
            view = await world.view(call_id("t", "a", "k"))
            assert view is not None
            assert view.last.end is not None
            assert getattr(view.last.end, "resolved_by", None) == "evidence"
            assert len(world.heard("k")) == 1
        finally:
            process.send_signal(signal.SIGCONT)
            await asyncio.gather(asking, return_exceptions=True)
            other.gateway.kill()
