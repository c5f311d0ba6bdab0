"""Governed calls to our own workers, with gateway, worker and broker killed: a result is waited for, never in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.gateway.budgets import Budgets
from headrace.gateway.keys import call_id
from headrace.gateway.ledger import StreamLedger
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import stream_info
from headrace.mesh.server import NatsServer
from tests.chaos.processes import Part
from tests.gateway.fleet import Fleet
from tests.gateway.invariants import (
    budgets_hold,
    durable_before_told,
    heads_are_the_fold,
    held_is_in_doubt,
    one_end,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150), pytest.mark.slow]

CALLS = 12
WORKER = """url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0
[worker]
engine = "echo"
slots = 4
[worker.engine_options]
delay_ms = "400"
"""


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def place(nats_server: NatsServer, mesh: Mesh, tmp_path: Path) -> AsyncIterator[tuple[Fleet, Part]]:
    fleet = Fleet(nats_server, mesh, tmp_path / "m", gateways=2)
    folder = tmp_path / "worker"
    folder.mkdir()
    (folder / "headrace.toml").write_text(WORKER.format(url=nats_server.url), "utf-8")
    worker = Part("worker", folder)
    worker.start()
    try:
        await Budgets(StreamLedger(mesh)).set("t", "calls", unit="calls", limit=100)
        await fleet.mend()
        await worker.ready()
        yield fleet, worker
    except BaseException:
        print(fleet.logs(), worker.tail())
        raise
    finally:
        worker.kill()
        fleet.stop()


async def messages(mesh: Mesh, stream: str) -> int:
    return int((await stream_info(mesh, stream))["state"]["messages"])


@pytest.mark.parametrize("killed", ["gateways", "everything"])
async def test_whatever_dies_each_call_has_the_one_result_of_its_task(
    place: tuple[Fleet, Part], killed: str
) -> None:
    """Its task is stored once, its result stands before the task is acked: so a restart waits, and asks nobody."""
    fleet, worker = place
    mesh = fleet.mesh
    bodies = {f"k{n}": {"prompt": f"say {n}", "max_tokens": 8} for n in range(CALLS)}
    asking = [asyncio.create_task(fleet.ask("generate", k, b, wait_s=2.0)) for k, b in bodies.items()]

    async def some_are_done() -> bool:
        return any(v.state == "completed" for v in (await fleet.fold()).calls.values())

    await fleet.until(some_are_done)
    if killed == "everything":
        worker.kill()
    for gateway in fleet.gateways:
        gateway.kill()
    if killed == "everything":
        await fleet.restart_broker()
    if worker.code is not None:
        worker.start()
        await worker.ready()
    await fleet.mend()

    async def all_are_done() -> bool:
        fold = await fleet.fold()
        assert not [v for v in fold.calls.values() if v.state == "in_doubt"]
        return len(fold.calls) == CALLS and all(v.state == "completed" for v in fold.calls.values())

    await fleet.until(all_are_done)
    await asyncio.gather(*asking)
    answers = {key: await fleet.ask("generate", key, body, wait_s=10.0) for key, body in bodies.items()}
    for key, answer in answers.items():
        assert answer is not None
        assert (answer.state, answer.replayed, answer.attempt) == ("completed", True, 1)
        outcome: dict[str, Any] = answer.outcome or {}
        assert outcome["body"]["choices"][0]["text"] == bodies[key]["prompt"]
    fold = await fleet.fold()
    assert {call for _, call in fold.calls} == {call_id("t", "a", key) for key in bodies}
    assert (fold.heads["t", "calls"].periods[""].posted, fold.heads["t", "calls"].periods[""].held) == (
        CALLS,
        0,
    )
    witness = await fleet.witness({})
    for invariant in (one_end, budgets_hold, held_is_in_doubt, heads_are_the_fold, durable_before_told):
        assert invariant(witness)

    async def nothing_is_left() -> bool:
        streams = (mesh.topology.tasks, mesh.topology.results, mesh.topology.calls)
        return not any([await messages(mesh, stream) for stream in streams])

    await fleet.until(nothing_is_left)
