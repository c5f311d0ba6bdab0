"""The ledger's tables in real processes: the writer fails and is killed, records come again, and all is made anew."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.completion.service import database_path
from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.completion.ledger import TABLES, acked, contents, counts, expected, made, projected, store
from tests.completion.world import Process, call_api, process, sql, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

REBUILDING = ("rebuild-begun", "rebuild-read", "rebuild-before-commit", "rebuild-committed")
PROJECTING = ("projection-before-commit", "projection-committed")


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """What a killed process had leased comes again after a second."""
    return msgspec.structs.replace(settings, ack_wait_s=1.0)


async def rebuild(mesh: Mesh) -> dict[str, Any]:
    return msgspec.json.decode(await call_api(mesh, "rebuild", {}, timeout_s=60))


async def test_g2_a_writer_that_fails_and_is_killed_has_every_record_once(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """Every third transaction fails at its end, and every fifth dies in mid-commit, until the ledger is over."""
    records = await made(1)
    left = [records[at : at + 24] for at in range(0, len(records), 24)]
    life = Process(settings, tmp_path, crash_at="projection-before-commit:5")
    life.script = "run_failing_writer.py"
    deaths = 0
    await life.start()
    assert life.process is not None
    while left:
        # A batch each, so that there are many: the next is stored when this one is in, or the writer is dead.
        await store(mesh, left.pop(0))

        async def over() -> bool:
            assert life.process is not None
            return life.process.poll() is not None or await acked(mesh)

        await until(over, 40)
        if life.process.poll() is not None:
            assert life.process.returncode == -signal.SIGKILL, life.log.read_text()[-2_000:]
            deaths += 1
            await life.start()
    life.kill()
    assert deaths >= 2
    assert life.log.read_text().count("not written yet") >= 2
    async with process(settings, tmp_path):
        await projected(mesh)
        assert await counts(mesh) == expected(records)
        assert (await rebuild(mesh))["identical"]


@pytest.mark.parametrize("point", PROJECTING)
async def test_records_that_come_again_change_nothing(
    mesh: Mesh, settings: Settings, tmp_path: Path, point: str
) -> None:
    """Killed before the commit, and between commit and ack: the batch comes again, three times."""
    records = await made(2)
    await store(mesh, records)
    for _ in range(3):
        async with process(settings, tmp_path, crash_at=point) as life:
            assert await life.wait() == -signal.SIGKILL
    async with process(settings, tmp_path):
        await projected(mesh)
        assert await counts(mesh) == expected(records)
        assert (await rebuild(mesh))["identical"]


async def test_killed_at_random_moments(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    records = await made(seed, asked=300)
    storing = asyncio.create_task(store_slowly(mesh, records))
    life = Process(settings, tmp_path)
    for _ in range(4):
        await life.start()
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        life.kill()
    await storing
    async with process(settings, tmp_path):
        await projected(mesh)
        assert await counts(mesh) == expected(records)
        assert (await rebuild(mesh))["identical"]


async def store_slowly(mesh: Mesh, records: list[Any]) -> None:
    for at in range(0, len(records), 20):
        await store(mesh, records[at : at + 20])
        await asyncio.sleep(0.02)


async def test_rebuilt_while_records_still_come(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    records = await made(3, asked=300)
    await store(mesh, records[:500])
    async with process(settings, tmp_path):
        await projected(mesh)
        storing = asyncio.create_task(store_slowly(mesh, records[500:]))
        found = []
        while not storing.done():
            found.append(await rebuild(mesh))
            [[calls]] = await sql(mesh, "SELECT count(*) FROM calls")
            assert calls > 0
        await storing
        assert len(found) > 1
        assert all(one["identical"] for one in found), found
        await projected(mesh)
        assert await counts(mesh) == expected(records)
        before = await contents(mesh)
        last = await rebuild(mesh)
        assert last == {
            "records": len(records), "identical": True, "tables": dict.fromkeys(TABLES, 0), "unreadable": 0,
        }  # fmt: skip
        assert await contents(mesh) == before


@pytest.mark.parametrize("point", REBUILDING)
async def test_a_rebuild_that_is_killed_leaves_whole_tables(
    mesh: Mesh, settings: Settings, tmp_path: Path, point: str
) -> None:
    records = await made(4)
    await store(mesh, records[:-50])
    async with process(settings, tmp_path, crash_at=point) as life:
        await projected(mesh)
        before = await contents(mesh)
        asking = asyncio.create_task(rebuild(mesh))
        assert await life.wait() == -signal.SIGKILL, life.log.read_text()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with process(settings, tmp_path):
        assert await contents(mesh) == before
        await store(mesh, records[-50:])
        await projected(mesh)
        assert await counts(mesh) == expected(records)
        assert (await rebuild(mesh))["identical"]
        assert await counts(mesh) == expected(records)


async def test_a_database_that_is_gone_is_made_again_by_itself(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """Everything was acked, so nothing comes again: what is missing is read from the ledger."""
    records = await made(5)
    await store(mesh, records)
    async with process(settings, tmp_path):
        await projected(mesh)
        before = await contents(mesh)
    for path in database_path(settings).parent.glob("*"):
        path.unlink()
    async with process(settings, tmp_path) as life:

        async def whole() -> bool:
            return await counts(mesh) == expected(records)

        await until(whole, 30)
        assert await contents(mesh) == before
        assert "lacks records that it once had" in life.log.read_text()
        life.kill()
        life.log.unlink()
        await life.start()
        assert await contents(mesh) == before
        assert (await rebuild(mesh))["identical"]
        assert "lacks records" not in life.log.read_text()


async def test_what_is_no_record_is_dead_lettered_and_its_neighbours_go_on(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    records = await made(6)
    await store(mesh, records[:100])
    for subject, data in (
        ("hr.ledger.call.t.x", b"nonsense"),
        ("hr.ledger.call.t.x", b'{"type":"intent"}'),
        ("hr.ledger.budget.t.other", msgspec.json.encode(records[0][1])),
        ("hr.ledger.roster.t", b"\xff"),
        ("hr.ledger.whatever", b"{}"),
    ):
        await publish(mesh, mesh.topology.ledger, subject, data)
    await store(mesh, records[100:])
    async with process(settings, tmp_path):
        await projected(mesh)
        assert await counts(mesh) == expected(records)

        async def letters() -> bool:
            return await sql(mesh, "SELECT count(*) FROM dead") == [[5]]

        await until(letters)
        found = await rebuild(mesh)
        assert (found["identical"], found["unreadable"], found["records"]) == (True, 5, len(records))


async def test_a_rebuild_while_the_broker_is_killed_ends_whole(
    nats_server: Any, mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    records = await made(7, asked=200)
    await store(mesh, records)
    async with process(settings, tmp_path):
        await projected(mesh)
        before = await contents(mesh)
        asking = asyncio.create_task(rebuild(mesh))
        await asyncio.sleep(random.uniform(0.0, 0.1))
        nats_server.kill()
        await until(lambda: not mesh.connected)
        nats_server.restart()
        await until(lambda: mesh.connected)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        async def again() -> bool:
            try:
                return bool((await rebuild(mesh))["identical"])
            except HeadraceError:
                return False

        await until(again, 60)
        assert await contents(mesh) == before
