"""Retry: what failed runs again, once, as the next generation, and stands beside what was."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from headrace.contracts import codec
from headrace.contracts.errors import Conflict, InvalidInput, NotFound, Refused
from headrace.contracts.messages import FunctionSpec, JobCancelled, Manifest, Result, TextPrompt
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.provision import register_function
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.completion.again import (
    assert_whole,
    balanced,
    ended_job,
    events,
    fail,
    finish,
    outcome,
    retry,
    run_stored,
    stored_tasks,
    task,
)
from tests.completion.world import (
    FUNCTION,
    INPUT,
    Producer,
    cancel,
    error_of,
    register,
    result,
    serving,
    sql,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def function(mesh: Mesh) -> None:
    """A retry is refused for a function that nobody registered."""
    await register(mesh)


async def results_page(mesh: Mesh, job: str = "j") -> list[Result]:
    body = msgspec.json.decode(await call_api(mesh, "results", {"job": job}))
    return [msgspec.convert(r, Result) for r in body["results"]]


async def test_ten_of_a_hundred_run_again_and_no_other(mesh: Mesh, settings: Settings) -> None:
    """A14."""
    async with serving(settings):
        job = await ended_job(mesh, 90, failed=6, dead=4)
        reply = await retry(mesh)
        assert (reply.generation, reply.resubmitted, reply.left_out) == (2, 10, 0)
        status = await job.status()
        assert (status.state, status.generation, status.submitted) == ("sealed", 2, 100)
        assert (status.ok, status.failed, status.dead, status.queued + status.landing) == (90, 0, 0, 10)
        assert await until(lambda: balanced(job))
        ran = await finish(job, 2)
        assert [t.index for t in ran] == list(range(90, 100))
        assert {t.generation for t in ran} == {2}
        await assert_whole(job, 100, generation=2, ok=100, failed=0, dead=0)
        assert (await job.status()).state == "completed"
        assert await sql(
            mesh, "SELECT generation, status, count(*) FROM outcomes GROUP BY ALL ORDER BY ALL"
        ) == [
            [1, "dead", 4],
            [1, "failed", 6],
            [1, "ok", 90],
            [2, "ok", 10],
        ]
        # The same outcomes by the front door: the latest of each.
        found = await results_page(mesh)
        assert [(r.index, r.status) for r in found] == [(i, "ok") for i in range(100)]
        assert {r.generation for r in found[90:]} == {2}


async def test_the_tasks_are_as_they_were(mesh: Mesh, settings: Settings) -> None:
    now = time.time_ns() // 1_000
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open(lane="bulk")
        await job.submit(4, closed="sealed")
        await job.seal()
        late = task("j", 1, deadline_us=now - 1, submitted_us=7, tenant="acme")
        ahead = task("j", 2, deadline_us=now + 10**10, prompt_tokens=100, sink="call")
        large = task("j", 3, prompt_tokens=3_000)
        await job.work([0])
        await job.results(
            [
                result("j", 1, "failed", task=late, shape=9, trace_id=trace),
                result("j", 2, "failed", task=ahead),
                result("j", 3, "dead", task=large, shape=24),
            ]
        )
        await job.take_away([1, 2, 3])
        await job.ended()
        await retry(mesh)
        stored = await until(lambda: _when_all(job, 3))
        one, two, three = (t for _, _, t, _ in stored)
        assert msgspec.structs.replace(one, submitted_us=7) == msgspec.structs.replace(
            late, generation=2, deadline_us=None
        )
        assert one.submitted_us >= now
        assert (two.deadline_us, two.sink) == (now + 10**10, "job")
        assert (three.prompt_tokens, three.generation) == (3_000, 2)
        # By the outcome's shape, else by the tokens (100 + 256 new ones), held to what has a consumer.
        assert [s.split(".")[3:] for _, s, _, _ in stored] == [["bulk", k, "j"] for k in ("t9", "t9", "t13")]
        headers = stored[0][3]
        assert headers[codec.SCHEMA_HEADER] == "task/1"
        assert headers[codec.TRACEPARENT].split("-")[1::2] == [trace, "00"]
        assert codec.TRACEPARENT not in stored[1][3]


async def _when_all(job: Producer, count: int) -> list | None:
    stored = await stored_tasks(job)
    return stored if len(stored) == count else None


async def test_where_chooses(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 5, failed=3, dead=4)
        reply = await retry(mesh, where="status = 'dead' AND \"index\" % 2 = 1 -- the odd ones")
        assert reply.resubmitted == 2
        assert [t.index for t in await finish(job, 2)] == [9, 11]
        await assert_whole(job, 12, generation=2, ok=7, failed=3, dead=2)
        assert (await job.status()).state == "completed_with_errors"
        reply = await retry(mesh, where='"index" IN (SELECT "index" FROM outcomes WHERE generation = 2)')
        assert (reply.generation, reply.resubmitted) == (2, 0)
        (event,) = await events(job, "retried")
        assert (event.count, event.where) == (2, "status = 'dead' AND \"index\" % 2 = 1 -- the odd ones")


async def test_nothing_that_fits_changes_nothing(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 3, failed=1)
        before = await job.status()
        for where in ("false", "NULL", "error_type = 'none such'", "status = 'ok'"):
            reply = await retry(mesh, where=where)
            assert (reply.generation, reply.resubmitted) == (1, 0)
        assert await job.status() == before
        assert await events(job, "retried") == []
        assert (await job.audit()).balanced


async def test_again_and_again(mesh: Mesh, settings: Settings) -> None:
    """Generation 3 has what generation 2 did not mend; an index that is ok once never runs again."""
    async with serving(settings):
        job = await ended_job(mesh, 4, failed=6)
        await retry(mesh)
        await finish(job, 2, lambda t: "ok" if t.index < 7 else "failed")
        await assert_whole(job, 10, generation=2, ok=7, failed=3)
        assert (await retry(mesh)).generation == 3
        ran = await finish(job, 3, lambda t: "ok" if t.index < 9 else "dead")
        assert [(t.index, t.generation) for t in ran] == [(7, 3), (8, 3), (9, 3)]
        await assert_whole(job, 10, generation=3, ok=9, dead=1)
        rows = await sql(mesh, 'SELECT generation, status FROM outcomes WHERE "index" = 9 ORDER BY 1')
        assert rows == [[1, "failed"], [2, "failed"], [3, "dead"]]
        assert [e.state for e in await events(job, "completed")] == ["completed_with_errors"] * 3


async def test_until_it_lands_the_old_outcome_shows(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 2, failed=2)
        await retry(mesh)
        found = {r.index: (r.status, r.generation) for r in await results_page(mesh)}
        assert found == {0: ("ok", 1), 1: ("ok", 1), 2: ("failed", 1), 3: ("failed", 1)}
        await until(lambda: _when_all(job, 2))
        await run_stored(job, only=lambda t: t.index == 3)
        await until(job.results_empty)
        found = {r.index: (r.status, r.generation) for r in await results_page(mesh)}
        assert found == {0: ("ok", 1), 1: ("ok", 1), 2: ("failed", 1), 3: ("ok", 2)}
        status = await job.status()
        assert (status.state, status.ok, status.failed, status.queued) == ("sealed", 3, 0, 1)
        new = await call_api(mesh, "result", {"job": "j", "index": 2, "generation": 2})
        assert msgspec.json.decode(new)["landed"] is False
        await finish(job, 2)
        await assert_whole(job, 4, generation=2, ok=4)


# --- who may be retried ---------------------------------------------------------------------------
async def test_a_job_that_runs_is_refused(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open()
        error = await error_of(retry(mesh))
        assert isinstance(error, Refused)
        assert error.code == "still_running"
        await job.submit(10, closed="sealed")
        await job.seal()
        await fail(job, range(7))

        async def counted() -> bool:
            error = await error_of(retry(mesh))
            return error.code == "still_running" and "3 items left: wait for its end, or cancel it" in str(
                error
            )

        await until(counted)
        assert await sql(mesh, "SELECT count(*) FROM retries") == [[0]]


async def test_a_cancelled_job_and_an_unknown_one(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        assert isinstance(await error_of(retry(mesh)), NotFound)
        job = Producer(mesh, "j")
        await job.whole(3)
        await fail(job, [0])
        await until(job.results_empty)
        await cancel(mesh)
        await job.ended()
        error = await error_of(retry(mesh))
        assert isinstance(error, Refused)
        assert error.code == "job_cancelled"
        assert "submit what is missing as another job" in str(error)


async def test_a_function_that_is_gone_is_named(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open()
        await job.submit(1, closed="sealed")
        await job.seal()
        other = msgspec.structs.replace(task("j", 0), function="other")
        await job.results(
            [Result(job="j", index=0, function="other", status="failed", task=other, custom_id="c")]
        )
        await job.take_away([0])
        await job.ended()
        # The job was opened for `echo`, which is registered; a task whose own function is not runs when one comes.
        assert (await retry(mesh)).resubmitted == 1
        ((_, subject, stored, _),) = await until(lambda: _when_all(job, 1))
        assert stored.function == "other"
        assert subject == "hr.tasks.other.normal.t8.j"


async def test_a_job_of_an_unknown_function_is_refused(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service:
        await ended_job(mesh, 1, failed=1)
        await service._store.write(lambda c: c.execute("UPDATE jobs SET function = 'gone'"))
        error = await error_of(retry(mesh))
        assert isinstance(error, NotFound)
        assert "'gone' is not registered; known: echo" in str(error)
        assert await sql(mesh, "SELECT generation, state FROM jobs") == [[1, "completed_with_errors"]]


async def test_items_that_do_not_carry_their_task_are_told(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(5)
        await job.work([0])
        await fail(job, [1, 2])
        await job.work([3, 4], "failed")  # too large to be carried
        await job.ended()
        reply = await retry(mesh)
        assert (reply.resubmitted, reply.left_out) == (2, 2)
        assert [t.index for t in await finish(job, 2)] == [1, 2]
        await assert_whole(job, 5, generation=2, ok=3, failed=2)
        reply = await retry(mesh)
        assert (reply.generation, reply.resubmitted, reply.left_out) == (2, 0, 2)


async def test_outcomes_beyond_the_last_index_are_nobodys(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 2, failed=1)
        await job.results([result("j", 7, "failed", task=task("j", 7))])
        await until(job.results_empty)
        assert (await retry(mesh)).resubmitted == 1
        assert [t.index for t in await finish(job, 2)] == [2]
        assert [e.generation for e in await events(job, "completed")] == [1, 2]


# --- the same retry, and others -------------------------------------------------------------------
async def test_the_same_request_again_is_the_same_retry(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 1, failed=3)
        first = await retry(mesh, generation=2)
        assert await retry(mesh, generation=2) == first
        await finish(job, 2, "failed")
        assert await retry(mesh, generation=2) == first  # even after its end
        await assert_whole(job, 4, generation=2, ok=1, failed=3)
        other = await error_of(retry(mesh, generation=2, where="true"))
        assert isinstance(other, Conflict)
        assert "generation 2 of job j is another retry" in str(other)
        ahead = await error_of(retry(mesh, generation=4))
        assert isinstance(ahead, Conflict)
        assert "the next generation of job j is 3, not 4" in str(ahead)


async def test_many_retries_at_once_are_one(mesh: Mesh, settings: Settings) -> None:
    """A11, A15 for a retry."""
    async with serving(settings):
        job = await ended_job(mesh, 2, failed=40)
        wheres = ["", "", "true", '"index" > 1', ""]
        replies = await asyncio.gather(*(retry(mesh, where=w) for w in wheres), return_exceptions=True)
        won = [r for r in replies if not isinstance(r, BaseException)]
        assert won
        assert {(r.generation, r.resubmitted) for r in won} == {(2, 40)}
        assert all(isinstance(r, Conflict | Refused) for r in replies if isinstance(r, BaseException))
        ran = await finish(job, 2)
        assert sorted(t.index for t in ran) == list(range(2, 42))
        await assert_whole(job, 42, generation=2, ok=42)


async def test_a_submit_of_the_job_again_adds_nothing(mesh: Mesh, settings: Settings) -> None:
    """A producer that comes late, and one that slept all along, read the retry's record as not theirs."""
    async with serving(settings):
        job = await ended_job(mesh, 1, failed=3)
        await until(lambda: _count_is(mesh, mesh.subjects.manifest("j"), 0))
        late = await error_of(job.submit(1))
        await retry(mesh)
        await until(lambda: _when_all(job, 3))
        later = await error_of(job.submit(1))
        assert isinstance(late, jsapi.JetStreamError)
        assert isinstance(later, jsapi.JetStreamError)
        from headrace.client.jobs import finished_count, read_manifest, where_is

        assert (await read_manifest(mesh, "j", INPUT)).seq == 0
        found = await where_is(mesh, "j", INPUT)
        assert (found.items, found.closed) == (4, "sealed")
        assert await finished_count(mesh, "j") == 4
        await finish(job, 2)
        await assert_whole(job, 4, generation=2, ok=4)


