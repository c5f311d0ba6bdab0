"""Removing runs of settled messages: everything of the run, and never anything else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.contracts.specs import ConsumerSpec
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.heads import HeadPurge, head_run
from headrace.mesh.provision import create_consumer, provision
from headrace.mesh.publisher import OutMessage, publish_all
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Settler
from tests.mesh.test_consumer import leased


@pytest.fixture
async def safe(settings: Settings) -> AsyncIterator[Mesh]:
    """A mesh of the profile under which runs are purged."""
    async with await Mesh.connect(replace(settings, durability="safe"), name="safe") as mesh:
        await provision(mesh)
        yield mesh


async def fill(mesh: Mesh, n: int) -> ConsumerSpec:
    """`n` tasks of one shape, each followed by one of another, so that sequences have gaps."""
    spec = ConsumerSpec(
        stream=mesh.topology.tasks,
        durable="f-normal-t6",
        filter_subject=mesh.subjects.tasks_of_shape("f", "normal", 6),
        ack_wait_s=30.0,
    )
    await create_consumer(mesh, spec)
    mine, other = (mesh.subjects.task("f", "normal", shape, "j") for shape in (6, 7))
    for _ in range(0, n, 500):
        pairs = [OutMessage(subject, b"x") for _ in range(500) for subject in (mine, other)]
        await publish_all(mesh, mesh.topology.tasks, pairs)
    return spec


async def left(mesh: Mesh, spec: ConsumerSpec) -> int:
    """Messages of the consumer that are in the stream."""
    return await jsapi.count_subject(mesh, spec.stream, spec.filter_subject)


@pytest.mark.anyio
async def test_a_run_goes_by_one_purge_and_others_stay(safe: Mesh, nats_server: NatsServer) -> None:
    spec = await fill(safe, 1_000)
    consumer, got = await leased(safe, spec, 600)
    assert await HeadPurge(safe).remove(got[:500]) == 500
    assert await left(safe, spec) == 500
    settler = Settler(safe)
    await settler.ack_all(got[:500])
    await settler.ack_all(got[500:])
    assert await left(safe, spec) == 400
    assert (
        await jsapi.count_subject(safe, spec.stream, safe.subjects.tasks_of_shape("f", "normal", 7)) == 1_000
    )
    info = await jsapi.consumer_info(safe, spec.stream, spec.durable)
    assert (info["num_ack_pending"], info["num_pending"]) == (0, 400)
    await consumer.stop()
    nats_server.kill()
    nats_server.restart()
    async with await Mesh.connect(safe.settings, name="again") as again:
        assert await left(again, spec) == 400


@pytest.mark.anyio
async def test_nothing_that_another_holds_is_ever_removed(safe: Mesh) -> None:
    spec = await fill(safe, 500)
    one, held = await leased(safe, spec, 3)
    two, got = await leased(safe, spec, 400)
    purge = HeadPurge(safe)
    assert await purge.remove(got) == 0  # the three before them are leased to somebody else
    await Settler(safe).ack_all(got)
    assert await left(safe, spec) == 100
    await Settler(safe).ack_all(held[1:])
    three, more = await leased(safe, spec, 50)
    assert await purge.remove(more) == 0
    await Settler(safe).ack_all([held[0]])
    assert await purge.remove(more) == 50
    assert await left(safe, spec) == 47
    for consumer in (one, two, three):
        await consumer.stop()


@pytest.mark.anyio
async def test_with_holes_only_the_run_before_the_first_is_removed(safe: Mesh) -> None:
    spec = await fill(safe, 500)
    consumer, got = await leased(safe, spec, 300)
    kept = got[100]
    settled = [d for d in got if d is not kept]
    random.Random(7).shuffle(settled)
    assert await HeadPurge(safe).remove(settled) == 100
    await Settler(safe).ack_all(settled)
    assert await left(safe, spec) == 201
    stored = await jsapi.get_message(safe, spec.stream, kept.stream_seq)
    assert stored is not None
    await consumer.stop()


@pytest.mark.anyio
async def test_limits_streams_and_the_relaxed_profile_are_left_alone(mesh: Mesh) -> None:
    spec = await fill(mesh, 500)
    consumer, got = await leased(mesh, spec, 100)
    assert await HeadPurge(mesh).remove(got) == 0
    assert await left(mesh, spec) == 500
    await consumer.stop()


class Numbered:
    """A delivery as far as `head_run` looks at it."""

    def __init__(self, consumer_seq: int, delivered: int) -> None:
        self.consumer_seq = consumer_seq
        self.delivered = delivered


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 2)), max_size=60, unique_by=lambda t: t[0]),
    st.integers(0, 60),
)
def test_a_run_has_no_gap_and_no_redelivery(deliveries: list[tuple[int, int]], floor: int) -> None:
    run = head_run([Numbered(*d) for d in deliveries], floor)  # type: ignore[misc]
    assert [d.consumer_seq for d in run] == list(range(floor + 1, floor + 1 + len(run)))
    assert all(d.delivered == 1 for d in run)
    assert (floor + len(run) + 1, 1) not in deliveries
