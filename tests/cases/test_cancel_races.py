"""A cancellation against running work and against the last result (S4)."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from tests.cases.conftest import MakeMesh
from tests.cli.harness import write_prompts
from tests.completion.world import sql, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

ENDED = ("completed", "completed_with_errors", "cancelled")


async def test_s4_midway_running_work_is_aborted_within_two_seconds(
    mesh: Mesh, make_mesh: MakeMesh, tmp_path: Path
) -> None:
    parts = make_mesh(engine="echo", slots=5, engine_options={"delay_ms": 1000})
    await parts.start()
    assert parts.submit(write_prompts(tmp_path / "in.jsonl", 25), "j").returncode == 0
    async with AsyncClient(mesh=mesh) as client:

        async def five() -> bool:
            status = await client.status("j")
            return status.ok >= 5 and status.running == 5

        await until(five, 30)
        asked = time.monotonic()
        await client.cancel("j")

        async def nothing_runs() -> bool:
            return "aborted" in parts.parts["worker"].tail()

        await until(nothing_runs, 10)
        assert time.monotonic() - asked < 2.0
        status = await client.wait("j", timeout_s=20)
        assert status.state == "cancelled"
        assert status.ok >= 5
        assert status.cancelled >= 5
        assert status.ok + status.cancelled == 25
        rows = await sql(mesh, "SELECT count(*) FROM outcomes WHERE status = 'ok' AND text LIKE 'say%'")
        assert rows == [[status.ok]], "finished rows are kept whole"
        assert (await client.audit("j")).balanced


async def test_s4_against_the_last_result_each_job_ends_once(mesh: Mesh, make_mesh: MakeMesh) -> None:
    """Thirty jobs of one item, each cancelled at about the moment at which it ends."""
    parts = make_mesh(engine="echo", slots=8, engine_options={"delay_ms": 60})
    await parts.start()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    async with AsyncClient(mesh=mesh) as client:

        async def race(number: int) -> None:
            job = f"j{number}"
            await client.submit([{"prompt": "hi"}], job=job)
            await asyncio.sleep(rng.uniform(0.0, 0.25))
            await client.cancel(job)
            status = await client.wait(job, timeout_s=30)
            assert status.state in ENDED
            assert status.ok + status.cancelled == status.submitted == 1
            # It ends as cancelled only if it was; and never with an outcome that it did not have.
            assert (status.state == "completed") <= (status.ok == 1)

        for first in range(0, 30, 5):
            await asyncio.gather(*(race(first + i) for i in range(5)))
        ends = await sql(mesh, "SELECT state, ok, cancelled, count(*) FROM jobs GROUP BY ALL ORDER BY ALL")
        print("ends", ends)
        rows = await sql(mesh, "SELECT count(*), count(DISTINCT job) FROM outcomes")
        assert rows == [[30, 30]]
        told = await jsapi.count_subject(
            mesh, mesh.topology.jobs, mesh.subjects.all_jobs()[:-1] + "*.completed"
        )
        assert told == 30
        for number in range(30):
            assert (await client.audit(f"j{number}")).balanced
