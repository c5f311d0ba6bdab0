"""Completion on a real broker: landing, states, results, the account and its proof."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headrace.completion.outcomes import insert_results
from headrace.completion.service import database_path
from headrace.contracts import codec
from headrace.contracts.api import ResultsReply
from headrace.contracts.errors import Conflict, NotFound
from headrace.contracts.messages import Choice, DeadLetter, Manifest, Result, Task, TextPrompt, WorkerReport
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer
from headrace.mesh.microservice import call_api
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.completion.world import (
    FUNCTION,
    INPUT,
    SHAPE,
    Process,
    Producer,
    error_of,
    process,
    register,
    result,
    serving,
    sql,
    until,
    with_options,
)

pytestmark = pytest.mark.anyio


def total(status: object) -> int:
    return sum(getattr(status, n) for n in ("ok", "failed", "dead", "cancelled", "queued", "landing"))


async def test_a_job_from_opened_to_completed(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open(model="m", lane="urgent", at_us=1_790_000_000_000_000)
        await job.submit(20)
        status = await until(job.status)
        assert (status.state, status.submitted, status.queued, status.landing) == ("open", 20, 20, 0)
        await job.work(range(12))
        status = await until(job.status)
        assert (status.submitted, total(status)) == (20, 20)
        await job.submit(10, closed="sealed")
        await job.seal()
        await job.work(range(12, 30))
        status = await job.ended()
        assert (status.state, status.ok, status.submitted, total(status)) == ("completed", 30, 30, 30)
        assert (status.function, status.model, status.lane, status.opened_us) == (
            FUNCTION, "m", "urgent", 1_790_000_000_000_000,
        )  # fmt: skip
        assert (status.tokens_in, status.tokens_out) == (90, 60)
        event = await job.completed()
        assert event is not None
        assert (event.state, event.count, event.ok) == ("completed", 30, 30)

        async def empty() -> bool:
            tasks = await jsapi.stream_info(mesh, mesh.topology.tasks)
            results = await jsapi.stream_info(mesh, mesh.topology.results)
            return tasks["state"]["messages"] == results["state"]["messages"] == 0

        await until(empty)
        audit = await job.audit()
        assert audit.balanced
        assert audit.missing == []
        assert audit.sources.manifest_closed == "sealed"
        assert (audit.sources.manifest_stored, audit.sources.rows_landed) == (30, 30)


async def test_nine_of_nine_failed(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(9)
        await job.work(range(9), "failed")
        status = await job.ended()
        assert (status.state, status.failed, status.ok) == ("completed_with_errors", 9, 0)
        assert (await job.audit()).balanced
        assert await sql(mesh, "SELECT count(*) FROM outcomes WHERE error_type = 'too_long'") == [[9]]


async def test_a_job_without_items_completes(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(0)
        status = await job.ended()
        assert (status.state, status.submitted) == ("completed", 0)
        assert (await job.audit()).balanced


async def test_a_job_that_nobody_knows(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        for name in ("status", "audit", "result", "results", "cancel"):
            assert isinstance(await error_of(call_api(mesh, name, {"job": "none"})), NotFound), name


async def test_undecodable_results_are_dead_lettered_and_their_neighbours_land(
    mesh: Mesh, settings: Settings
) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(4)
        subject = mesh.subjects.result("job", FUNCTION, "j")
        for bad in (
            b"not json",
            b'{"job":"j","index":-1,"function":"echo","status":"ok"}',
            b'{"job":"other","index":0,"function":"echo","status":"ok"}',
            b'{"job":"j","index":2,"function":"echo","status":"ok","value":"\xff\xfe"}',
        ):
            await publish(mesh, mesh.topology.results, subject, bad)
        await job.work(range(4))
        assert (await job.ended()).ok == 4
        await until(job.results_empty)

        async def letters() -> bool:
            return await sql(mesh, "SELECT count(*) FROM dead") == [[4]]

        await until(letters)
        found = await sql(mesh, "SELECT data, reason FROM dead WHERE stream_sequence = 1")
        assert base64.b64decode(found[0][0]) == b"not json"
        assert "not a result" in found[0][1]


async def test_dead_letters_are_copied_once(mesh: Mesh, settings: Settings) -> None:
    letter = DeadLetter(
        origin="HR_TASKS", subject="hr.tasks.x", reason="why", data=b"\x00\xff", headers={"a": "b"}
    )
    await publish(mesh, mesh.topology.dead, mesh.subjects.dead("HR_TASKS"), codec.DEAD_LETTER.encode(letter))
    await publish(mesh, mesh.topology.dead, mesh.subjects.dead("hand"), b"by hand")

    async def both() -> bool:
        return await sql(mesh, "SELECT origin, reason LIKE '%why%' FROM dead ORDER BY sequence") == [
            ["HR_TASKS", True],
            ["unreadable", False],
        ]

    for _ in range(2):
        async with serving(settings):
            await until(both)


# --- reading --------------------------------------------------------------------------------------
async def test_one_result_before_and_after_it_lands(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(3)
        await until(job.status)

        async def ask(index: int, **more: float) -> dict[str, object]:
            return msgspec.json.decode(await call_api(mesh, "result", {"job": "j", "index": index, **more}))

        assert await ask(1) == {"job": "j", "index": 1, "state": "queued", "landed": False}
        assert (await ask(7))["state"] == "unknown"
        waiting = asyncio.ensure_future(ask(1, wait_s=4.0))
        await asyncio.sleep(0.1)
        await job.work([1])
        async with asyncio.timeout(2.0):
            found = await waiting
        assert (found["status"], found["choices"]) == (
            "ok",
            [{"text": "answer 1", "finish_reason": "length"}],
        )
        assert (await ask(1, generation=2))["landed"] is False
        await job.results([result("j", 1, "failed", generation=2)])
        await until(job.results_empty)
        assert (await ask(1))["status"] == "failed"
        assert (await ask(1, generation=1))["status"] == "ok"


async def test_pages_are_in_order_complete_and_under_max_payload(mesh: Mesh, settings: Settings) -> None:
    rng = random.Random(7)
    indices = [i for i in range(400) if i % 7]
    rng.shuffle(indices)
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.open()
        large = {i: "x" * rng.choice((10, 100_000)) for i in indices}
        for i in range(0, len(indices), 20):
            await job.results(
                result("j", n, choices=[Choice(text=large[n])], generation=1) for n in indices[i : i + 20]
            )
        await job.results([result("j", 1, "failed", generation=2)])
        await until(job.results_empty, 30)
        after, seen, pages = -1, [], 0
        while after is not None:
            data = await call_api(mesh, "results", {"job": "j", "after": after, "limit": 150})
            assert len(data) < mesh.max_payload
            body = msgspec.json.decode(data)
            seen += body["results"]
            after = body["next"]
            pages += 1
        assert [r["index"] for r in seen] == sorted(indices)
        assert pages > 5
        assert (seen[0]["index"], seen[0]["status"], seen[0]["generation"]) == (1, "failed", 2)
        assert all(r["choices"][0]["text"] == large[r["index"]] for r in seen[1:])


async def test_an_outcome_that_fills_a_reply_comes_without_its_task(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service:
        task = Task(job="j", index=0, function=FUNCTION, prompt=TextPrompt(text="p" * 600_000))
        cut = result("j", 0, "failed", task=task, choices=[Choice(text="x" * 600_000)])
        whole = result("j", 1, "failed", task=replace(task, index=1))
        too_large = result("j", 2, choices=[Choice(text="x" * 1_100_000)])
        await service._store.write(insert_results, [cut, whole, too_large, result("j", 3)], 1)

        async def page(after: int) -> list[Result]:
            body = await call_api(mesh, "results", {"job": "j", "after": after})
            return msgspec.json.decode(body, type=ResultsReply).results

        (first,) = await page(-1)
        assert (first.index, first.task, len(first.choices[0].text)) == (0, None, 600_000)
        assert (await page(0))[0].task == whole.task
        assert "go on after 2" in str(await error_of(page(1)))
        assert [r.index for r in await page(2)] == [3]


async def test_jobs_are_listed_newest_first(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        for n in range(3):
            job = Producer(mesh, f"j{n}")
            await job.open(at_us=1_000_000 * (n + 1))
            await job.submit(5)
        await job.work([0], remove=True)
        await job.submit(0, closed="sealed")
        await job.seal()

        async def names() -> list[str]:
            body = msgspec.json.decode(await call_api(mesh, "jobs", {}))
            return [j["job"] for j in body["jobs"]]

        await until(job.results_empty)
        await until(lambda: _equal(names, ["j2", "j1", "j0"]))
        body = msgspec.json.decode(await call_api(mesh, "jobs", {"limit": 5, "state": "sealed"}))
        (only,) = body["jobs"]
        assert (only["job"], only["submitted"], only["ok"], only["queued"]) == ("j2", 5, 1, 4)


async def _equal(read: object, wanted: object) -> bool:
    return await read() == wanted  # type: ignore[operator]


# --- the account ----------------------------------------------------------------------------------
async def test_a_lost_task_is_found_and_named(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(20)
        await job.take_away([3, 4, 5, 19])
        await job.work([i for i in range(20) if i not in (3, 4, 5, 19)])
        await until(job.results_empty)
        audit = await job.audit()
        assert not audit.balanced
        assert audit.missing == [(3, 5), (19, 19)]
        # The numbers are those of the sources: they must not add up.
        assert (audit.submitted, total(audit)) == (20, 16)
        assert audit.state == "sealed"


async def test_a_lost_task_shows_while_others_still_wait(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(20)
        await job.take_away([3])
        await job.work(range(10, 15))
        await until(job.results_empty)
        audit = await job.audit()
        assert not audit.balanced
        assert (audit.missing, audit.queued, audit.ok) == ([], 14, 5)
        assert total(audit) == 19


async def test_a_lost_row_is_found(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service:
        job = Producer(mesh, "j")
        await job.whole(5)
        await job.work(range(5))
        await job.ended()
        await service._store.write(lambda c: c.execute('DELETE FROM outcomes WHERE "index" = 2'))
        audit = await job.audit()
        assert not audit.balanced
        assert audit.missing == [(2, 2)]
        assert audit.sources.rows_landed == 4


async def test_a_result_stored_whose_task_is_still_leased_balances(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(10)
        leased: list[Delivery] = []
        consumer = PullConsumer(mesh, mesh.topology.task_consumer(FUNCTION, "normal", SHAPE), leased.append)
        await consumer.start()
        consumer.ask(4)
        await until(lambda: len(leased) == 4)
        # The worker died between the PubAck of its results and the acks of its tasks.
        await job.work([codec.TASK.decode(d.data).index for d in leased[:3]], remove=False)
        await until(job.results_empty)
        audit = await job.audit()
        assert audit.balanced, audit
        assert (audit.ok, audit.queued, total(audit)) == (3, 7, 10)
        assert audit.sources.tasks_in_broker == 10
        await consumer.stop()


async def test_a_task_stored_twice_does_not_balance(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(3)
        task = Task(job="j", index=1, function=FUNCTION, prompt=TextPrompt(text="hi"))
        subject = mesh.subjects.task(FUNCTION, "normal", SHAPE, "j")
        await publish(mesh, mesh.topology.tasks, subject, codec.TASK.encode(task))
        assert not (await job.audit()).balanced


async def test_running_comes_from_the_reports_of_workers(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(10)
        bucket = mesh.topology.workers_bucket
        at = time.time_ns() // 1_000
        for worker, running, oldest, age in (("a", 2, 500, 0), ("b", 3, 400, 0), ("old", 4, 1, 60_000_000)):
            report = WorkerReport(
                worker=worker, function=FUNCTION, running={"j": running}, oldest={"j": oldest}, at_us=at - age
            )
            await publish(mesh, f"KV_{bucket}", f"$KV.{bucket}.{worker}", codec.WORKER_REPORT.encode(report))

        async def seen() -> bool:
            status = await job.status()
            return (status.running, status.oldest_running_us) == (5, 400)

        await until(seen)


async def test_completed_never_exceeds_the_rows_and_every_sample_balances(
    mesh: Mesh, settings: Settings
) -> None:
    """A12, with a sink that is slowed down: ok is read from the same snapshot as the rows."""
    await register(mesh)
    async with serving(with_options(settings, batch_rows=50)) as service:
        job = Producer(mesh, "j")
        await job.whole(2_000)
        samples = 0

        async def worker() -> None:
            for i in range(0, 2_000, 100):
                await job.work(range(i, i + 100))

        working = asyncio.ensure_future(worker())
        while not working.done() or not await job.completed():
            status = await job.status()
            assert total(status) == status.submitted == 2_000, status
            rows = await service._store.read(
                lambda c: c.execute("SELECT count(*) FROM outcomes").fetchone()[0]
            )
            assert status.ok <= rows
            audit = await job.audit()
            assert audit.balanced, audit
            assert total(audit) == 2_000
            samples += 1
        await working
        assert samples > 3
        assert (await job.ended()).ok == 2_000


# --- starting and stopping ------------------------------------------------------------------------
async def test_a_second_completion_on_the_file_says_who_has_it(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    async with process(settings, tmp_path) as first:
        second = Process(settings, tmp_path / "nats")
        await second.start(wait=False)
        assert await second.wait() == 2
        (line,) = [x for x in second.log.read_text().splitlines() if x.startswith("error:")]
        assert str(first.process.pid) in line
        assert "one completion service owns a data plane" in line


async def test_without_streams_it_says_what_to_do(nats_server: NatsServer, settings: Settings) -> None:
    error = await error_of(_start(settings))
    assert isinstance(error, NotFound)
    assert "headrace init" in str(error)
    assert not database_path(settings).exists()


async def _start(settings: Settings) -> None:
    async with serving(settings):
        pass


async def test_a_stop_lands_what_is_in_hand_and_restarts_go_on(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    job = Producer(mesh, "j")
    await job.whole(3_000)
    async with process(settings, tmp_path) as running:
        for part in range(3):
            await job.work(range(part * 1_000, part * 1_000 + 1_000), remove=False)
            assert await running.stop() == 0
            assert not Path(f"{database_path(settings)}.wal").exists()
            await running.start()
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
        status = await job.ended()
    assert (status.ok, status.duplicates) == (3_000, 0)
    assert await job.count_completed_events() == 1


async def test_a_closed_file_conflict_is_named(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    async with process(settings, tmp_path):
        assert isinstance(await error_of(_start(settings)), Conflict)


async def test_the_progress_record_of_an_unfinished_job_stays(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(2)
        await job.work([0])
        await until(job.results_empty)
        stored = await jsapi.last_message(mesh, mesh.topology.tasks, mesh.subjects.manifest("j"))
        assert stored is not None
        assert codec.MANIFEST.decode(stored.data) == Manifest(
            job="j", input_fingerprint=INPUT, stored=2, closed="sealed"
        )


async def test_the_front_door_is_found_by_nats_micro(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        answer = msgspec.json.decode((await mesh.request("$SRV.INFO.headrace-completion", b"")).data)
        names = {e["subject"] for e in answer["endpoints"]}
        assert names == {
            f"hr.api.{n}"
            for n in (
                "status", "audit", "jobs", "result", "result.part", "results", "query", "checks", "cancel", "retry",
                "dead", "redrive", "rebuild", "losses", "pipeline.open", "pipeline.status", "pipeline.audit",
                "pipeline.list", "pipeline.cancel",
            )
        }  # fmt: skip
