"""A worker with the least privilege: it pulls, renews, publishes and acks, and may look at and create
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.contracts import codec
from headrace.contracts.messages import BlobPrompt, FunctionSpec, TextPrompt
from headrace.contracts.objects import blob_of
from headrace.mesh.blobs import BlobStore
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
          "$KV.HR_suspects.>", "$JS.API.STREAM.MSG.GET.KV_HR_suspects",
          "$JS.API.STREAM.MSG.GET.KV_HR_functions", "$JS.API.STREAM.MSG.GET.HR_JOBS",
          "$JS.API.STREAM.MSG.GET.OBJ_HR_blobs", "$O.HR_blobs.>"
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
                data = codec.PROMPT.encode(TextPrompt(text="x" * 1_500_000))
                blob = blob_of("j/20@1", "input", data)
                await BlobStore(mesh).put(blob, data)
                await put(mesh, [*(task(i) for i in range(20)), task(20, prompt=BlobPrompt(blob=blob))])
                await until_empty(mesh)
            found = sorted(await results(mesh), key=lambda r: r.index)
            assert [(r.index, r.status, r.attempt) for r in found] == [(i, "ok", 1) for i in range(21)]
            assert found[20].blob is not None
            assert len(await BlobStore(mesh).get(found[20].blob)) > 1_500_000
    finally:
        server.kill()


@one_loop
@pytest.mark.parametrize("may", [True, False])
async def test_a_worker_tells_others_of_suspects_if_it_may_and_loses_nothing_if_not(
    may: bool, tmp_path: Path
) -> None:
    rights = AUTHORIZATION if may else AUTHORIZATION.replace("HR_suspects", "HR_nothing")
    server = NatsServer(tmp_path / "nats", durability="relaxed", extra_config=rights)
    server.start()
    try:
        base = Settings(
            url=server.url,
            dir=str(tmp_path),
            durability="relaxed",
            user="admin",
            password="admin",
            max_tries=2,
        )
        async with await Mesh.connect(base, name="admin") as mesh:
            await provision(mesh)
            await register_function(mesh, FunctionSpec(name="generate", engine="echo", model="echo"))
            limited = with_worker(
                base,
                user="worker",
                password="worker",
                name="w1",
                slots=8,
                engine_options={"delay_ms": "20", "die_on": "poison"},
            )
            texts = ["fine", "fine", "poison", "fine"]
            async with running(limited) as worker:
                await put(mesh, [task(i, prompt=TextPrompt(text=text)) for i, text in enumerate(texts)])
                await until_empty(mesh)
                assert worker.host.deaths == 2
            found = {r.index: r for r in await results(mesh)}
            assert set(found) == {0, 1, 2, 3}
            assert found[2].error is not None
            assert found[2].error.type == ("poison" if may else "tries_exhausted")
            assert [found[i].status for i in (0, 1, 3)] == ["ok"] * 3 or not may
    finally:
        server.kill()