# --- batches --------------------------------------------------------------------------------------
async def test_three_thousand_in_several_batches(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 100, failed=3_000)
        assert (await retry(mesh)).resubmitted == 3_000
        record = await until(lambda: _sealed_record(job))
        assert (record.stored, record.generation, record.input_fingerprint) == (3_000, 2, INPUT)
        # One record is kept, the others are gone.
        subject = mesh.subjects.manifest("j")
        await until(lambda: _count_is(mesh, subject, 1))
        await until(lambda: _noted(mesh))
        stored = await stored_tasks(job)
        assert [t.index for _, _, t, _ in stored] == list(range(100, 3_100))
        audit = await job.audit()
        assert (audit.balanced, audit.queued, audit.ok, audit.submitted) == (True, 3_000, 100, 3_100)
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
        await job.results(outcome(t) for _, _, t, _ in stored)
        await assert_whole(job, 3_100, generation=2, ok=3_100)


async def _sealed_record(job: Producer) -> Manifest | None:
    found = await jsapi.last_message(job.mesh, job.mesh.topology.tasks, job.mesh.subjects.manifest(job.job))
    if found is None:
        return None
    record = codec.MANIFEST.decode(found.data)
    return record if record.generation > 1 and record.closed == "sealed" else None


async def _count_is(mesh: Mesh, subject: str, count: int) -> bool:
    return await jsapi.count_subject(mesh, mesh.topology.tasks, subject) == count


