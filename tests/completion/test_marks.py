"""A broker that lost what it acknowledged is found by the marks in the data plane, and told until it is accepted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.completion.marks import Marks
from headrace.completion.store import Store
from headrace.contracts.api import Finding
from headrace.contracts.errors import HeadraceError, NotFound
from headrace.mesh import jsapi
from headrace.mesh.checks.marks import find_loss, read_mark
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.provision import provision
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.completion.world import Producer, process, register, serving, sql, until

pytestmark = pytest.mark.anyio

JOBS, TASKS, DEAD = "HR_JOBS", "HR_TASKS", "HR_DEAD"


class Backup:
    """A copy of the broker's store; `restore` is what a lost disk or an old backup does."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self.server = server
        self.store = server.folder / "jetstream"
        self.copy = folder / "backup"
        server.stop()
        shutil.copytree(self.store, self.copy)
        server.restart()

    def restore(self) -> None:
        self.server.kill()
        shutil.rmtree(self.store)
        shutil.copytree(self.copy, self.store)
        self.server.restart()


async def letters(mesh: Mesh, *bodies: str) -> None:
    for body in bodies:
        await publish(mesh, DEAD, "hr.dead.test", body.encode())


async def connected(mesh: Mesh) -> None:
    """The connection is back, and JetStream answers."""

    async def answers() -> bool:
        try:
            await jsapi.stream_info(mesh, DEAD)
        except HeadraceError:
            return False
        return True

    await until(answers)


async def lost(marks: Marks) -> list[str]:
    return [loss.found for loss in await marks.losses()]


async def own_checks(mesh: Mesh, *accept: int) -> dict[str, Any]:
    return msgspec.json.decode(await call_api(mesh, "checks", {"accept_losses": list(accept)}, timeout_s=20))


async def history(mesh: Mesh) -> list[Finding]:
    reply = msgspec.convert((await own_checks(mesh))["findings"], list[Finding])
    return [f for f in reply if f.check == "stream history"]


# --- a mark and its stream ----------------------------------------------------------------------------


async def test_a_stream_that_goes_forward_has_lost_nothing(mesh: Mesh) -> None:
    empty = await read_mark(mesh, DEAD)
    assert empty is not None
    assert (empty.last_seq, empty.messages, empty.digest) == (0, 0, None)
    assert await find_loss(mesh, empty) is None
    await letters(mesh, "one", "two")
    mark = await read_mark(mesh, DEAD)
    assert mark is not None
    assert (mark.last_seq, mark.messages) == (2, 2)
    assert mark.digest is not None
    await letters(mesh, "three")
    assert await find_loss(mesh, mark) is None
    assert await find_loss(mesh, empty) is None
    assert await read_mark(mesh, "HR_NOWHERE") is None


async def test_an_acked_task_is_no_loss(mesh: Mesh) -> None:
    await publish(mesh, TASKS, "hr.tasks.f.normal.t6.j", b"{}")
    mark = await read_mark(mesh, TASKS)
    assert mark is not None
    await jsapi.purge(mesh, TASKS, filter_="hr.tasks.>")
    assert await find_loss(mesh, mark) is None


async def test_a_stream_that_was_made_anew_is_a_loss_unless_it_was_empty(mesh: Mesh) -> None:
    await letters(mesh, "one", "two")
    full, empty = await read_mark(mesh, DEAD), await read_mark(mesh, JOBS)
    assert full is not None
    assert empty is not None
    for stream in (DEAD, JOBS):
        await jsapi.call(mesh, f"STREAM.DELETE.{stream}")
    assert await find_loss(mesh, full) == "HR_DEAD is gone, and what it held: 2 messages"
    assert await find_loss(mesh, empty) is None
    await provision(mesh)
    found = await find_loss(mesh, full)
    assert found is not None
    assert "HR_DEAD was made anew at" in found
    assert "the 2 messages that it held, up to number 2, are gone" in found
    assert await find_loss(mesh, empty) is None


