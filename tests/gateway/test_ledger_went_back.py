"""A ledger that lost records, or has forged ones: it is said who saw it, and no gateway makes a call on it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import CallOutcome, Completed, Roster
from headrace.gateway.keys import call_id
from headrace.gateway.ledger import StreamLedger
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import stream_info
from headrace.mesh.microservice import call_api
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from tests.chaos.processes import Part
from tests.cli.harness import headrace
from tests.completion.test_marks import Backup
from tests.completion.world import until
from tests.gateway.governed import Governed, governed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def world(nats_server: NatsServer, mesh: Mesh, tmp_path: Path) -> AsyncIterator[Governed]:
    """A gateway that has made a call that a budget counts, then was stopped."""
    with governed(nats_server, mesh, tmp_path / "m") as made:
        await made.start()
        await call_api(mesh, "budget.set", {"budget": "b", "tenant": "t", "unit": "calls", "limit": 50})
        assert (await made.ask("cost_bearing", "k0")).state == "completed"
        await stop(made)
        yield made


async def stop(world: Governed) -> None:
    """SIGTERM: it notes the end of the ledger before it goes."""
    process = world.gateway.process
    assert process is not None
    process.terminate()
    await asyncio.to_thread(process.wait, 30)


async def connected(mesh: Mesh) -> None:
    async def answers() -> bool:
        try:
            await stream_info(mesh, mesh.topology.ledger)
        except HeadraceError:
            return False
        return True

    await until(answers)


async def command(world: Governed, *arguments: str) -> tuple[int, Any, str]:
    """Exit code, decoded answer, and what is said to people."""
    folder = str(world.gateway.log.parent)
    done = await asyncio.to_thread(headrace, *arguments, "--dir", folder, "--json")
    return done.returncode, json.loads(done.stdout), done.stderr


async def refused_start(world: Governed) -> str:
    """Start the gateway, which must not come up; what it says."""
    world.gateway.log.unlink(missing_ok=True)
    await world.start()
    code = await world.gateway.died(30)
    said = world.gateway.tail()
    assert code not in (0, None), said
    return said


async def test_an_older_store_is_found_and_nothing_is_called_on_it(
    nats_server: NatsServer, mesh: Mesh, world: Governed, tmp_path: Path
) -> None:
    backup = Backup(nats_server, tmp_path)
    await connected(mesh)
    await world.start()
    assert (await world.ask("cost_bearing", "k1")).state == "completed"
    await stop(world)
    code, before, _ = await command(world, "ledger", "verify")
    assert (code, before["heads_match"], before["calls"]) == (0, True, 2)
    backup.restore()
    await connected(mesh)
    said = await refused_start(world)
    assert "ledger_went_back" in said or "HR_LEDGER went back" in said
    assert "headrace ledger accept" in said
    code, found, text = await command(world, "ledger", "verify")
    assert code == 1
    assert found["heads_match"] is True  # what is left fits together: only the mark tells
    assert f"HR_LEDGER went back from {before['last_seq']} to {found['last_seq']}" in found["went_back"]
    assert f"the gateways of {world.gateway.log.parent} saw it" in found["went_back"]
    assert "headrace ledger accept" in text
    assert len(world.heard("k1")) == 1
    # Somebody has looked, and takes it as it is.
    code, accepted, _ = await command(world, "ledger", "accept")
    assert (code, accepted["calls"], "went_back" in accepted) == (0, 1, False)
    code, found, _ = await command(world, "ledger", "verify")
    assert (code, found) == (0, accepted)
    await world.start()
    assert (await world.ask("cost_bearing", "k2")).state == "completed"


async def test_a_gateway_that_runs_admits_nothing_once_it_went_back(
    nats_server: NatsServer, mesh: Mesh, world: Governed, tmp_path: Path
) -> None:
    backup = Backup(nats_server, tmp_path)
    await connected(mesh)
    await world.start()
    assert (await world.ask("cost_bearing", "k1")).state == "completed"
    backup.restore()
    await connected(mesh)
    last = (await stream_info(mesh, mesh.topology.ledger))["state"]["last_seq"]
    # Asked again at once: the record of the first time is gone, and it must not be made a second time.
    for key in ("k1", "k2"):
        try:
            answer = await world.ask("cost_bearing", key, wait_s=1.0)
            assert answer.state == "in_progress"
        except HeadraceError:
            pass
    assert await world.gateway.died(40) not in (0, None), world.gateway.tail()
    assert (await stream_info(mesh, mesh.topology.ledger))["state"]["last_seq"] == last
    assert (len(world.heard("k1")), len(world.heard("k2"))) == (1, 0)
    assert "HR_LEDGER went back" in world.gateway.tail()
    await refused_start(world)


@pytest.mark.slow
async def test_what_only_completion_saw_counts_as_well(
    nats_server: NatsServer, mesh: Mesh, world: Governed, tmp_path: Path
) -> None:
    """The gateway's own mark is gone with its machine."""
    completion = Part("completion", world.gateway.log.parent)
    backup = Backup(nats_server, tmp_path)
    await connected(mesh)
    try:
        completion.start()
        await completion.ready()
        await world.start()
        assert (await world.ask("cost_bearing", "k1")).state == "completed"
        await stop(world)
        code, before, _ = await command(world, "ledger", "verify")  # completion looks at the streams
        assert code == 0
        completion.kill()
        backup.restore()
        await connected(mesh)
        for path in (world.gateway.log.parent / "run").glob("ledger*"):
            path.unlink()
        completion.start()
        await completion.ready()
        said = await refused_start(world)
        assert "completion saw it" in said
        code, found, text = await command(world, "ledger", "verify")
        assert code == 1
        assert "completion saw it" in found["went_back"]
        assert f"HR_LEDGER went back from {before['last_seq']} to" in found["went_back"]
        assert "completion saw it" in text
        # What the ledger forgot is still in the data plane, until it is made again.
        sql = "SELECT call, kind FROM call_records WHERE sequence > {} ORDER BY sequence"
        code, rows, _ = await command(world, "sql", sql.format(found["last_seq"]))
        assert [(r["call"], r["kind"]) for r in rows] == [
            (call_id("t", "a", "k1"), "intent"), (call_id("t", "a", "k1"), "completed"),
        ]  # fmt: skip
        code, _, _ = await command(world, "ledger", "accept")
        assert code == 0
        code, _, _ = await command(world, "ledger", "verify")
        assert code == 0
        code, rebuilt, _ = await command(world, "rebuild")
        assert (code, rebuilt["identical"], rebuilt["tables"]["call_records"]) == (1, False, 2)
        code, rebuilt, _ = await command(world, "rebuild")
        assert (code, rebuilt["identical"]) == (0, True)
        await world.start()
        assert (await world.ask("cost_bearing", "k2")).state == "completed"
    finally:
        completion.kill()