async def _noted(mesh: Mesh) -> bool:
    return await sql(mesh, "SELECT stored FROM retries") == [[True]]


async def test_large_items_go_in_small_batches(mesh: Mesh, settings: Settings) -> None:
    """12 MB of tasks, though a batch holds 4 MiB: what is read is bounded."""
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(30)
        for i in range(30):
            big = task("j", i, prompt=TextPrompt(text="x" * 400_000))
            await job.results([result("j", i, "failed", task=big)])
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
        await job.ended()
        assert (await retry(mesh)).resubmitted == 30
        stored = await until(lambda: _when_all(job, 30), 30)
        assert {len(t.prompt.text) for _, _, t, _ in stored} == {400_000}
        sequences = [s for s, *_ in stored]
        assert sequences[-1] - sequences[0] >= 29 + 2  # at least three batches, each with its record
        await finish(job, 2)
        await assert_whole(job, 30, generation=2, ok=30)


async def test_a_full_queue_is_waited_for(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 1, failed=200)
        await until(lambda: _count_is(mesh, mesh.subjects.manifest("j"), 0))
        info = await jsapi.stream_info(mesh, mesh.topology.tasks)
        config = info["config"] | {"max_msgs": 50}
        await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", config)
        assert (await retry(mesh)).resubmitted == 200
        await until(lambda: _some_stored(mesh))
        status = await job.status()
        assert (status.state, status.ok, status.queued + status.landing) == ("sealed", 1, 200)
        assert (await job.audit()).balanced
        assert len(await stored_tasks(job)) < 50
        # Room comes as the items run.
        ran = await finish(job, 2)
        assert sorted(t.index for t in ran) == list(range(1, 201))
        await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", config | {"max_msgs": -1})
        await assert_whole(job, 201, generation=2, ok=201)