async def test_a_store_that_went_back(nats_server: NatsServer, mesh: Mesh, tmp_path: Path) -> None:
    await letters(mesh, "one", "two")
    backup = Backup(nats_server, tmp_path)
    await connected(mesh)
    await letters(mesh, "three", "four", "five")
    mark = await read_mark(mesh, DEAD)
    assert mark is not None
    backup.restore()
    await connected(mesh)
    assert await find_loss(mesh, mark) == (
        "HR_DEAD went back from 5 to 2: the broker's storage lost acknowledged data"
    )
    # The numbers are given again: the count alone would hide it.
    await letters(mesh, "other", "others", "and more", "still more")
    found = await find_loss(mesh, mark)
    assert found is not None
    assert "HR_DEAD has another message as number 5 than before" in found


async def test_a_killed_broker_that_kept_all_is_no_loss(nats_server: NatsServer, mesh: Mesh) -> None:
    await letters(mesh, *map(str, range(100)))
    mark = await read_mark(mesh, DEAD)
    assert mark is not None
    nats_server.kill()
    nats_server.restart()
    await connected(mesh)
    assert await find_loss(mesh, mark) is None


# --- marks in the data plane --------------------------------------------------------------------------


async def test_marks_are_written_when_a_stream_moved_and_only_then(mesh: Mesh, store: Store) -> None:
    marks = Marks(mesh, store)
    await marks.look()

    async def noted() -> dict[str, tuple[int, Any]]:
        rows = await store.read(
            lambda c: c.execute("SELECT stream, last_sequence, noted_at FROM stream_marks").fetchall()
        )
        return {stream: (last, at) for stream, last, at in rows}

    first = await noted()
    assert {TASKS, JOBS, DEAD, "HR_RESULTS", "KV_HR_functions"} <= set(first)
    assert "KV_HR_workers" not in first  # its values expire
    await letters(mesh, "one")
    await marks.look()
    second = await noted()
    assert second.pop(DEAD)[0] == 1
    first.pop(DEAD)
    assert second == first
    assert await lost(marks) == []
    assert (await marks.findings())[0].state == "ok"


async def test_a_loss_is_told_until_it_is_accepted_and_once(mesh: Mesh, store: Store) -> None:
    marks = Marks(mesh, store)
    await letters(mesh, "one", "two")
    await marks.look()
    await jsapi.call(mesh, f"STREAM.DELETE.{DEAD}")
    await provision(mesh)
    for _ in range(3):
        await marks.look()  # found once: the stream has its new mark
    (finding,) = await marks.findings()
    assert (finding.check, finding.state) == ("stream history", "fail")
    assert "HR_DEAD was made anew" in finding.found
    assert "headrace audit" in finding.mend
    assert finding.mend.endswith("headrace doctor --accept-loss 1")
    with pytest.raises(NotFound, match="there is no loss 7"):
        await marks.accept([1, 7])
    assert len(await lost(marks)) == 1  # all of a request, or nothing
    assert await marks.accept([1]) == [1]
    assert await marks.accept([1]) == []
    assert await lost(marks) == []
    # The next one has its own number.
    await letters(mesh, "three")
    await marks.look()
    await jsapi.call(mesh, f"STREAM.DELETE.{DEAD}")
    await provision(mesh)
    await marks.look()
    assert [loss.id for loss in await marks.losses()] == [2]


async def test_a_broker_that_is_away_is_no_loss(nats_server: NatsServer, mesh: Mesh, store: Store) -> None:
    marks = Marks(mesh, store)
    await letters(mesh, "one")
    await marks.look()
    nats_server.kill()
    await until(lambda: not mesh.connected)
    await marks.look()
    assert await lost(marks) == []
    nats_server.restart()
    await connected(mesh)
    await marks.look()
    assert await lost(marks) == []


# --- completion ---------------------------------------------------------------------------------------


