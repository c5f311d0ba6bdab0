"""What a service says of its broker when it starts, to a user who may look and to one who may not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.client.submit import submit
from headrace.contracts.errors import Conflict, HeadraceError, Unavailable
from headrace.contracts.messages import FunctionSpec
from headrace.gateway.service import GatewayService
from headrace.inference_worker.service import WorkerService
from headrace.mesh import jsapi
from headrace.mesh.checks.consumers import check_consumers, check_strangers
from headrace.mesh.checks.findings import attempt
from headrace.mesh.checks.reading import Reading
from headrace.mesh.checks.server import check_jetstream, check_version
from headrace.mesh.checks.start import check_start
from headrace.mesh.checks.streams import check_streams
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision, register_function
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings, WorkerSettings

pytestmark = pytest.mark.anyio

ECHO = FunctionSpec(name="generate", engine="echo", model="echo", min_shape=6, max_shape=6)


def said(caplog: pytest.LogCaptureFixture, check: str) -> list[logging.LogRecord]:
    return [r for r in caplog.records if getattr(r, "check", "") == check and r.levelno >= logging.WARNING]


# --- an old server ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def older(server: NatsServer, version: bytes) -> AsyncIterator[str]:
    """Address of a proxy through which the broker says that it is of another version."""
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", server.port)
        info = await theirs.readline()
        assert b'"version":"2.15' in info
        head, _, tail = info.partition(b'"version":"')
        writer.write(head + b'"version":"' + version + tail[tail.index(b'"') :])
        for task in (pump(theirs, writer), pump(reader, ours)):
            pumps.add(asyncio.ensure_future(task))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        proxy.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def connect_to(settings: Settings, url: str) -> Mesh:
    return await Mesh.connect(msgspec.structs.replace(settings, url=url), name="test")


@pytest.mark.parametrize("version", [b"2.9.25", b"2.14.2", b"2.15.0"])
async def test_an_old_server_is_found_and_refused(
    nats_server: NatsServer, settings: Settings, version: bytes
) -> None:
    async with older(nats_server, version) as url, await connect_to(settings, url) as mesh:
        found = check_version(mesh)
        assert found.state == "fail"
        assert version.decode() in found.found
        assert found.mend == "run nats-server 2.15.1 or newer"
        with pytest.raises(Unavailable, match=version.decode()) as refused:
            await check_start(mesh, [])
        assert refused.value.code == "server_too_old"


@pytest.mark.parametrize("version", [b"2.15.1", b"2.16.0-RC.2", b"3.0.0"])
async def test_a_new_server_is_fine(nats_server: NatsServer, settings: Settings, version: bytes) -> None:
    async with older(nats_server, version) as url, await connect_to(settings, url) as mesh:
        assert check_version(mesh).state == "ok"


# --- users with few rights ----------------------------------------------------------------------------

NOTHING = """
authorization { users: [
  { user: admin, password: admin }
  { user: blind, password: hush, permissions: { publish: ["hr.api.>"], subscribe: ["_INBOX.blind.>"] } }
  { user: deaf, password: hush, permissions: { publish: [">"], subscribe: ["nothing"] } }
] }
"""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Settings]:
    """A provisioned broker with users who may look at nothing."""
    server = NatsServer(tmp_path / "guarded", durability="relaxed", extra_config=NOTHING)
    server.start()
    try:
        admin = Settings(
            url=server.url, dir=str(tmp_path), durability="relaxed", user="admin", password="admin"
        )
        async with await Mesh.connect(admin, name="admin") as mesh:
            await provision(mesh)
        yield admin
    finally:
        server.kill()


async def test_who_may_not_look_is_told_so_at_once(guarded: Settings) -> None:
    blind = msgspec.structs.replace(guarded, user="blind", password="hush")
    async with await Mesh.connect(blind, name="blind") as mesh:
        began = time.monotonic()
        reading = Reading(mesh)
        found = [*await check_jetstream(reading), *await check_streams(reading)]
        for check in (check_consumers, check_strangers):
            refused = await attempt(check(reading))
            found.append(refused.finding("rest"))  # type: ignore[union-attr]
        assert {f.state for f in found} == {"warn"}
        assert all(f.found.startswith("cannot be read: this user may not ask $JS.API.") for f in found), found
        await check_start(mesh, ["HR_TASKS", "HR_RESULTS"])  # a worker needs no right to look
        assert time.monotonic() - began < 3
        # A publish that is denied waits out its time, as before: whoever stores something tries again.
        with pytest.raises(Unavailable, match="no answer"):
            await mesh.request("hr.tasks.x", b"", timeout_s=0.3)


async def test_who_hears_no_answer_waits_once_for_all(guarded: Settings) -> None:
    deaf = msgspec.structs.replace(guarded, user="deaf", password="hush")
    async with await Mesh.connect(deaf, name="deaf") as mesh:
        began = time.monotonic()
        found = await check_streams(Reading(mesh))
        assert {f.state for f in found} == {"warn"}
        assert all("cannot be read: no answer" in f.found for f in found)
        assert time.monotonic() - began < 9


# --- services ---------------------------------------------------------------------------------------


def worker_settings(settings: Settings, **options: object) -> Settings:
    worker = WorkerSettings(engine="echo", name="w1", **options)  # type: ignore[arg-type]
    return msgspec.structs.replace(settings, worker=worker)


async def start_and_stop(service: WorkerService | GatewayService) -> None:
    await service.start()
    await service.stop()


@pytest.mark.parametrize("service", [WorkerService, GatewayService])
async def test_a_service_does_not_start_where_work_is_dropped(
    mesh: Mesh, settings: Settings, service: type
) -> None:
    config = (await jsapi.stream_info(mesh, "HR_TASKS"))["config"]
    await jsapi.call(mesh, "STREAM.UPDATE.HR_TASKS", {**config, "max_age": 600_000_000_000})
    with pytest.raises(Conflict, match="max_age is 600 s") as refused:
        await start_and_stop(service(worker_settings(settings)))
    assert refused.value.code == "loses_work"
    assert "nats stream edit HR_TASKS --max-age 0ns" in str(refused.value)
    await jsapi.call(mesh, "STREAM.UPDATE.HR_TASKS", config)
    await start_and_stop(service(worker_settings(settings)))


@pytest.mark.parametrize("service", [WorkerService, GatewayService])
async def test_a_service_without_streams_says_what_to_run(settings: Settings, service: type) -> None:
    with pytest.raises(HeadraceError, match="run `headrace init`") as refused:
        await start_and_stop(service(worker_settings(settings)))
    assert refused.value.code == "streams_missing"
    assert "HR_TASKS" in str(refused.value)


async def test_a_worker_says_which_consumer_leases_too_few(
    mesh: Mesh, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """As case S9."""
    await register_function(mesh, ECHO)
    spec = mesh.topology.task_consumer("generate", "normal", 6, max_ack_pending=10)
    body = {"stream_name": spec.stream, "config": spec.config(), "action": "update"}
    await jsapi.call(mesh, f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}", body)
    service = WorkerService(worker_settings(settings, slots=100))
    await service.start()
    try:
        async with asyncio.timeout(10):
            while not said(caplog, "leases of generate"):
                await asyncio.sleep(0.01)
    finally:
        await service.stop()
    (record,) = said(caplog, "leases of generate")
    text, mend = record.__dict__["found"], record.__dict__["mend"]
    assert "max_ack_pending: HR_TASKS/generate-normal-t6 leases 10 at most; 1 workers hold 1" in text
    assert "nats consumer edit HR_TASKS generate-normal-t6 --max-pending 1" in mend


async def test_a_worker_of_a_sound_mesh_says_nothing(
    mesh: Mesh, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    await start_and_stop(WorkerService(worker_settings(settings)))
    assert [r for r in caplog.records if r.getMessage() == "not as it should be"] == []


async def test_a_submit_stores_nothing_where_work_is_dropped(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    await register_function(mesh, ECHO)
    config = (await jsapi.stream_info(mesh, "HR_TASKS"))["config"]
    await jsapi.call(mesh, "STREAM.UPDATE.HR_TASKS", {**config, "discard": "old", "max_msgs": 5})
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "a"}\n' * 20)
    with pytest.raises(Conflict, match="discard is old") as refused:
        await submit(mesh, lines, job="j")
    assert refused.value.code == "loses_work"
    assert (await jsapi.stream_info(mesh, "HR_JOBS"))["state"]["messages"] == 0
    await jsapi.call(mesh, "STREAM.UPDATE.HR_TASKS", config)
    assert (await submit(mesh, lines, job="j")).submitted == 20