async def _some_stored(mesh: Mesh) -> bool:
    return await jsapi.count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job("j")) > 0


async def test_the_broker_killed_in_the_middle(
    nats_server: NatsServer, mesh: Mesh, settings: Settings
) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 1, failed=2_500)
        await retry(mesh)
        await until(lambda: _some_stored(mesh))
        nats_server.kill()
        await until(lambda: not mesh.connected)
        nats_server.restart()
        await until(lambda: mesh.connected)
        stored = await until(lambda: _when_all(job, 2_500), 40)
        assert sorted(t.index for _, _, t, _ in stored) == list(range(1, 2_501))
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
        await job.results(outcome(t) for _, _, t, _ in stored)
        await assert_whole(job, 2_501, generation=2, ok=2_501)


async def test_a_task_that_cannot_be_read_or_stored_gets_an_outcome(mesh: Mesh, settings: Settings) -> None:
    """The job could not end otherwise: nothing else will ever answer for such an item."""
    async with serving(settings) as service:
        job = await ended_job(mesh, 1, failed=4)

        def spoil(c) -> None:
            for index, text in ((1, '{"prompt": 7}'), (2, '"' + "x" * (1 << 20) + '"')):
                value = (
                    text
                    if index == 1
                    else codec.TASK.encode(task("j", 2, prompt=TextPrompt(text=text))).decode()
                )
                c.execute("UPDATE outcomes SET task = ? WHERE job = 'j' AND \"index\" = ?", [value, index])

        await service._store.write(spoil)
        assert (await retry(mesh)).resubmitted == 4
        assert [t.index for t in await finish(job, 2)] == [3, 4]
        await assert_whole(job, 5, generation=2, ok=3, failed=2)
        rows = await sql(
            mesh,
            "SELECT \"index\", error_type FROM outcomes WHERE generation = 2 AND status = 'failed' ORDER BY 1",
        )
        assert rows == [[1, "task_unreadable"], [2, "too_large"]]


