"""Submitting to a real broker: stored once and whole, whatever happens on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.client.jobs import new_job_name
from headrace.client.problems import InvalidLines
from headrace.client.submit import Progress, SubmitOptions, submit
from headrace.contracts import codec
from headrace.contracts.errors import Conflict, InvalidInput, NotFound, Refused, Unavailable
from headrace.contracts.messages import JobCancelled, JobOpened, Row
from headrace.contracts.names import Lane
from headrace.mesh import publisher
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer
from headrace.mesh.jsapi import call, last_message, purge, stream_info
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settle import Settler
from headrace.mesh.wire import OutMessage
from tests.client.harness import assert_whole, count_tasks, manifest, plain, stored_tasks, write

pytestmark = pytest.mark.anyio


async def test_a_job_is_stored_and_sealed(ready: Mesh, tmp_path: Path) -> None:
    seen: list[Progress] = []
    path = write(tmp_path / "in.jsonl", plain(2_500, max_tokens=10))
    receipt = await submit(ready, path, job="j", on_progress=seen.append)
    assert (receipt.job, receipt.submitted, receipt.refused, receipt.resumed_from) == ("j", 2_500, 0, 0)
    await assert_whole(ready, "j", 2_500)
    opened = await last_message(ready, ready.topology.jobs, ready.subjects.job_event("j", "opened"))
    assert opened is not None
    event = codec.JOB_EVENT.decode(opened.data)
    assert isinstance(event, JobOpened)
    assert (event.function, event.source, event.lane) == ("generate", "in.jsonl", Lane.NORMAL)
    phases = list(dict.fromkeys(p.phase for p in seen))
    assert phases == ["reading", "checking", "storing", "sealed"]
    assert [p.stored for p in seen if p.phase == "storing"] == [999, 1_998, 2_500]
    # Of the manifests only the last stays.
    info = await stream_info(ready, ready.topology.tasks)
    assert info["state"]["messages"] == 2_501


async def test_lane_shape_defaults_and_tenant(ready: Mesh) -> None:
    options = SubmitOptions(lane=Lane.BULK, defaults={"max_tokens": 100, "seed": 1}, tenant="acme")
    lines = [
        {"prompt_token_ids": [1] * 28},
        {"prompt_token_ids": [1] * 29},
        {"prompt_token_ids": [1] * 9_000},
        {"prompt": "a", "max_tokens": 1},
    ]
    await submit(ready, lines, job="j", options=options)
    tasks = await stored_tasks(ready)
    subjects = (await stream_info(ready, ready.topology.tasks, subjects_filter="hr.tasks.*.*.*.j"))["state"][
        "subjects"
    ]
    # 128 tokens fit t7, 129 need t8; beyond the model's limit it is the limit's shape; the smallest shape is t6.
    assert {s.split(".")[4]: n for s, n in subjects.items()} == {"t7": 1, "t8": 1, "t12": 1, "t6": 1}
    assert all(s.startswith("hr.tasks.generate.bulk.") for s in subjects)
    assert [t.params.max_tokens for t in tasks] == [100, 100, 100, 1]
    assert all(
        t.params.seed == 1 and t.tenant == "acme" and t.params_fingerprint == codec.fingerprint(t.params)
        for t in tasks
    )


async def test_the_shape_counts_every_choice(ready: Mesh) -> None:
    ids = [1] * 28
    lines = [
        {"prompt_token_ids": ids, "max_tokens": 100, "n": 1},
        {"prompt_token_ids": ids, "max_tokens": 100, "n": 4},
    ]
    await submit(ready, lines, job="j")
    info = await stream_info(ready, ready.topology.tasks, subjects_filter="hr.tasks.*.*.*.j")
    assert sorted(s.split(".")[4] for s in info["state"]["subjects"]) == ["t7", "t9"]


async def test_rows_for_a_function_that_is_no_model(ready: Mesh) -> None:
    await submit(ready, [{"a": 1}, {"b": [2]}], job="j", options=SubmitOptions(form="rows"))
    subjects = (await stream_info(ready, ready.topology.tasks, subjects_filter="hr.tasks.*.*.*.j"))["state"][
        "subjects"
    ]
    assert subjects == {"hr.tasks.generate.normal.t0.j": 2}
    prompts = [t.prompt for t in await stored_tasks(ready)]
    assert [bytes(p.value) for p in prompts if isinstance(p, Row)] == [b'{"a":1}', b'{"b":[2]}']


async def test_bad_lines_store_nothing_unless_skipped(ready: Mesh, tmp_path: Path) -> None:
    lines: list[Any] = [*plain(2), "{", *plain(1, first=2), {"prompt": "again", "custom_id": "id-0"}]
    path = write(tmp_path / "in", lines)
    with pytest.raises(InvalidLines, match="2 bad lines, nothing was stored: line 3") as caught:
        await submit(ready, path, job="j")
    assert [(e.line, e.field) for e in caught.value.errors] == [(3, ""), (5, "custom_id")]
    assert await last_message(ready, ready.topology.jobs, ready.subjects.job_event("j", "opened")) is None
    receipt = await submit(ready, path, job="j", options=SubmitOptions(skip_bad=True))
    assert (receipt.submitted, receipt.refused, len(receipt.errors)) == (3, 2, 2)
    await assert_whole(ready, "j", 3)
    sealed = await last_message(ready, ready.topology.jobs, ready.subjects.job_event("j", "sealed"))
    assert sealed is not None
    assert codec.JOB_EVENT.decode(sealed.data).refused == 2  # type: ignore[union-attr]


async def test_b8_an_item_over_the_limit_is_refused_and_the_connection_stays(
    ready: Mesh, tmp_path: Path
) -> None:
    lines = [*plain(1), {"prompt": "x" * 1_200_000}, {"prompt": "y" * 33_000_000}]
    path = write(tmp_path / "in", lines)
    with pytest.raises(InvalidLines) as caught:
        await submit(ready, path, job="j")
    assert [e.line for e in caught.value.errors] == [3]
    assert "33,000," in caught.value.errors[0].error
    assert ready.connected
    assert (await submit(ready, path, job="j", options=SubmitOptions(skip_bad=True))).submitted == 2
    just_fits = {"prompt": "z" * (ready.max_payload - 2_000)}
    assert (await submit(ready, [just_fits], job="big")).submitted == 1


@pytest.mark.parametrize("name", ["a.b", "a b", "a*", ">", "", "é", "a" * 129, "a\n"])
async def test_names_that_are_no_token_are_refused(ready: Mesh, name: str) -> None:
    for job, options in (
        (name, SubmitOptions()),
        ("j", SubmitOptions(function=name)),
        ("j", SubmitOptions(tenant=name)),
    ):
        with pytest.raises(InvalidInput, match="not a valid name") as caught:
            await submit(ready, plain(1), job=job, options=options)
        assert caught.value.code == "invalid_name"
    with pytest.raises(InvalidInput, match="lane"):
        await submit(ready, plain(1), job="j", options=SubmitOptions(lane=name))  # type: ignore[arg-type]


async def test_an_unknown_function_names_the_known_ones(ready: Mesh) -> None:
    with pytest.raises(NotFound, match="generate"):
        await submit(ready, plain(1), job="j", options=SubmitOptions(function="translate"))


async def test_an_empty_input_is_a_sealed_job_of_nothing(ready: Mesh, tmp_path: Path) -> None:
    path = write(tmp_path / "in", [])
    receipt = await submit(ready, path, job="j")
    assert (receipt.submitted, receipt.refused) == (0, 0)
    assert "no lines" in receipt.notes[0]
    await assert_whole(ready, "j", 0)
    assert (await submit(ready, path, job="j")).submitted == 0


async def test_a_name_is_made_where_none_is_given(ready: Mesh) -> None:
    first, second = [(await submit(ready, plain(1))).job for _ in range(2)]
    assert first < second
    assert new_job_name()[14] == "7"


# --- again, and at once ------------------------------------------------------------------------------


async def test_a_second_submit_adds_nothing_and_another_input_is_refused(ready: Mesh) -> None:
    await submit(ready, plain(1_500), job="j")
    again = await submit(ready, plain(1_500), job="j")
    assert (again.submitted, again.resumed_from) == (1_500, 1_500)
    assert "was submitted before" in again.notes[0]
    await assert_whole(ready, "j", 1_500)
    with pytest.raises(Conflict) as caught:
        await submit(ready, plain(1_501), job="j")
    assert caught.value.code == "job_exists"
    assert str(caught.value).count("fingerprint") == 1
    with pytest.raises(Conflict):
        await submit(ready, plain(1_500), job="j", options=SubmitOptions(lane=Lane.URGENT))


async def test_a_completed_job_is_known_by_its_events(ready: Mesh) -> None:
    await submit(ready, plain(10), job="j")
    await purge(ready, ready.topology.tasks, filter_=ready.subjects.tasks_of_job("j"))
    await purge(ready, ready.topology.tasks, filter_=ready.subjects.manifest("j"))
    again = await submit(ready, plain(10), job="j")
    assert (again.submitted, again.resumed_from) == (10, 10)
    assert await count_tasks(ready, "j") == 0


async def test_the_same_job_submitted_twice_at_once_is_one_job(
    ready: Mesh, settings: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "in", plain(5_000))
    async with await Mesh.connect(settings, name="other") as other:
        receipts = await asyncio.gather(*(submit(m, path, job="j") for m in (ready, other, ready)))
    assert all(r.submitted == 5_000 for r in receipts)
    await assert_whole(ready, "j", 5_000)


async def test_a_cancelled_job_takes_no_more(
    ready: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in", plain(3_000))
    real, commits = publisher.AtomicBatch.commit, 0

    async def cancelled_meanwhile(self: Any, message: OutMessage, **options: Any) -> Any:
        nonlocal commits
        commits += 1
        if commits == 2:
            # As completion does it: by compare-and-set on the manifest.
            last = await last_message(ready, ready.topology.tasks, ready.subjects.manifest("j"))
            assert last is not None
            closed = msgspec.structs.replace(codec.MANIFEST.decode(last.data), closed="cancelled")
            data = codec.MANIFEST.encode(closed)
            await publish(
                ready, ready.topology.tasks, last.subject, data, expected_last_subject_seq=last.sequence
            )
        return await real(self, message, **options)

    monkeypatch.setattr(publisher.AtomicBatch, "commit", cancelled_meanwhile)
    with pytest.raises(Conflict, match="was cancelled"):
        await submit(ready, path, job="j")
    assert await count_tasks(ready, "j") == 999
    # Also when only the events tell it.
    event = codec.JOB_EVENT.encode(JobCancelled(job="j", count=999))
    await publish(ready, ready.topology.jobs, ready.subjects.job_event("j", "cancelled"), event)
    await purge(ready, ready.topology.tasks, filter_=ready.subjects.manifest("j"))
    with pytest.raises(Conflict, match="was cancelled"):
        await submit(ready, path, job="j")
    assert await count_tasks(ready, "j") == 999


async def test_a_submitter_that_slept_through_the_whole_job_takes_its_batch_back(
    ready: Mesh, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in", plain(1_500))
    real = publisher.AtomicBatch.commit

    async def whole_job_meanwhile(self: Any, message: OutMessage, **options: Any) -> Any:
        monkeypatch.setattr(publisher.AtomicBatch, "commit", real)
        async with await Mesh.connect(settings, name="other") as other:
            await submit(other, path, job="j")
            await purge(other, other.topology.tasks, filter_=other.subjects.tasks_of_job("j"))
            await purge(other, other.topology.tasks, filter_=other.subjects.manifest("j"))
        return await real(self, message, **options)

    monkeypatch.setattr(publisher.AtomicBatch, "commit", whole_job_meanwhile)
    receipt = await submit(ready, path, job="j")
    assert receipt.submitted == 1_500
    assert (await stream_info(ready, ready.topology.tasks))["state"]["messages"] == 0


# --- lost acks, full queues --------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [{1}, {2}, {1, 2, 3}, {3}])
async def test_lost_acks_store_nothing_twice(
    ready: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: set[int]
) -> None:
    commits = 0
    real = publisher.AtomicBatch.commit

    async def commit(self: Any, message: OutMessage, **options: Any) -> Any:
        nonlocal commits
        commits += 1
        ack = await real(self, message, **options)
        if commits in lost:
            raise Unavailable("no answer")
        return ack

    monkeypatch.setattr(publisher.AtomicBatch, "commit", commit)
    receipt = await submit(ready, write(tmp_path / "in", plain(2_500)), job="j")
    assert receipt.submitted == 2_500
    await assert_whole(ready, "j", 2_500)


async def limit_queue(mesh: Mesh, **limits: int) -> None:
    config = (await stream_info(mesh, mesh.topology.tasks))["config"]
    await call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", config | limits)


async def test_a_full_queue_names_what_is_not_stored_and_goes_on_later(ready: Mesh, tmp_path: Path) -> None:
    path = write(tmp_path / "in", plain(5_000))
    await limit_queue(ready, max_msgs=2_600)
    waits: list[str] = []
    options = SubmitOptions(patience_s=0.6)
    with pytest.raises(Refused) as caught:
        await submit(ready, path, job="j", options=options, on_progress=lambda p: waits.append(p.waiting))
    stored = (await manifest(ready, "j")).stored
    assert caught.value.code == "queue_full"
    assert f"{stored:,} of 5,000 items are confirmed as stored; items {stored:,}..4,999" in str(caught.value)
    assert "the queue is full" in waits
    tasks = await stored_tasks(ready, "j")
    assert [t.index for t in tasks] == list(range(stored))
    assert stored > 1_998  # smaller batches fill what is left
    await limit_queue(ready, max_msgs=-1)
    receipt = await submit(ready, path, job="j")
    assert (receipt.submitted, receipt.resumed_from) == (5_000, stored)
    await assert_whole(ready, "j", 5_000)


async def test_a_full_queue_that_is_drained_is_waited_for(ready: Mesh, tmp_path: Path) -> None:
    path = write(tmp_path / "in", plain(3_000))
    await limit_queue(ready, max_bytes=400_000)
    spec = ready.topology.task_consumer("generate", Lane.NORMAL, 9)
    worker = BatchConsumer(ready, spec, batch=200, wait_s=0.01)
    settler = Settler(ready)
    seen: list[int] = []

    async def work() -> None:
        async for batch in worker:
            seen.extend(codec.TASK.decode(d.data).index for d in batch)
            await settler.ack_all(batch)
            worker.release(batch)
            if len(seen) == 3_000:
                return

    await worker.start()
    working = asyncio.create_task(work())
    assert (await submit(ready, path, job="j")).submitted == 3_000
    await working
    await worker.stop()
    assert seen == list(range(3_000))


async def test_unchanged_while_it_is_read(ready: Mesh, tmp_path: Path) -> None:
    path = write(tmp_path / "in", plain(1_500))

    def progress(p: Progress) -> None:
        if p.phase == "storing" and p.stored == 999:
            write(path, plain(1_500, max_tokens=3))

    with pytest.raises(Conflict, match="was changed"):
        await submit(ready, path, job="j", on_progress=progress)
    assert await last_message(ready, ready.topology.jobs, ready.subjects.job_event("j", "sealed")) is None


async def test_a_submit_can_be_cancelled_while_checking(ready: Mesh, tmp_path: Path) -> None:
    path = write(tmp_path / "in", plain(20_000))
    submitting = asyncio.create_task(submit(ready, path, job="j"))
    await asyncio.sleep(0.01)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert (await submit(ready, path, job="j")).submitted == 20_000


async def test_the_broker_restarts_while_the_input_is_checked(
    ready: Mesh, nats_server: NatsServer, tmp_path: Path
) -> None:
    path = write(tmp_path / "in", plain(1_500))
    killed = False

    def progress(p: Progress) -> None:
        nonlocal killed
        if p.phase == "checking" and not killed:
            killed = True
            nats_server.kill()
            nats_server.restart()

    receipt = await submit(ready, path, job="j", on_progress=progress)
    assert (killed, receipt.submitted) == (True, 1_500)
    await assert_whole(ready, "j", 1_500)
