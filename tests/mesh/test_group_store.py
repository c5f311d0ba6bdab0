"""Many askers, few batches: each hears of its own messages, and sequences are those of the stream."""

from __future__ import annotations

import asyncio

import pytest

from headrace.contracts.errors import Refused, Unavailable
from headrace.mesh.connection import Mesh
from headrace.mesh.group_store import GroupStore
from headrace.mesh.jsapi import JetStreamError, get_message, last_message, stream_info
from headrace.mesh.server import NatsServer
from headrace.mesh.wire import OutMessage

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(60),
    pytest.mark.parametrize("together", [True, False], ids=["in batches", "by themselves"]),
]


def state(agent: int | str, data: bytes = b"{}") -> OutMessage:
    return OutMessage(f"hr.agents.state.a{agent}", data)


async def test_each_gets_the_sequence_of_its_own(mesh: Mesh, *, together: bool) -> None:
    store = GroupStore(mesh, mesh.topology.agents, together=together)
    asks = [[(state(n), 0)] + [(state(f"{n}-{i}"), None) for i in range(n % 3)] for n in range(40)]
    last = await asyncio.gather(*(store.store(members) for members in asks))
    for members, seq in zip(asks, last, strict=True):
        found = await get_message(mesh, mesh.topology.agents, seq)
        assert found is not None
        assert found.subject == members[-1][0].subject
    assert int((await stream_info(mesh, mesh.topology.agents))["state"]["messages"]) == sum(map(len, asks))


async def test_a_wrong_expectation_is_its_askers_alone(mesh: Mesh, *, together: bool) -> None:
    store = GroupStore(mesh, mesh.topology.agents, together=together)
    await store.store([(state(3), 0)])
    done = await asyncio.gather(*(store.store([(state(n), 0)]) for n in range(6)), return_exceptions=True)
    assert [isinstance(d, int) for d in done] == [True, True, True, False, True, True]
    refused = done[3]
    assert isinstance(refused, JetStreamError)
    assert refused.err_code == 10071
    for n, seq in enumerate(done):
        if isinstance(seq, int):
            found = await last_message(mesh, mesh.topology.agents, f"hr.agents.state.a{n}")
            assert found is not None
            assert found.sequence == seq


async def test_what_is_too_large_is_its_askers_alone(mesh: Mesh, *, together: bool) -> None:
    store = GroupStore(mesh, mesh.topology.agents, together=together)
    big = b"x" * (mesh.max_payload + 1)
    done = await asyncio.gather(
        *(store.store([(state(n, big if n == 2 else b"{}"), 0)]) for n in range(5)), return_exceptions=True
    )
    assert [isinstance(d, int) for d in done] == [True, True, False, True, True]
    assert isinstance(done[2], Refused)


async def test_all_of_one_asker_or_none(mesh: Mesh, *, together: bool) -> None:
    store = GroupStore(mesh, mesh.topology.agents, together=together)
    await store.store([(state(1), 0)])
    with pytest.raises(JetStreamError):
        await store.store([(state(7), 0), (state(1), 0)])
    assert await last_message(mesh, mesh.topology.agents, "hr.agents.state.a7") is None


async def test_an_asker_that_leaves_holds_nobody_up(mesh: Mesh, *, together: bool) -> None:
    store = GroupStore(mesh, mesh.topology.agents, together=together)
    leaving = asyncio.create_task(store.store([(state(1), 0)]))
    staying = asyncio.create_task(store.store([(state(2), 0)]))
    await asyncio.sleep(0)
    leaving.cancel()
    assert isinstance(await staying, int)
    assert isinstance(await store.store([(state(3), 0)]), int)


async def test_a_broker_that_is_away_is_told_to_all(
    mesh: Mesh, nats_server: NatsServer, *, together: bool
) -> None:
    store = GroupStore(mesh, mesh.topology.agents, timeout_s=0.5, together=together)
    nats_server.kill()
    done = await asyncio.gather(*(store.store([(state(n), 0)]) for n in range(3)), return_exceptions=True)
    assert all(isinstance(d, Unavailable) for d in done)
    await asyncio.to_thread(nats_server.restart)
    async with asyncio.timeout(30):
        while not mesh.connected:
            await asyncio.sleep(0.02)
    assert isinstance(
        await GroupStore(mesh, mesh.topology.agents, together=together).store([(state(9), 0)]), int
    )