# --- results out of turn --------------------------------------------------------------------------
async def test_late_and_repeated_results_disturb_nothing(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 2, failed=4)
        await retry(mesh)
        await until(lambda: _when_all(job, 4))
        # The first generation once more (a worker cut off for long): a duplicate, though it says ok now.
        await job.results([result("j", 3), result("j", 0, "failed")])
        await until(job.results_empty)
        status = await job.status()
        assert (status.ok, status.failed, status.duplicates, status.queued) == (2, 0, 2, 4)
        # Twice the same of the second.
        tasks = [t for _, _, t, _ in await stored_tasks(job)]
        await job.results([outcome(tasks[0]), outcome(tasks[0], "failed"), outcome(tasks[1])])
        await until(job.results_empty)
        status = await job.status()
        assert (status.ok, status.failed, status.duplicates) == (4, 0, 3)
        await job.take_away([2, 3])
        await finish(job, 2)
        await assert_whole(job, 6, generation=2, ok=6, duplicates=3)
        await job.results([outcome(tasks[2], "dead"), result("j", 4)])
        await until(job.results_empty)
        await assert_whole(job, 6, generation=2, ok=6, duplicates=5)


async def test_a_generation_that_nobody_asked_for_counts_and_is_left_behind(
    mesh: Mesh, settings: Settings
) -> None:
    """Somebody published by hand: the latest outcome counts, and the next retry is later still."""
    async with serving(settings):
        job = await ended_job(mesh, 2, failed=3)
        await job.results(
            [outcome(task("j", 2, generation=5)), outcome(task("j", 3, generation=5), "failed")]
        )
        await until(job.results_empty)
        status = await job.status()
        assert (status.ok, status.failed, status.generation) == (3, 2, 5)
        assert await sql(mesh, "SELECT count(*) FROM current_outcomes") == [[5]]
        reply = await retry(mesh)
        assert (reply.generation, reply.resubmitted) == (6, 2)
        # The outcome of an older generation comes late: it stands beside.
        await until(lambda: _when_all(job, 2))
        await job.results([outcome(task("j", 3, generation=4))])
        await until(job.results_empty)
        status = await job.status()
        assert (status.ok, status.failed, status.queued) == (3, 0, 2)
        await finish(job, 6)
        status = await job.ended()
        assert (status.ok, status.failed, status.state) == (5, 0, "completed")
        # The retry told first how the job stood before it.
        assert [(e.generation, e.ok) for e in await events(job, "completed")] == [(1, 2), (5, 3), (6, 5)]
        assert (await job.audit()).balanced