@pytest.mark.parametrize(
    ("how", "where", "says"),
    [
        # A broker that was killed reads its blocks, and cuts the stream where one is damaged.
        ("kill", "middle", "HR_LEDGER went back from"),
        # One that was stopped believes its index: the message stays, and can only not be read.
        ("stop", "end", "HR_LEDGER cannot give its message number"),
        ("stop", "middle", "numbers up to"),
    ],
)
async def test_one_flipped_bit_is_found(
    nats_server: NatsServer, mesh: Mesh, world: Governed, how: str, where: str, says: str
) -> None:
    getattr(nats_server, how)()
    flip_a_bit(nats_server.folder, where)
    nats_server.restart()
    await connected(mesh)
    code, found, text = await command(world, "ledger", "verify")
    assert code == 1
    assert says in found["went_back"]
    assert "headrace ledger accept" in text
    if where == "end" or how == "kill":  # else its end is as it was: only who reads all of it sees that
        assert says in await refused_start(world)
    # What is left is taken as it is: budgets are what its records make of them, and calls are made again.
    code, accepted, _ = await command(world, "ledger", "accept")
    assert (code, accepted["heads_match"]) == (0, True), accepted
    await world.start()
    assert (await world.ask("cost_bearing", "k1")).state == "completed"
    assert (await command(world, "ledger", "verify"))[0] == 0


async def test_a_cut_between_a_record_and_its_head_is_mended(
    nats_server: NatsServer, mesh: Mesh, world: Governed
) -> None:
    """The last message is the head that the call's end moved: without it nothing of that budget could be settled."""
    nats_server.kill()
    flip_a_bit(nats_server.folder, "end")
    nats_server.restart()
    await connected(mesh)
    code, found, _ = await command(world, "ledger", "verify")
    assert (code, found["heads_match"]) == (1, False)
    assert "budget t/b" in found["differences"][0]
    folder = str(world.gateway.log.parent)
    for point in ("losses-accepted", "heads-mended"):
        done = await asyncio.to_thread(headrace, "ledger", "accept", "--dir", folder, HEADRACE_CRASH_AT=point)
        assert done.returncode == -signal.SIGKILL, (point, done)
    code, accepted, _ = await command(world, "ledger", "accept")
    assert (code, accepted["heads_match"]) == (0, True)
    await world.start()
    assert (await world.ask("cost_bearing", "k1")).state == "completed"
    shown = msgspec.json.decode(await call_api(mesh, "budget.show", {}))["budgets"]
    assert [(line["posted"], line["held"]) for line in shown] == [(2, 0)]


