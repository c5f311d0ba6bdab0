"""Nothing to do, a broker that is away, a consumer that somebody deleted: no spin, no spam, and recovery (S7).

Times are short here. `HEADRACE_IDLE_S=600` waits as long as the report of the case said.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import psutil
import pytest

from headrace.client import AsyncClient
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import get_function, register_function
from headrace.mesh.server import NatsServer
from tests.cases.conftest import MakeMesh
from tests.chaos.processes import ProcessMesh
from tests.completion.world import until

IDLE_S = float(os.environ.get("HEADRACE_IDLE_S", "5"))
AWAY_S = min(30.0, IDLE_S)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90 + IDLE_S + AWAY_S)]


def cpu_s(parts: ProcessMesh) -> float:
    """CPU seconds of the worker and completion so far."""
    times = [psutil.Process(p.process.pid).cpu_times() for p in parts.parts.values() if p.process]
    return sum(t.user + t.system for t in times)


def lines(path: Path, skip: int = 0) -> list[dict[str, str]]:
    """Log lines from a byte on."""
    return [json.loads(line) for line in path.read_text("utf-8")[skip:].splitlines()]


def sizes(parts: ProcessMesh) -> dict[str, int]:
    return {name: len(p.log.read_text("utf-8")) for name, p in parts.parts.items()}


async def answers(mesh: Mesh, job: str) -> None:
    """The mesh works: an item goes in and its result comes out."""
    async with AsyncClient(mesh=mesh) as client:
        await client.submit([{"prompt": "hi"}], job=job)

        async def landed() -> bool:
            return (await client.wait(job, timeout_s=20)).ok == 1

        await until(landed, 30)


async def test_s7_idle_it_costs_next_to_nothing_and_says_nothing(mesh: Mesh, make_mesh: MakeMesh) -> None:
    parts = make_mesh(engine="echo")
    await parts.start()
    await answers(mesh, "before")
    before, used = sizes(parts), cpu_s(parts)
    await asyncio.sleep(IDLE_S)
    share = (cpu_s(parts) - used) / IDLE_S
    said = {name: lines(p.log, before[name]) for name, p in parts.parts.items()}
    print("share of a core", round(share, 3), said)
    assert share < 0.2
    assert {name: [] for name in said} == {
        name: [line for line in found if line["level"] != "info"] for name, found in said.items()
    }
    assert sum(map(len, said.values())) <= 3
    await answers(mesh, "after")


async def test_s7_a_broker_that_is_away_is_one_line_for_each_try(
    nats_server: NatsServer, mesh: Mesh, make_mesh: MakeMesh
) -> None:
    parts = make_mesh(engine="echo")
    await parts.start()
    await answers(mesh, "before")
    before, used = sizes(parts), cpu_s(parts)
    nats_server.kill()
    await asyncio.sleep(AWAY_S)
    share = (cpu_s(parts) - used) / AWAY_S
    said = {name: lines(p.log, before[name]) for name, p in parts.parts.items()}
    await asyncio.to_thread(nats_server.restart)
    await until(lambda: mesh.connected)
    assert share < 0.3, f"{share:.2f} of a core while the broker is away"
    for name, found in said.items():
        tries = [line for line in found if line["message"] == "broker is away"]
        print(name, len(found), "lines,", len(tries), "tries")
        assert tries, f"{name} says nothing"
        # Back-off to 5 s: 8 tries until then, from each connection (the worker's leases have their own).
        assert len(tries) <= 2 * (8 + AWAY_S / 2.5)
        assert len(found) <= 3 * len(tries), found
    assert {name: p.code for name, p in parts.parts.items()} == {"worker": None, "completion": None}
    await answers(mesh, "after")


async def test_s7_a_deleted_consumer_is_named_without_a_spin_and_comes_back(
    mesh: Mesh, make_mesh: MakeMesh
) -> None:
    parts = make_mesh(engine="echo")
    await parts.start()
    await answers(mesh, "before")
    spec = await get_function(mesh, "generate")
    consumers = mesh.topology.function_consumers(spec)
    before, used = sizes(parts), cpu_s(parts)
    for consumer in consumers:
        await jsapi.call(mesh, f"CONSUMER.DELETE.{consumer.stream}.{consumer.durable}")
    await asyncio.sleep(AWAY_S)
    share = (cpu_s(parts) - used) / AWAY_S
    said = [line for line in lines(parts.parts["worker"].log, before["worker"]) if line["level"] != "info"]
    print("share of a core", round(share, 3), "lines", len(said), "of", len(consumers), "consumers")
    assert share < 0.5
    assert said, "nothing was said of it"
    assert len(said) <= len(consumers) * (8 + AWAY_S / 2.5)
    await register_function(mesh, spec)
    await answers(mesh, "after")