# --- cancelling -----------------------------------------------------------------------------------
async def test_cancelled_in_the_middle(mesh: Mesh, settings: Settings) -> None:
    """What ran again keeps its new outcome, what did not is cancelled in its generation, the old ones stand beside."""
    async with serving(settings):
        job = await ended_job(mesh, 3, failed=5)
        await retry(mesh)
        await until(lambda: _when_all(job, 5))
        await run_stored(job, only=lambda t: t.index < 5)
        await until(job.results_empty)
        await cancel(mesh)
        await until(lambda: _completed(job, 2))
        await assert_whole(job, 8, generation=2, ok=5, cancelled=3)
        rows = await sql(
            mesh,
            "SELECT \"index\", generation, custom_id, shape FROM outcomes WHERE status = 'cancelled' ORDER BY 1",
        )
        assert rows == [[i, 2, f"c{i}", 6] for i in (5, 6, 7)]
        event = (await events(job, "completed"))[-1]
        assert (event.state, event.cause, event.reason, event.cancelled) == (
            "cancelled",
            "requested",
            "enough",
            3,
        )
        (cancelled,) = await events(job, "cancelled")
        assert isinstance(cancelled, JobCancelled)
        assert cancelled.count == 8
        # A late result of the retry, and another retry.
        await job.results([outcome(task("j", 7, generation=2))])
        await until(job.results_empty)
        assert (await job.status()).cancelled == 3
        assert (await error_of(retry(mesh))).code == "job_cancelled"


async def _completed(job: Producer, generation: int) -> bool:
    event = await job.completed()
    return event is not None and event.generation == generation


async def test_cancelled_while_it_is_stored(mesh: Mesh, settings: Settings) -> None:
    """No batch is stored after the intake closed; whatever was is purged."""
    async with serving(settings):
        for n in range(4):
            job = await ended_job(mesh, 2, failed=1_500, job=f"j{n}")
            await retry(mesh, job.job)
            if n:
                await until(lambda job=job, n=n: _at_least(job, 300 * (n - 1) + 1))
            await cancel(mesh, job.job)
            await until(lambda job=job: _completed(job, 2), 30)
            await assert_whole(job, 1_502, generation=2, ok=2, cancelled=1_500)


async def _at_least(job: Producer, count: int) -> bool:
    subject = job.mesh.subjects.tasks_of_job(job.job)
    return await jsapi.count_subject(job.mesh, job.mesh.topology.tasks, subject) >= count


