"""A worker with the least privilege: it pulls, renews, publishes and acks, and may look at and create
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.contracts.messages import FunctionSpec
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision, register_function
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.worker.harness import one_loop, put, results, running, task, until_empty, with_worker

pytestmark = pytest.mark.anyio

AUTHORIZATION = """
authorization {
  users: [
    { user: admin, password: admin }
    { user: worker, password: worker, permissions: {
        publish: [
          "$JS.API.CONSUMER.MSG.NEXT.HR_TASKS.>", "$JS.ACK.HR_TASKS.>", "$JS.ACK.*.*.HR_TASKS.>",
          "hr.results.>", "hr.dead.>", "$KV.HR_workers.>",
          "$JS.API.STREAM.MSG.GET.KV_HR_functions", "$JS.API.STREAM.MSG.GET.HR_JOBS"
        ]
        subscribe: ["_INBOX.worker.>", "_INBOX.w1-leases.>"]
    } }
  ]
}
"""

SLOW = {"delay_ms": "1500"}


@one_loop
async def test_a_worker_without_rights_to_manage_binds_to_what_is_there(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", durability="relaxed", extra_config=AUTHORIZATION)
    server.start()
    try:
        base = Settings(
            url=server.url,
            dir=str(tmp_path),
            durability="relaxed",
            ack_wait_s=1.0,
            user="admin",
            password="admin",
        )
        async with await Mesh.connect(base, name="admin") as mesh:
            await provision(mesh)
            await register_function(mesh, FunctionSpec(name="generate", engine="echo", model="echo"))
            limited = with_worker(
                base, user="worker", password="worker", name="w1", engine_options={"delay_ms": "1500"}
            )
            async with running(limited):
                await put(mesh, [task(i) for i in range(20)])
                await until_empty(mesh)
            assert sorted((r.index, r.status, r.attempt) for r in await results(mesh)) == [
                (i, "ok", 1) for i in range(20)
            ]
    finally:
        server.kill()
