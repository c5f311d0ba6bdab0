"""Acks around a broker that dies: confirmed or given up at once, and nothing is removed by a number of another run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from headrace.contracts.errors import Unavailable
from headrace.contracts.specs import ConsumerSpec
from headrace.mesh import acks, jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer, Delivery
from headrace.mesh.heads import HeadPurge
from headrace.mesh.provision import create_consumer, provision
from headrace.mesh.publisher import OutMessage, publish_all
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Done, Settler
from tests.mesh.test_consumer import leased, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def safe(settings: Settings) -> AsyncIterator[Mesh]:
    """A mesh of the profile under which runs are purged."""
    async with await Mesh.connect(replace(settings, durability="safe"), name="safe") as mesh:
        await provision(mesh)
        yield mesh


async def fill(mesh: Mesh, n: int, *, ack_wait_s: float = 30.0) -> ConsumerSpec:
    spec = ConsumerSpec(
        stream=mesh.topology.tasks,
        durable="f-normal-t6",
        filter_subject=mesh.subjects.tasks_of_shape("f", "normal", 6),
        ack_wait_s=ack_wait_s,
    )
    await create_consumer(mesh, spec)
    subject = mesh.subjects.task("f", "normal", 6, "j")
    await publish_all(mesh, mesh.topology.tasks, [OutMessage(subject, b"%d" % i) for i in range(n)])
    return spec


async def restart(mesh: Mesh, server: NatsServer) -> None:
    server.kill()
    await until(lambda: not mesh.connected)
    await asyncio.to_thread(server.restart)
    await until(lambda: mesh.connected)


async def delivered(mesh: Mesh, spec: ConsumerSpec) -> int:
    """How far the consumer has delivered, as the broker knows it."""
    return int((await jsapi.consumer_info(mesh, spec.stream, spec.durable))["delivered"]["stream_seq"])


async def test_what_a_killed_broker_forgot_is_given_up_at_once(mesh: Mesh, nats_server: NatsServer) -> None:
    """The broker writes a consumer's state a little later than it delivers: killed at once, it knows less."""
    spec = await fill(mesh, 200)
    _, got = await leased(mesh, spec, 100)
    await restart(mesh, nats_server)
    known = await delivered(mesh, spec)
    async with asyncio.timeout(acks.ANSWER_S):
        forgotten = await acks.Acker(mesh).ack(got)
    assert forgotten == {d for d in got if d.stream_seq > known}
    left = await jsapi.count_subject(mesh, spec.stream, spec.filter_subject)
    assert left == 100 + len(forgotten)


async def test_an_ack_behind_what_was_delivered_is_given_up_after_one_try(mesh: Mesh) -> None:
    """The same over a connection that lasts, as after a change of leaders."""
    spec = await fill(mesh, 50)
    _, got = await leased(mesh, spec, 50)
    config = (await jsapi.consumer_info(mesh, spec.stream, spec.durable))["config"]
    await jsapi.call(mesh, f"CONSUMER.DELETE.{spec.stream}.{spec.durable}")
    await jsapi.call(
        mesh,
        f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}",
        {"stream_name": spec.stream, "config": config, "action": "create"},
    )
    async with asyncio.timeout(2 * acks.ANSWER_S):
        assert await acks.Acker(mesh).ack(got) == set(got)


async def test_who_waits_for_a_forgotten_settle_hears_of_it(mesh: Mesh, nats_server: NatsServer) -> None:
    spec = await fill(mesh, 100)
    _, got = await leased(mesh, spec, 100)
    await restart(mesh, nats_server)
    known = await delivered(mesh, spec)
    settler = Settler(mesh)
    futures = [settler.begin(d, Done()) for d in got]
    answers = await asyncio.gather(*futures, return_exceptions=True)
    for delivery, answer in zip(got, answers, strict=True):
        assert isinstance(answer, Unavailable) == (delivery.stream_seq > known)


async def test_a_batch_consumer_is_not_held_up_by_what_is_forgotten(
    mesh: Mesh, nats_server: NatsServer
) -> None:
    """Its whole window is delivered and not settled when the broker dies: it goes on at once all the same."""
    spec = await fill(mesh, 300)
    consumer = BatchConsumer(mesh, spec, batch=50, wait_s=0.05, window=150)
    settler = Settler(mesh)
    await consumer.start()
    done: set[bytes] = set()
    held: list[list[Delivery]] = []
    async with asyncio.timeout(10.0):
        async for batch in consumer:
            held.append(batch)
            if len(held) == 3:
                break
        await restart(mesh, nats_server)
        for batch in held:
            done.update(d.data for d in batch)
            await settler.ack_all(batch)
            consumer.release(batch)
        async for batch in consumer:
            done.update(d.data for d in batch)
            await settler.ack_all(batch)
            consumer.release(batch)
            if await jsapi.count_subject(mesh, spec.stream, spec.filter_subject) == 0:
                break
    await consumer.stop()
    assert len(done) == 300


async def test_nothing_is_purged_by_numbers_of_an_earlier_run(safe: Mesh, nats_server: NatsServer) -> None:
    spec = await fill(safe, 200)
    _, got = await leased(safe, spec, 100)
    await restart(safe, nats_server)
    assert await HeadPurge(safe).remove(got) == 0
    assert await jsapi.count_subject(safe, spec.stream, spec.filter_subject) == 200


async def test_acks_of_a_broker_that_stays_away_are_given_up(
    mesh: Mesh, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acks, "ANSWER_S", 0.05)
    spec = await fill(mesh, 10)
    _, got = await leased(mesh, spec, 10)
    nats_server.kill()
    await until(lambda: not mesh.connected)
    with pytest.raises(Unavailable, match="acks of 10 messages are not confirmed"):
        await acks.Acker(mesh).ack(got)
