"""A pipeline while every part of the mesh is killed at random: each row once through each stage, and proved."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import uvloop

from headrace.client.pipelines import pipeline_audit
from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos.processes import kept_alive, process_mesh
from tests.completion import pipes
from tests.completion.world import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

WORKER = """
[completion]
batch_rows = 40
[worker]
engine = "echo"
slots = 32
[worker.engine_options]
delay_ms = "10"
"""


@pytest.fixture
def anyio_backend() -> object:
    """What is tested runs in other processes, on the loop of production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    return Settings(url=nats_server.url, dir=str(tmp_path), durability="relaxed", ack_wait_s=0.5)


@pytest.mark.parametrize("kills", [10])
async def test_every_part_is_killed_at_random(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, kills: int
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    rows = pipes.documents(300, chunks=7, bad=40)
    unbalanced: list[object] = []
    with process_mesh(nats_server, tmp_path / "mesh", {"ack_wait_s": 0.5}, WORKER) as parts:
        await parts.start()
        path = pipes.write(tmp_path / "rows", rows)
        asking = asyncio.ensure_future(
            until(lambda: pipes.answered(pipes.run(mesh, pipes.DOCUMENTS, path)), 120)
        )
        async with kept_alive(parts):
            for _ in range(kills):
                await asyncio.sleep(rng.uniform(0.2, 1.5))
                parts.kill(rng.choice(("worker", "completion", "broker")))
                try:
                    audit = await asyncio.wait_for(pipeline_audit(mesh, "docs", timeout_s=5.0), 6)
                except (HeadraceError, TimeoutError):
                    continue  # nobody there to answer: no sample
                unbalanced += [] if audit.balanced else [audit]
            await asking
            await until(lambda: mesh.connected)
            await pipes.assert_documents(mesh, rows)
    assert unbalanced == []
