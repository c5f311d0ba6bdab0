"""The broker killed with SIGKILL right after work was done, and while nothing is to do (A16, A18)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from tests.cases.conftest import MakeMesh
from tests.cli.harness import write_prompts
from tests.completion.world import sql, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]


async def test_a16_no_completed_task_runs_again(
    nats_server: NatsServer, mesh: Mesh, make_mesh: MakeMesh, tmp_path: Path
) -> None:
    parts = make_mesh(engine="echo", slots=64)
    await parts.start()
    path = write_prompts(tmp_path / "in.jsonl", 1_000)
    assert parts.submit(path, "j").returncode == 0
    async with AsyncClient(mesh=mesh) as client:
        await client.wait("j", timeout_s=40)

        async def settled() -> bool:
            audit = await client.audit("j")
            return audit.sources.tasks_in_broker == audit.sources.results_in_broker == 0

        await until(settled)
        before = await client.status("j")
        nats_server.kill()
        await asyncio.to_thread(nats_server.restart)
        await until(lambda: mesh.connected)
        # A further job goes through the same consumers: had any task of the first come back, it would run before.
        assert parts.submit(path, "k").returncode == 0
        await client.wait("k", timeout_s=40)
        after = await client.status("j")
        assert (after.ok, after.duplicates) == (1_000, before.duplicates)
        assert (await client.audit("j")).balanced
        attempts = await sql(mesh, "SELECT job, count(*) FROM outcomes GROUP BY 1 ORDER BY 1")
        assert attempts == [["j", 1_000], ["k", 1_000]]


@pytest.mark.parametrize("lane", ["urgent", "normal", "bulk"])
async def test_a18_a_task_submitted_after_a_restart_is_taken_at_once(
    nats_server: NatsServer, mesh: Mesh, make_mesh: MakeMesh, lane: str
) -> None:
    parts = make_mesh(engine="echo")
    await parts.start()
    async with AsyncClient(mesh=mesh) as client:
        for round_ in range(2):
            nats_server.kill()
            await until(lambda: not mesh.connected)
            await asyncio.to_thread(nats_server.restart)
            await until(lambda: mesh.connected)
            job = f"j{round_}"
            await client.submit([{"prompt": "hi"}], job=job, lane=lane)
            submitted = time.monotonic()

            async def landed(job: str = job) -> bool:
                with contextlib.suppress(HeadraceError):  # completion may be on its way back as well
                    return (await client.result(job, 0, wait_s=1.0)).status == "ok"
                return False

            await until(landed)
            took_s = time.monotonic() - submitted
            print("taken and landed in", round(took_s, 2), "s")
            assert took_s < 2.0