async def test_completion_finds_at_its_start_what_was_lost_while_it_was_down(
    nats_server: NatsServer, mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    await register(mesh)
    backup = Backup(nats_server, tmp_path)
    await connected(mesh)
    async with process(settings, tmp_path) as completion:
        await Producer(mesh, "early").open()
        assert [f.state for f in await history(mesh)] == ["ok"]
        await Producer(mesh, "late").open()
        assert await completion.stop() == 0  # the stop marks the streams as it leaves them
    backup.restore()
    await connected(mesh)
    async with process(settings, tmp_path) as completion:
        # It says so in its log, and to who asks; and it works on.
        text = completion.log.read_text()
        assert "HR_JOBS went back from 2 to 0: the broker's storage lost acknowledged data" in text
        (finding,) = await history(mesh)
        assert (finding.state, "HR_JOBS went back from 2 to 0" in finding.found) == ("fail", True)
        job = Producer(mesh, "j")
        await job.whole(10)
        await job.work(range(10))
        assert (await job.ended()).ok == 10
        # A kill forgets nothing of it.
        completion.kill()
    async with process(settings, tmp_path):
        assert [f.state for f in await history(mesh)] == ["fail"]
        assert (await own_checks(mesh, 1))["accepted"] == [1]
        assert [f.state for f in await history(mesh)] == ["ok"]
        assert await sql(mesh, "SELECT id, accepted_at IS NOT NULL FROM stream_losses") == [[1, True]]


async def test_completion_looks_again_as_soon_as_the_broker_is_back(
    nats_server: NatsServer, mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    await register(mesh)
    backup = Backup(nats_server, tmp_path)
    await connected(mesh)
    async with serving(settings):
        await Producer(mesh, "a").open()
        assert [f.state for f in await history(mesh)] == ["ok"]  # asking looks, and so marks
        backup.restore()
        await connected(mesh)

        async def told() -> bool:
            return bool(await sql(mesh, "SELECT id FROM stream_losses WHERE stream = 'HR_JOBS'"))

        await until(told, 10)  # sooner than the next round


async def test_completion_answers_with_all_of_its_own_checks(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        found = msgspec.convert((await own_checks(mesh))["findings"], list[Finding])
        assert {f.check: f.state for f in found if not f.check.startswith(("disk", "open files"))} == {
            "stream history": "ok",
            "leases of completion": "ok",
            "jobs that stand still": "ok",
        }
        assert any(f.check == "disk of the data plane" for f in found)
        with pytest.raises(NotFound):
            await own_checks(mesh, 99)


async def test_completion_says_that_it_may_lease_too_few_results(mesh: Mesh, settings: Settings) -> None:
    spec = mesh.topology.results_consumer()
    config = {**spec.config(), "max_ack_pending": 100}
    body = {"stream_name": spec.stream, "config": config, "action": "update"}
    await jsapi.call(mesh, f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}", body)
    async with serving(settings):
        found = msgspec.convert((await own_checks(mesh))["findings"], list[Finding])
    (low,) = [f for f in found if f.check == "leases of completion"]
    assert low.state == "warn"
    assert (
        "HR_RESULTS/completion leases 100 at most; landing holds 6,000 (completion.batch_rows × 3)"
        in low.found
    )
    assert "set max_ack_pending: 6000" in low.mend


async def test_a_job_without_progress_is_told(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service:
        await Producer(mesh, "stuck").open()
        await Producer(mesh, "fresh").open()

        async def both() -> bool:
            return await sql(mesh, "SELECT count(*) FROM jobs") == [[2]]

        await until(both)
        store = service._store
        assert store is not None
        await store.write(
            lambda c: c.execute("UPDATE jobs SET opened_at = opened_at - INTERVAL 7 HOUR WHERE job = 'stuck'")
        )
        found = msgspec.convert((await own_checks(mesh))["findings"], list[Finding])
        (still,) = [f for f in found if f.check == "jobs that stand still"]
        assert (still.state, still.found) == ("warn", "1 have had no outcome for 6 hours: stuck")
        assert still.mend == "headrace audit stuck, or headrace cancel stuck"