def flip_a_bit(folder: Path, where: str) -> None:
    [block] = sorted(folder.glob("jetstream/**/HR_LEDGER/msgs/*.blk"))[-1:]
    data = bytearray(block.read_bytes())
    data[-20 if where == "end" else len(data) // 2] ^= 1
    block.write_bytes(bytes(data))


async def test_records_that_no_gateway_wrote_are_named(mesh: Mesh, world: Governed) -> None:
    call = call_id("t", "a", "k0")
    head = await StreamLedger(mesh).head("t", "b")
    assert head is not None
    period = head.head.periods[""]
    forged = msgspec.structs.replace(
        head.head, periods={"": msgspec.structs.replace(period, posted=period.posted - 1)}
    )
    await publish(mesh, mesh.topology.ledger, "hr.ledger.budget.t.b", codec.BUDGET_HEAD.encode(forged))
    code, found, text = await command(world, "ledger", "verify")
    assert (code, found["heads_match"], "went_back" in found) == (1, False, False)
    assert len(found["differences"]) == 1
    assert "budget t/b" in found["differences"][0]
    assert "restore" in text
    # A list that names no budget any more: it would bound nobody.
    await publish(mesh, mesh.topology.ledger, "hr.ledger.roster.t", codec.ROSTER.encode(Roster(tenant="t")))
    code, found, _ = await command(world, "ledger", "verify")
    assert (code, found["differences"][0]) == (1, "budget t/b is not on its tenant's list: it bounds nobody")
    # A second end of a call, and what is no record at all.
    again = Completed(
        call=call,
        tenant="t",
        attempt=1,
        owner="g1",
        epoch=1,
        at_us=1,
        outcome=CallOutcome(),
        cost_micro=10**9,
    )
    await publish(mesh, mesh.topology.ledger, f"hr.ledger.call.t.{call}", codec.CALL_RECORD.encode(again))
    await publish(mesh, mesh.topology.ledger, "hr.ledger.call.t.other", codec.CALL_RECORD.encode(again))
    await publish(mesh, mesh.topology.ledger, "hr.ledger.call.t.other", b"nonsense")
    code, found, _ = await command(world, "ledger", "verify")
    assert (code, found["heads_match"]) == (1, False)
    texts = "\n".join(found["differences"])
    assert f"call {call}: Completed of attempt 1 follows an attempt that is completed" in texts
    assert "hr.ledger.call.t.other" in texts
    assert len(found["differences"]) == 5
    # The hole is closed, and somebody takes it as it is: the budget is what its records make of it.
    code, found, _ = await command(world, "ledger", "accept")
    assert (code, found["heads_match"]) == (0, True)
    assert (await command(world, "ledger", "verify"))[0] == 0
    roster = await StreamLedger(mesh).roster("t")
    assert roster is not None
    assert [b.budget for b in roster.roster.budgets] == ["b"]
    head = await StreamLedger(mesh).head("t", "b")
    assert head is not None
    assert head.head.periods == {"": period}
    await publish(mesh, mesh.topology.ledger, "hr.ledger.call.t.other", b"nonsense again")
    code, again, _ = await command(world, "ledger", "verify")
    assert (code, len(again["differences"])) == (1, 1)
    # A gateway goes on with the other calls.
    await world.start()
    assert (await world.ask("cost_bearing", "k1")).state == "completed"


async def test_what_was_proved_before_is_proved_again(
    nats_server: NatsServer, mesh: Mesh, world: Governed, tmp_path: Path
) -> None:
    """With the marks gone, a ledger that was cut and grew again to the same length is told by the last proof alone."""
    backup = Backup(nats_server, tmp_path)
    await connected(mesh)
    await world.start()
    assert (await world.ask("cost_bearing", "k1")).state == "completed"
    await stop(world)
    _, before, _ = await command(world, "ledger", "verify")
    backup.restore()
    await connected(mesh)
    (world.gateway.log.parent / "run" / "ledger.json").unlink()
    await world.start()
    assert (await world.ask("cost_bearing", "k2")).state == "completed"
    code, found, _ = await command(world, "ledger", "verify")
    assert found["last_seq"] == before["last_seq"]
    assert code == 1
    assert "are not those that were proved before" in found["went_back"]
