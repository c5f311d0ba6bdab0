"""Agents killed at every named point: nothing lost, nothing twice, the order held."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import msgspec
import pytest

from headrace.mesh.connection import Mesh
from headrace.mesh.mail import wait_reply
from headrace.mesh.server import NatsServer
from tests.agent.crew import Sums
from tests.agent.processes import crew
from tests.agent.world import dead_letters, is_empty, send, state_of, until
from tests.gateway.governed import governed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

POINTS = ("mail-received", "agent-handled", "agent-committed", "agent-sent", "agent-acked")


def test_every_point_of_agents_is_one_of_them() -> None:
    rooms = Path(__file__).parents[2] / "services" / "headrace" / "agent"
    named = {
        name
        for file in rooms.glob("*.py")
        for name in re.findall(r'crash_point\("([^"]+)"\)', file.read_text())
    }
    assert named == set(POINTS)


async def sums(mesh: Mesh, agent: str) -> Sums:
    record = await state_of(mesh, agent)
    assert record is not None
    return msgspec.json.decode(record.state, type=Sums | None) or Sums()


@pytest.mark.parametrize("point", POINTS)
async def test_m2_killed_there_each_message_has_one_effect(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, point: str
) -> None:
    """M2: the relay dies at that point of its third message; its state, and what the sink got, are as if it had not."""
    with crew(nats_server, tmp_path / "m", ("relay",), ("sink",)) as (relay, sink):
        await sink.restart()
        await relay.restart(crash_at=f"{point}:3")
        for n in range(6):
            await send(mesh, "relay", "number", {"n": n})
        assert await relay.died(30) == -signal.SIGKILL, relay.tail()
        await relay.restart()
        await until(lambda: is_empty(mesh, "relay"), "the relay has handled all")
        await until(lambda: is_empty(mesh, "sink"), "the sink has handled all")
        assert (await sums(mesh, "relay")).seen == list(range(6))
        assert (await sums(mesh, "sink")).seen == list(range(12))
        assert await dead_letters(mesh) == []


async def test_killed_again_and_again_the_order_of_each_sender_holds(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path
) -> None:
    """Relay and sink are killed at points drawn by chance, while 40 numbers pass through both."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    with crew(nats_server, tmp_path / "m", ("relay",), ("sink",)) as parts:
        for part in parts:
            await part.restart()
        for n in range(40):
            await send(mesh, "relay", "number", {"n": n})
        for _ in range(6):
            part = draw.choice(parts)
            part.kill()
            await part.restart(crash_at=f"{draw.choice(POINTS)}:{draw.randrange(1, 6)}")
            await part.died(1.0)
        for part in parts:
            part.kill()
            await part.restart()
        await until(lambda: is_empty(mesh, "relay"), "the relay has handled all")
        await until(lambda: is_empty(mesh, "sink"), "the sink has handled all")
        assert (await sums(mesh, "relay")).seen == list(range(40))
        assert (await sums(mesh, "sink")).seen == list(range(80))
        assert await dead_letters(mesh) == []


@pytest.mark.parametrize("kind", ["durable", "now"])
@pytest.mark.parametrize("point", ["agent-handled", "agent-committed", "agent-sent"])
async def test_questions_survive_the_death_of_both_sides(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, kind: str, point: str
) -> None:
    """The answerer dies at that point, and so does the asker: one answer, and the sink has seen one question."""
    with crew(nats_server, tmp_path / "m", ("asker",), ("sink",)) as (asker, sink):
        await sink.restart(crash_at=point)
        await asker.restart(crash_at=f"{point}:{2 if kind == 'durable' else 1}")  # where it has the answer
        await send(mesh, "asker", kind, 21, request="r-1")
        assert await sink.died(30) == -signal.SIGKILL, sink.tail()
        await sink.restart()
        assert await asker.died(30) == -signal.SIGKILL, asker.tail()
        await asker.restart()
        reply = await wait_reply(mesh, "r-1", 40.0)
        assert reply is not None
        assert reply.body is not None
        assert msgspec.json.decode(reply.body) == 42
        assert (await sums(mesh, "sink")).seen == [21]
        assert (await sums(mesh, "asker")).answers == ["21*2=42"]
        record = await state_of(mesh, "asker")
        assert record is not None
        assert record.questions == {}


@pytest.mark.parametrize("point", ["agent-handled", "agent-committed"])
async def test_a_governed_call_is_made_once_though_its_agent_and_its_gateway_die(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, point: str
) -> None:
    """The gateway dies after it has answered, the agent after it has heard: the callee was called once."""
    folder = tmp_path / "m"
    with governed(nats_server, mesh, folder) as world, crew(nats_server, folder, ("caller",)) as (caller,):
        await world.start(crash_at="call-replied")
        await caller.restart(crash_at=point)
        for key in ("k-1", "k-2"):
            await send(mesh, "caller", "ask", {"callee": "cost_bearing", "id": key}, request=f"r-{key}")
        assert await world.gateway.died(30) == -signal.SIGKILL, world.gateway.tail()
        await world.start()
        assert await caller.died(40) == -signal.SIGKILL, caller.tail()
        await caller.restart()
        for key in ("k-1", "k-2"):
            reply = await wait_reply(mesh, f"r-{key}", 40.0)
            assert reply is not None, caller.tail()
            assert reply.body is not None
            assert msgspec.json.decode(reply.body) == {"state": "completed"}
            assert len(world.heard(key)) == 1
        assert (await sums(mesh, "caller")).answers == ["k-1", "k-2"]
        assert (await world.fold()).differences() == []


async def test_a_call_waits_for_a_gateway_and_its_answer_for_the_agent(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path
) -> None:
    """No gateway is there when the call is asked, and the agent is gone when it is answered."""
    folder = tmp_path / "m"
    with governed(nats_server, mesh, folder) as world, crew(nats_server, folder, ("caller",)) as (caller,):
        await caller.restart()
        await send(mesh, "caller", "ask", {"callee": "money", "id": "k-1"}, request="r-1")
        await until(lambda: _asked(mesh), "the call is stored")
        caller.kill()
        await world.start()
        await until(lambda: world.heard("k-1") or len(world.callee.entries()) == 1, "the callee was called")
        await caller.restart()
        reply = await wait_reply(mesh, "r-1", 40.0)
        assert reply is not None
        assert reply.error is None
        assert len(world.callee.entries()) == 1


async def test_a_call_that_is_refused_or_in_doubt_is_told_by_its_code(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    with governed(nats_server, mesh, folder) as world, crew(nats_server, folder, ("caller",)) as (caller,):
        await world.start()
        await caller.restart()
        await send(mesh, "caller", "ask", {"callee": "nobody", "id": "k-1"}, request="r-1")
        await send(
            mesh, "caller", "ask", {"callee": "cost_bearing", "id": "k-2", "behave": "closes"}, request="r-2"
        )
        codes: list[str] = []
        for request in ("r-1", "r-2"):
            reply = await wait_reply(mesh, request, 60.0)
            assert reply is not None
            assert reply.error is not None, reply
            codes.append(reply.error.code)
        print(codes)
        assert codes[0] == "unknown_callee"
        assert codes[1] != "handler_failed"
        assert [view.state for view in (await world.fold()).calls.values()] == ["in_doubt"]
        assert len(world.heard("k-2")) == 1, "its tries asked for one call"
        assert len(await dead_letters(mesh)) == 2


async def _asked(mesh: Mesh) -> bool:
    from headrace.mesh.jsapi import count_subject

    return await count_subject(mesh, mesh.topology.calls, "hr.calls.>") > 0
