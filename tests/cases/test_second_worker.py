"""Work that is shared: a second worker joins in the middle of a job (S5)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.mesh.connection import Mesh
from tests.cases.conftest import MakeMesh
from tests.chaos.processes import Part
from tests.cli.harness import write_prompts
from tests.completion.world import sql, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def test_s5_a_second_worker_has_work_within_a_second_and_the_wall_time_is_near_the_ideal(
    mesh: Mesh, make_mesh: MakeMesh, tmp_path: Path
) -> None:
    """40 items of one second, 4 at once on each worker; the second one joins at 3 s."""
    parts = make_mesh(engine="echo", slots=4, engine_options={"delay_ms": 1000})
    await parts.start()
    second = Part("worker", parts.folder)
    second.log, second._ready = tmp_path / "second.log", tmp_path / "second.ready"
    path = write_prompts(tmp_path / "in.jsonl", 40)
    assert parts.submit(path, "j").returncode == 0
    async with AsyncClient(mesh=mesh) as client:

        async def twelve() -> bool:
            return (await client.status("j")).ok >= 12

        await until(twelve, 30)
        second.start()
        try:
            await second.ready()
            joined_us = time.time_ns() // 1_000
            await client.wait("j", timeout_s=60)
        finally:
            second.kill()
    rows = await sql(
        mesh,
        "SELECT worker, count(*), epoch_us(min(started_at)), epoch_us(max(finished_at)), max(attempt) "
        "FROM outcomes GROUP BY 1 ORDER BY 3",
    )
    assert len(rows) == 2, "the second worker ran nothing"
    (_, first_n, begun, end_first, attempt), (_, second_n, first_of_second, end_second, attempt_2) = rows
    assert max(attempt, attempt_2) == 1, "an item was leased and not run"
    assert first_n + second_n == 40
    assert (first_of_second - joined_us) / 1e6 < 1.0
    # Ideal: what was done when the second one joined stands, the rest goes twice as fast.
    alone_s = (joined_us - begun) / 1e6
    left = 40 - 4 * int(alone_s)
    ideal_s = alone_s + left / 8
    wall_s = (max(end_first, end_second) - begun) / 1e6
    print(f"wall {wall_s:.1f} s, ideal {ideal_s:.1f} s, shares {first_n} and {second_n}")
    # Items are whole seconds: one more than the ideal is what granularity costs.
    assert wall_s <= 1.1 * ideal_s + 1.0
