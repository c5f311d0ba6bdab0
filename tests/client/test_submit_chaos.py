"""Submitters and brokers that die: the same command again makes the job whole, and nothing is stored twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import JetStreamError
from headrace.mesh.provision import provision, register_function
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.client.harness import (
    SPEC,
    SubmitProcess,
    assert_whole,
    manifest,
    plain,
    stored_tasks,
    until,
    write,
)

pytestmark = pytest.mark.anyio
COUNT = 10_000

Start = Callable[..., SubmitProcess]


@pytest.fixture
def anyio_backend() -> str:
    """What is tested runs in other processes."""
    return "asyncio"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", plain(COUNT))


@pytest.fixture
def start(settings: Settings, source: Path) -> Iterator[Start]:
    started: list[SubmitProcess] = []

    def begin(**options: Any) -> SubmitProcess:
        process = SubmitProcess(settings, source, "j", **options)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


@pytest.mark.parametrize(
    ("crash_at", "stored", "closed"),
    [
        ("submit-opened", None, ""),
        ("submit-batch-stored:1", 999, ""),
        ("submit-batch-stored:6", 5_994, ""),
        ("submit-batch-stored:11", COUNT, "sealed"),
        ("submit-sealed", COUNT, "sealed"),
    ],
)
async def test_killed_at_each_step_the_same_command_goes_on(
    ready: Mesh, start: Start, crash_at: str, stored: int | None, closed: str
) -> None:
    code, _ = await start(crash_at=crash_at).finished()
    assert code == -signal.SIGKILL
    if stored is not None:
        found = await manifest(ready, "j")
        assert (found.stored, found.closed) == (stored, closed)
    code, receipt = await start().finished()
    assert code == 0
    assert (receipt["submitted"], receipt["resumed_from"]) == (COUNT, stored or 0)
    await assert_whole(ready, "j", COUNT)


async def test_killed_again_and_again_at_any_moment(ready: Mesh, start: Start) -> None:
    kills = 0
    while True:
        process = start()
        try:
            code, receipt = await process.finished(timeout_s=0.3 + 0.04 * kills)
            break
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
    assert code == 0, receipt
    assert receipt["submitted"] == COUNT
    await assert_whole(ready, "j", COUNT)


async def test_two_processes_at_once_and_one_of_them_killed(ready: Mesh, start: Start) -> None:
    doomed, other = start(crash_at="submit-batch-stored:4"), start()
    (killed, _), (code, receipt) = await asyncio.gather(doomed.finished(), other.finished())
    assert killed in (-signal.SIGKILL, 0)  # 0 if the other one stored most of it
    assert (code, receipt["submitted"]) == (0, COUNT)
    await assert_whole(ready, "j", COUNT)


async def _stored(mesh: Mesh) -> int:
    try:
        return (await manifest(mesh, "j")).stored
    except (AssertionError, HeadraceError, JetStreamError):
        return 0


async def test_the_broker_is_killed_in_mid_burst(
    nats_server: NatsServer, settings: Settings, start: Start
) -> None:
    async with await Mesh.connect(settings, name="setup") as mesh:
        await provision(mesh)
        await register_function(mesh, SPEC)
        process = start(patience_s=1.0)

        async def half() -> bool:
            return await _stored(mesh) >= COUNT // 2

        await until(half)
        nats_server.kill()
    code, said = await process.finished()
    confirmed = 0
    if code == 0:
        # It was quicker than the kill: then all must be there.
        assert said["submitted"] == COUNT
    else:
        assert said["error"]["code"] not in ("error", "")
        assert "items are confirmed as stored" in said["error"]["message"]
        confirmed = int(said["error"]["message"].split(": ")[1].split(" of ")[0].replace(",", ""))
        assert confirmed >= 4_995
    await asyncio.to_thread(nats_server.restart)
    async with await Mesh.connect(settings, name="again") as mesh:
        assert (await manifest(mesh, "j")).stored >= confirmed
        code, receipt = await start().finished()
        assert (code, receipt["submitted"]) == (0, COUNT)
        assert receipt["resumed_from"] >= confirmed
        await assert_whole(mesh, "j", COUNT)


async def test_a_broker_that_comes_back_in_time_is_not_noticed(
    nats_server: NatsServer, settings: Settings, start: Start
) -> None:
    async with await Mesh.connect(settings, name="setup") as mesh:
        await provision(mesh)
        await register_function(mesh, SPEC)
        process = start()

        async def begun() -> bool:
            return await _stored(mesh) > 0

        await until(begun)
        for _ in range(3):
            before = await _stored(mesh)
            nats_server.kill()
            await asyncio.to_thread(nats_server.restart)

            async def went_on(before: int = before) -> bool:
                return process.process.poll() is not None or await _stored(mesh) > before

            await until(went_on)
        code, receipt = await process.finished()
        assert (code, receipt.get("submitted")) == (0, COUNT), receipt

        async def connected() -> bool:
            return mesh.connected

        await until(connected)
        assert len(await stored_tasks(mesh, "j")) == COUNT
        await assert_whole(mesh, "j", COUNT)
