"""Storing messages on a real broker: acks, compare-and-set, atomic batches, limits."""

from __future__ import annotations

import pytest

from headrace.contracts.errors import Refused, Unavailable, Undecodable
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.publisher import AtomicBatch, OutMessage, publish, publish_all

pytestmark = pytest.mark.anyio


async def test_publish_and_compare_and_set(mesh: Mesh) -> None:
    subject = mesh.subjects.job_event("j", "opened")
    ack = await publish(mesh, mesh.topology.jobs, subject, b"{}", expected_last_subject_seq=0)
    assert ack.stream == mesh.topology.jobs
    with pytest.raises(jsapi.JetStreamError) as refused:
        await publish(mesh, mesh.topology.jobs, subject, b"{}", expected_last_subject_seq=0)
    assert refused.value.err_code == jsapi.WRONG_LAST_SEQUENCE
    last = await jsapi.last_message(mesh, mesh.topology.jobs, subject)
    assert last is not None
    assert (last.sequence, last.data) == (ack.seq, b"{}")


async def test_atomic_batch_is_all_or_none(mesh: Mesh) -> None:
    stream, manifest = mesh.topology.tasks, mesh.subjects.manifest("j")
    tasks = [OutMessage(mesh.subjects.task("f", "normal", 6, "j"), b'{"i":%d}' % i) for i in range(999)]
    batch = AtomicBatch(mesh, stream)
    await batch.stage(tasks)
    ack = await batch.commit(OutMessage(manifest, b"1"), expected_last_subject_seq=0)
    assert ack.count == 1_000
    again = AtomicBatch(mesh, stream)
    await again.stage(tasks)
    with pytest.raises(jsapi.JetStreamError) as refused:
        await again.commit(OutMessage(manifest, b"2"), expected_last_subject_seq=0)
    assert refused.value.err_code == jsapi.WRONG_LAST_SEQUENCE
    assert await jsapi.count_subject(mesh, stream, mesh.subjects.tasks_of_job("j")) == 999
    assert await jsapi.purge(mesh, stream, filter_=mesh.subjects.tasks_of_job("j")) == 999
    assert await jsapi.count_subject(mesh, stream, manifest) == 1


async def test_two_batches_staged_at_once_commit_in_order(mesh: Mesh) -> None:
    stream, manifest = mesh.topology.tasks, mesh.subjects.manifest("j")
    subject = mesh.subjects.task("f", "normal", 6, "j")
    first, second = AtomicBatch(mesh, stream), AtomicBatch(mesh, stream)
    await first.stage([OutMessage(subject, b"1")] * 10)
    await second.stage([OutMessage(subject, b"2")] * 10)
    one = await first.commit(OutMessage(manifest, b"1"), expected_last_subject_seq=0)
    two = await second.commit(OutMessage(manifest, b"2"), expected_last_subject_seq=one.seq)
    assert two.seq == one.seq + 11


async def test_publish_all_of_one_and_many(mesh: Mesh) -> None:
    subject = mesh.subjects.result("job", "f", "j")
    assert (await publish_all(mesh, mesh.topology.results, [OutMessage(subject, b"x")])).count == 1
    assert (
        await publish_all(mesh, mesh.topology.results, [OutMessage(subject, b"x", b"a: b\r\n")] * 7)
    ).count == 7


async def test_too_large_is_refused_and_the_connection_stays(mesh: Mesh) -> None:
    subject = mesh.subjects.job_event("j", "opened")
    for data, headers in ((b"x" * 1_200_000, None), (b"x" * (mesh.max_payload - 50), {"h": "y" * 100})):
        with pytest.raises(Refused, match=r"has \d+ bytes"):
            await publish(mesh, mesh.topology.jobs, subject, data, headers=headers)
    await publish(mesh, mesh.topology.jobs, subject, b"{}")


async def test_no_stream_and_forged_ack(mesh: Mesh) -> None:
    with pytest.raises(Unavailable, match="nobody serves"):
        await publish(mesh, "NONE", "elsewhere.x", b"{}")

    async def forge(msg: object) -> None:
        await msg.respond(b"+OK")  # type: ignore[attr-defined]

    await mesh.nc.subscribe("elsewhere.x", cb=forge)
    with pytest.raises(Undecodable, match="no PubAck"):
        await publish(mesh, "NONE", "elsewhere.x", b"{}")
