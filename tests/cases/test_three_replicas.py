"""The account of a job whose items partly exhaust their tries, on three replicas, one of which is killed (A10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.contracts.errors import HeadraceError
from headrace.inference_worker.engines.protocol import Output, Work
from headrace.mesh import jsapi
from headrace.mesh.settings import Settings
from tests.completion.world import serving, sql, until
from tests.mesh.test_checks_cluster import clustered
from tests.worker.harness import running, with_worker
from tests.worker.test_items import Stub

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]


class Engine(Stub):
    """Each tenth item raises, whenever it runs."""

    async def run(self, work: Work) -> Output:
        if int(work.id.partition("/")[2].partition("@")[0]) % 10 == 0:
            raise ConnectionError("boom")
        return Output()


async def test_a10_on_three_replicas_with_a_node_killed(tmp_path: Path) -> None:
    async with clustered(tmp_path) as (cluster, mesh):
        settings = Settings(url=cluster.url, replicas=3, dir=str(tmp_path), ack_wait_s=5.0)
        worker = with_worker(settings, max_tries=2, slots=8)
        async with serving(settings), running(worker, lambda _: Engine()), AsyncClient(mesh=mesh) as client:
            await client.submit([{"prompt": str(i), "max_tokens": 8} for i in range(200)], job="j")

            async def some() -> bool:
                return (await _patient(client.status("j"))).ok >= 20

            await until(some, 60)
            cluster.kill(0)

            async def ended() -> bool:
                return (await _patient(client.status("j"))).state == "completed_with_errors"

            await until(ended, 90)
            audit = await client.audit("j")
            assert (audit.ok, audit.dead, audit.queued, audit.landing) == (180, 20, 0, 0)
            assert audit.balanced
            rows = await sql(mesh, "SELECT count(*), count(*) FILTER (status = 'dead') FROM outcomes")
            assert rows == [[200, 20]]
            left = await jsapi.count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job("j"))
            assert left == 0


async def _patient(asked):
    """The answer; a cluster that elects a leader may take its time, and then there is none yet."""
    try:
        return await asked
    except HeadraceError:
        return Nothing


class Nothing:
    """No answer."""

    ok = -1
    state = ""
