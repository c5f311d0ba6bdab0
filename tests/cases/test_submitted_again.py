"""The same work submitted again, by accident or on purpose, and work that only looks the same (A11, A17)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.client import AsyncClient
from headrace.contracts.messages import FunctionSpec
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import register_function
from headrace.mesh.server import NatsServer
from tests.cases.conftest import MakeMesh
from tests.chaos.processes import ProcessMesh
from tests.cli.harness import write_prompts
from tests.completion.world import sql, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

WINDOW_NS = 100_000_000


async def forget_message_ids_soon(mesh: Mesh) -> None:
    """Shrink the broker's window of message ids, as if 180 s had passed after each message."""
    for stream in (mesh.topology.tasks, mesh.topology.results, mesh.topology.jobs):
        config = (await jsapi.stream_info(mesh, stream))["config"]
        await jsapi.call(mesh, f"STREAM.UPDATE.{stream}", config | {"duplicate_window": WINDOW_NS})


def submit(parts: ProcessMesh, path: Path, job: str) -> dict[str, object]:
    done = parts.submit(path, job)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("restart", [False, True], ids=["after-the-window", "after-a-broker-restart"])
@pytest.mark.parametrize("ended", [False, True], ids=["while-it-runs", "after-its-end"])
async def test_a11_the_same_job_again_adds_nothing(
    nats_server: NatsServer, mesh: Mesh, make_mesh: MakeMesh, tmp_path: Path, restart: bool, ended: bool
) -> None:
    parts = make_mesh(engine="echo", slots=4, engine_options={} if ended else {"delay_ms": 100})
    await forget_message_ids_soon(mesh)
    await parts.start()
    path = write_prompts(tmp_path / "in.jsonl", 60)
    assert submit(parts, path, "j")["submitted"] == 60
    async with AsyncClient(mesh=mesh) as client:
        if ended:
            await client.wait("j", timeout_s=30)
        if restart:
            nats_server.kill()
            await asyncio.to_thread(nats_server.restart)
            await until(lambda: mesh.connected)
        else:
            await asyncio.sleep(3 * WINDOW_NS / 1e9)
        again = submit(parts, path, "j")
        assert (again["submitted"], again["resumed_from"]) == (60, 60)
        status = await client.wait("j", timeout_s=40)
        assert (status.state, status.submitted, status.ok) == ("completed", 60, 60)
        if not restart:  # a broker that is killed may forget an ack: its item runs twice, and has one outcome
            assert status.duplicates == 0
        rows = await sql(mesh, 'SELECT count(*), count(DISTINCT "index"), max(attempt) FROM outcomes')
        assert rows[0][:2] == [60, 60]
        assert (await client.audit("j")).balanced


async def test_a17_two_kinds_of_task_and_two_jobs_may_share_an_external_id(
    mesh: Mesh, make_mesh: MakeMesh
) -> None:
    parts = make_mesh(engine="echo", function="generate")
    other = make_mesh(engine="echo", function="summarise")
    await parts.start()
    other.parts["worker"].start()
    await other.parts["worker"].ready()
    await register_function(mesh, FunctionSpec(name="nobody", engine="echo"))
    lines = [{"prompt": "the same", "custom_id": "order-1"}]
    async with AsyncClient(mesh=mesh) as client:
        for job, function in (("a", "generate"), ("b", "summarise"), ("c", "generate")):
            receipt = await client.submit(lines, job=job, function=function)
            assert receipt.submitted == 1
        for job in "abc":
            assert (await client.wait(job, timeout_s=30)).ok == 1
    rows = await sql(mesh, "SELECT job, function, custom_id FROM outcomes ORDER BY job")
    assert rows == [
        ["a", "generate", "order-1"],
        ["b", "summarise", "order-1"],
        ["c", "generate", "order-1"],
    ]
