"""Pulling, leasing and settling on a real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from headrace.contracts import codec
from headrace.contracts.errors import Refused, Unavailable
from headrace.contracts.specs import ConsumerSpec
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer, Delivery, PullConsumer
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.provision import create_consumer
from headrace.mesh.publisher import OutMessage, publish, publish_all
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Done, Reject, Retry, Settler

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for `condition`, fail after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def fill(mesh: Mesh, n: int, ack_wait_s: float = 30.0) -> ConsumerSpec:
    """`n` tasks and their consumer."""
    spec = ConsumerSpec(
        stream=mesh.topology.tasks,
        durable="f-normal-t6",
        filter_subject=mesh.subjects.tasks_of_shape("f", "normal", 6),
        ack_wait_s=ack_wait_s,
    )
    await create_consumer(mesh, spec)
    subject = mesh.subjects.task("f", "normal", 6, "j")
    for at in range(0, n, 1_000):
        await publish_all(
            mesh, mesh.topology.tasks, [OutMessage(subject, b"%d" % i) for i in range(at, min(n, at + 1_000))]
        )
    return spec


async def leased(mesh: Mesh, spec: ConsumerSpec, n: int) -> tuple[PullConsumer, list[Delivery]]:
    """A started consumer and `n` messages that it was delivered."""
    got: list[Delivery] = []
    consumer = PullConsumer(mesh, spec, got.append)
    await consumer.start()
    consumer.ask(n)
    await until(lambda: len(got) == n)
    return consumer, got


async def test_delivers_what_was_asked_and_no_more(mesh: Mesh) -> None:
    spec = await fill(mesh, 100)
    consumer, got = await leased(mesh, spec, 7)
    assert (consumer.outstanding, consumer.pending) == (0, 93)
    assert [d.data for d in got] == [b"%d" % i for i in range(7)]
    assert got[0].delivered == 1
    info = await jsapi.consumer_info(mesh, spec.stream, spec.durable)
    assert info["num_ack_pending"] == 7
    await consumer.stop()


async def test_expired_pull_gives_demand_back_exactly(mesh: Mesh) -> None:
    spec = await fill(mesh, 3)
    got: list[Delivery] = []
    lost: list[int] = []
    consumer = PullConsumer(
        mesh, spec, got.append, on_demand_lost=lambda: lost.append(1), expires_s=1.0, heartbeat_s=0.4
    )
    await consumer.start()
    consumer.ask(4)
    consumer.ask(4)
    await until(lambda: len(lost) == 2)
    assert len(got) == 3
    assert consumer.outstanding == 0
    await consumer.stop()


async def test_settles_in_groups_and_empties_the_stream(mesh: Mesh) -> None:
    spec = await fill(mesh, 2_000)
    settler = Settler(mesh)
    result = mesh.subjects.result("job", "f", "j")
    settled: list[asyncio.Future[None]] = []

    def on_delivery(d: Delivery) -> None:
        settled.append(settler.begin(d, Done((OutMessage(result, d.data),))))

    consumer = PullConsumer(mesh, spec, on_delivery)
    await consumer.start()
    consumer.ask(2_000)
    await until(lambda: len(settled) == 2_000)
    await asyncio.gather(*settled)
    assert await jsapi.count_subject(mesh, mesh.topology.results, result) == 2_000
    info = await jsapi.stream_info(mesh, mesh.topology.tasks)
    assert info["state"]["messages"] == 0
    await consumer.stop()


async def test_retry_comes_back_after_its_delay_and_counts(mesh: Mesh) -> None:
    spec = await fill(mesh, 1)
    settler = Settler(mesh)
    got: list[tuple[float, int]] = []
    consumer = PullConsumer(
        mesh, spec, lambda d: got.append((time.monotonic(), d.delivered)) or pending.append(d)
    )
    pending: list[Delivery] = []
    await consumer.start()
    consumer.ask(2)
    await until(lambda: len(got) == 1)
    await settler.settle(pending[0], Retry(0.3))
    await until(lambda: len(got) == 2)
    assert got[1][0] - got[0][0] >= 0.25
    assert got[1][1] == 2
    await consumer.stop()


async def test_reject_keeps_the_raw_message(mesh: Mesh) -> None:
    spec = await fill(mesh, 2)
    settler = Settler(mesh)
    consumer, got = await leased(mesh, spec, 2)
    await settler.settle(got[0], Reject("not a task/1: broken\r\nline"))
    await settler.settle(got[1], Done())
    letter = await jsapi.last_message(mesh, mesh.topology.dead, mesh.subjects.dead(spec.stream))
    assert letter is not None
    dead = codec.DEAD_LETTER.decode(letter.data, letter.headers)
    assert (dead.data, dead.subject, dead.tries) == (b"0", got[0].subject, 1)
    await mesh.flush()
    info = await jsapi.stream_info(mesh, mesh.topology.tasks)
    assert info["state"]["messages"] == 0
    await consumer.stop()


async def test_cancelled_settle_that_has_begun_still_completes(mesh: Mesh) -> None:
    spec = await fill(mesh, 1)
    settler = Settler(mesh)
    consumer, got = await leased(mesh, spec, 1)
    task = asyncio.ensure_future(
        settler.settle(got[0], Done((OutMessage(mesh.subjects.result("job", "f", "j"), b"r"),)))
    )
    await asyncio.sleep(0)
    task.cancel()
    await settler.drain()
    info = await jsapi.stream_info(mesh, mesh.topology.tasks)
    assert info["state"]["messages"] == 0
    await consumer.stop()


async def test_too_large_result_is_refused_and_neighbours_settle(mesh: Mesh) -> None:
    spec = await fill(mesh, 2)
    settler = Settler(mesh)
    consumer, got = await leased(mesh, spec, 2)
    subject = mesh.subjects.result("job", "f", "j")
    big = settler.settle(got[0], Done((OutMessage(subject, b"x" * 2_000_000),)))
    small = settler.settle(got[1], Done((OutMessage(subject, b"x"),)))
    outcomes = await asyncio.gather(big, small, return_exceptions=True)
    assert isinstance(outcomes[0], Refused)
    assert outcomes[1] is None
    await consumer.stop()


async def test_full_result_stream_holds_the_work_and_nothing_is_lost(mesh: Mesh) -> None:
    await jsapi.call(
        mesh,
        f"STREAM.UPDATE.{mesh.topology.results}",
        {**(await jsapi.stream_info(mesh, mesh.topology.results))["config"], "max_msgs": 5},
    )
    spec = await fill(mesh, 20)
    settler = Settler(mesh)
    result = mesh.subjects.result("job", "f", "j")
    settled: list[asyncio.Future[None]] = []
    consumer = PullConsumer(
        mesh, spec, lambda d: settled.append(settler.begin(d, Done((OutMessage(result, d.data),))))
    )
    await consumer.start()
    consumer.ask(20)
    await until(lambda: len(settled) == 20)
    config = (await jsapi.stream_info(mesh, mesh.topology.results))["config"]
    await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.results}", {**config, "max_msgs": -1})
    await asyncio.gather(*settled)
    assert await jsapi.count_subject(mesh, mesh.topology.results, result) == 20
    await consumer.stop()


async def test_lease_is_renewed_while_the_loop_is_blocked(mesh: Mesh, settings: Settings) -> None:
    spec = await fill(mesh, 1, ack_wait_s=1.0)
    leases = LeaseKeeper(settings, "worker")
    await leases.start()
    got: list[Delivery] = []

    def on_delivery(d: Delivery) -> None:
        leases.add(d)
        got.append(d)

    consumer = PullConsumer(mesh, spec, on_delivery)
    await consumer.start()
    consumer.ask(5)
    await until(lambda: len(got) == 1)
    time.sleep(2.5)
    settler = Settler(mesh, leases)
    await settler.settle(got[0], Done())
    assert len(leases) == 0
    assert leases.renewed >= 3
    info = await jsapi.consumer_info(mesh, spec.stream, spec.durable)
    assert (info["num_redelivered"], info["num_pending"], info["num_ack_pending"]) == (0, 0, 0)
    assert len(got) == 1
    await consumer.stop()
    await leases.stop()


async def test_pulls_again_after_a_broker_restart(mesh: Mesh, nats_server: NatsServer) -> None:
    spec = await fill(mesh, 0)
    got: list[Delivery] = []
    consumer = PullConsumer(mesh, spec, got.append, on_demand_lost=lambda: consumer.ask(1))
    await consumer.start()
    consumer.ask(1)
    await mesh.flush()
    nats_server.kill()
    nats_server.restart()
    while True:
        try:
            await publish(mesh, mesh.topology.tasks, mesh.subjects.task("f", "normal", 6, "j"), b"after")
            break
        except Unavailable:  # written into the old connection before its end was noticed
            await until(lambda: mesh.connected)
    begun = time.monotonic()
    await until(lambda: len(got) == 1)
    assert time.monotonic() - begun < 2.0
    await consumer.stop()


async def test_deleted_consumer_backs_off_and_recovers(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    spec = await fill(mesh, 0)
    got: list[Delivery] = []
    consumer = PullConsumer(mesh, spec, got.append, on_demand_lost=lambda: consumer.ask(1), heartbeat_s=0.5)
    await consumer.start()
    consumer.ask(1)
    await mesh.flush()
    await jsapi.call(mesh, f"CONSUMER.DELETE.{spec.stream}.{spec.durable}")
    await until(lambda: len(caplog.records) >= 3)
    assert len(caplog.records) < 10
    await create_consumer(mesh, spec)
    await publish(mesh, mesh.topology.tasks, mesh.subjects.task("f", "normal", 6, "j"), b"x")
    await until(lambda: len(got) == 1)
    await consumer.stop()


async def test_batches_hold_no_more_than_their_window(mesh: Mesh) -> None:
    spec = await fill(mesh, 500)
    settler = Settler(mesh)
    consumer = BatchConsumer(mesh, spec, batch=100, wait_s=0.05, window=150)
    await consumer.start()
    seen = 0
    async for batch in consumer:
        info = await jsapi.consumer_info(mesh, spec.stream, spec.durable)
        assert info["num_ack_pending"] <= 150
        seen += len(batch)
        await settler.ack_all(batch)
        consumer.release(batch)
        if seen == 500:
            await consumer.stop()
    assert seen == 500


async def test_a_pull_bounded_by_bytes_that_is_served_whole_is_no_trouble(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    spec = await fill(mesh, 1_000)
    settler = Settler(mesh)
    consumer = BatchConsumer(mesh, spec, batch=50, wait_s=0.0, window=100)
    await consumer.start()
    seen = 0
    async for batch in consumer:
        seen += len(batch)
        await settler.ack_all(batch)
        consumer.release(batch)
        if seen == 1_000:
            await consumer.stop()
    assert [r.message for r in caplog.records] == []
    info = await jsapi.consumer_info(mesh, spec.stream, spec.durable)
    assert info["num_redelivered"] == 0


async def test_a_pull_bounded_by_bytes_ends_and_is_asked_for_again(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    spec = await fill(mesh, 0)
    subject = mesh.subjects.task("f", "normal", 6, "j")
    for _ in range(6):
        await publish(mesh, mesh.topology.tasks, subject, b"x" * 100_000)
    got: list[Delivery] = []
    lost: list[int] = []

    def again() -> None:
        lost.append(consumer.outstanding)
        consumer.ask(6, max_bytes=250_000)

    consumer = PullConsumer(mesh, spec, got.append, on_demand_lost=again)
    await consumer.start()
    consumer.ask(6, max_bytes=250_000)
    await until(lambda: len(got) == 6)
    assert lost[:2] == [0, 0]
    assert caplog.records == []
    await consumer.stop()


async def test_batches_hold_no_more_bytes_than_their_bound(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.mesh.consumer.WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr("headrace.mesh.consumer.MIN_PULL_BYTES", 1 << 20)
    spec = await fill(mesh, 0)
    subject = mesh.subjects.task("f", "normal", 6, "j")
    for _ in range(30):
        await publish(mesh, mesh.topology.tasks, subject, b"x" * 200_000)
    consumer = BatchConsumer(mesh, spec, batch=100, wait_s=0.05, window=300)
    settler = Settler(mesh)
    await consumer.start()
    seen = 0
    async for batch in consumer:
        info = await jsapi.consumer_info(mesh, spec.stream, spec.durable)
        assert info["num_ack_pending"] <= 2 * (1 << 20) // 200_000 + 1
        seen += len(batch)
        await settler.ack_all(batch)
        consumer.release(batch)
        if seen == 30:
            await consumer.stop()
    assert seen == 30