async def test_cancelled_in_parts(mesh: Mesh, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.completion.job_rows.FILL_ROWS", 7)
    async with serving(settings):
        job = await ended_job(mesh, 10, failed=40)
        await retry(mesh)
        await cancel(mesh)
        await until(lambda: _completed(job, 2))
        await assert_whole(job, 50, generation=2, ok=10, cancelled=40)


# --- a foreign record -----------------------------------------------------------------------------
async def test_an_old_record_and_an_unreadable_one_are_no_obstacle(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 1, failed=2)
        subject = mesh.subjects.manifest("j")
        await until(lambda: _count_is(mesh, subject, 0))
        for bad in (
            b"no record",
            codec.MANIFEST.encode(Manifest(job="j", input_fingerprint=INPUT, stored=3)),
        ):
            await publish(mesh, mesh.topology.tasks, subject, bad)
        await retry(mesh)
        assert [t.index for t in await finish(job, 2)] == [1, 2]
        await assert_whole(job, 3, generation=2, ok=3)


async def test_where_must_be_a_condition_and_harmless(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 1, failed=2)
        await ended_job(mesh, 0, failed=1, job="other")
        bad = {
            "status =": InvalidInput,
            "no_such_column = 1": InvalidInput,
            "status = 'failed'; DROP TABLE outcomes": InvalidInput,
            "true) UNION SELECT 1 WHERE (true": InvalidInput,
            "true) LIMIT (1": InvalidInput,
            "true) ORDER BY (1": InvalidInput,
            "1), (2": InvalidInput,
            "(1, 2)": InvalidInput,
            "true) FROM jobs WHERE (true": InvalidInput,
            "status = ?": InvalidInput,
            "status = $job": InvalidInput,
            "count(*) > 1": InvalidInput,
            "-- nothing": InvalidInput,
            "'text'": InvalidInput,
            "\"index\" IN (SELECT 1 FROM read_csv('/etc/passwd'))": Refused,
            "getenv('HOME') = 'x'": Refused,
            "EXISTS (SELECT 1 FROM duckdb_settings())": Refused,
            "(" * 3_000 + "1" + ")" * 3_000: InvalidInput,
        }
        for where, kind in bad.items():
            error = await error_of(retry(mesh, where=where))
            assert isinstance(error, kind), (where, error)
            if len(where) < 200:
                assert f"`{where}`" in str(error), (where, error)
                assert not isinstance(error, InvalidInput) or error.field == "where"
        assert await sql(mesh, "SELECT sum(generation), count(*) FROM jobs") == [[2, 2]]
        # Parentheses that close too early choose among the job's own items all the same.
        assert (await retry(mesh, where="false) OR (true")).resubmitted == 2
        assert [t.index for t in await finish(job, 2)] == [1, 2]
        assert await sql(mesh, "SELECT count(*) FROM retry_items WHERE job = 'other'") == [[0]]


async def test_a_heavy_condition_is_ended_and_landing_goes_on(mesh: Mesh, settings: Settings) -> None:
    from tests.completion.world import with_options

    async with serving(with_options(settings, query_timeout_s=1.0)):
        job = await ended_job(mesh, 1, failed=1)
        heavy = '(SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE a.range + b.range = "index") > 0'
        asking = asyncio.ensure_future(error_of(retry(mesh, where=heavy)))
        other = Producer(mesh, "other")
        await other.whole(5)
        await other.work(range(5))
        await other.ended()
        error = await asking
        assert isinstance(error, Refused)
        assert error.code == "query_timeout"
        assert "took longer than 1 s" in str(error)
        assert (await retry(mesh)).resubmitted == 1
        await finish(job, 2)
        await assert_whole(job, 2, generation=2, ok=2)


async def test_the_next_retry_may_follow_at_once(mesh: Mesh, settings: Settings) -> None:
    """The end of one generation, its event and its record do not touch the next one, however late they are taken."""
    async with serving(settings):
        job = await ended_job(mesh, 1, failed=3)
        for generation in range(2, 8):
            assert (await retry(mesh)).generation == generation
            await finish(job, generation, "failed")
        assert (await retry(mesh)).generation == 8
        await finish(job, 8)
        await assert_whole(job, 4, generation=8, ok=4)


async def test_a_function_with_other_shapes_since(mesh: Mesh, settings: Settings) -> None:
    await register_function(mesh, FunctionSpec(name="small", engine="echo", min_shape=7, max_shape=8))
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(2)
        tasks = [msgspec.structs.replace(task("j", i), function="small") for i in range(2)]
        await job.results(
            Result(job="j", index=t.index, function="small", status="failed", task=t, shape=s)
            for t, s in zip(tasks, (2, 20), strict=True)
        )
        await job.take_away([0, 1])
        await job.ended()
        await retry(mesh)
        stored = await until(lambda: _when_all(job, 2))
        assert [s for _, s, _, _ in stored] == ["hr.tasks.small.normal.t7.j", "hr.tasks.small.normal.t8.j"]
        assert FUNCTION == "echo"
