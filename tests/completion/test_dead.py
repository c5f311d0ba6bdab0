"""What was given up: how it is listed and shown, and how it goes its way once more."""

from __future__ import annotations

import base64

import msgspec
import pytest

from headrace.contracts import codec
from headrace.contracts.errors import InvalidInput, NotFound, Refused
from headrace.contracts.messages import DeadLetter
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.completion.again import (
    assert_whole,
    dead,
    ended_job,
    fail,
    finish,
    outcome,
    redrive,
    retry,
    run_stored,
    task,
)
from tests.completion.world import FUNCTION, Producer, cancel, error_of, register, result, serving, sql, until

pytestmark = pytest.mark.anyio

TASK_SUBJECT = "hr.tasks.echo.normal.t6.j"


@pytest.fixture(autouse=True)
async def function(mesh: Mesh) -> None:
    await register(mesh)


async def letter(
    mesh: Mesh, subject: str, data: bytes, reason: str = "not a task/1", **fields: object
) -> None:
    """A dead letter as a service stores it."""
    fields.setdefault("headers", {"Headrace-Schema": "task/1"})
    dead_letter = DeadLetter(
        origin="HR_TASKS", subject=subject, reason=reason, data=data, stream="HR_TASKS", tries=1,
        **{"at_us": 1_790_000_000_000_000, "sequence": 9, **fields},
    )  # fmt: skip
    await publish(
        mesh, mesh.topology.dead, mesh.subjects.dead("HR_TASKS"), codec.DEAD_LETTER.encode(dead_letter)
    )


async def dead_task_letter(mesh: Mesh, data: bytes, **fields: object) -> None:
    await letter(mesh, TASK_SUBJECT, data, **fields)


async def letters(mesh: Mesh, count: int = 1) -> None:
    """Wait until that many letters have landed."""

    async def landed() -> bool:
        return await sql(mesh, "SELECT count(*) FROM dead") == [[count]]

    await until(landed)


async def task_messages(mesh: Mesh) -> list[jsapi.StoredMessage]:
    found, sequence = [], 1
    while stored := await jsapi.next_message(mesh, mesh.topology.tasks, TASK_SUBJECT, sequence):
        found.append(stored)
        sequence = stored.sequence + 1
    return found


# --- list and show --------------------------------------------------------------------------------
async def test_items_and_letters_newest_first(mesh: Mesh, settings: Settings) -> None:
    """A10's dead, and what no consumer could take."""
    async with serving(settings):
        await letter(mesh, TASK_SUBJECT, b"old", at_us=1_000_000)
        await ended_job(mesh, 3, failed=2, dead=2)
        await ended_job(mesh, 0, dead=1, job="other")
        await letters(mesh)
        reply = await dead(mesh)
        assert reply.next is None
        assert [e.kind for e in reply.entries] == ["item"] * 3 + ["letter"]
        assert [e.id for e in reply.entries] == ["other/0@1", "j/6@1", "j/5@1", "1"]
        item, last = reply.entries[1], reply.entries[-1]
        assert (item.job, item.index, item.generation, item.tries) == ("j", 6, 1, 5)
        assert (item.error_type, item.reason, item.custom_id, item.function, item.worker) == (
            "tries_exhausted", "given up", "c6", FUNCTION, "w1",
        )  # fmt: skip
        assert (last.origin, last.subject, last.reason, last.tries, last.job, last.at_us) == (
            "HR_TASKS", TASK_SUBJECT, "not a task/1", 1, "j", 1_000_000,
        )  # fmt: skip
        assert all(e.task is None and e.data is None and e.headers is None for e in reply.entries)
        assert [e.id for e in (await dead(mesh, job="j")).entries] == ["j/6@1", "j/5@1", "1"]
        assert (await dead(mesh, job="none")).entries == []


async def test_pages_lose_and_repeat_nothing(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        await ended_job(mesh, 0, dead=40)  # one commit, so one time: the id decides
        for i in range(7):
            await letter(mesh, TASK_SUBJECT, b"x", reason="r" * 2_000, sequence=i)
        await letters(mesh, 7)
        for limit in (1, 6, 1_000):
            found: list[str] = []
            after = None
            while True:
                page = await dead(mesh, limit=limit, **({"after": after} if after else {}))
                assert 0 < len(page.entries) <= limit
                found += [e.id for e in page.entries]
                after = page.next
                if after is None:
                    break
            assert sorted(found) == sorted([f"j/{i}@1" for i in range(40)] + [str(i) for i in range(1, 8)])
        error = await error_of(dead(mesh, after="yesterday"))
        assert isinstance(error, InvalidInput)


async def test_a_page_fits_into_a_reply(mesh: Mesh, settings: Settings) -> None:
    """1,000 reasons of 2 kB are more than a message carries: the page is shorter, and says how it goes on."""
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(900)
        from headrace.contracts.messages import ItemError

        for start in range(0, 900, 100):
            await fail(
                job,
                range(start, start + 100),
                "dead",
                error=ItemError(type="x", message="é" * 1_000 + "y" * 900),
            )
        await job.ended()
        first = await dead(mesh, limit=1_000)
        assert 100 < len(first.entries) < 900
        second = await dead(mesh, limit=1_000, after=first.next)
        assert not {e.id for e in first.entries} & {e.id for e in second.entries}


async def test_one_is_shown_whole(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        await ended_job(mesh, 1, failed=1, dead=1)
        await letter(mesh, TASK_SUBJECT, "no täsk".encode())
        await letter(mesh, TASK_SUBJECT, b"\xff\x00", headers={"a": "b"})
        await letter(mesh, TASK_SUBJECT, b"\x01" * 10_000)
        await letters(mesh, 3)
        (item,) = (await dead(mesh, id="j/2@1")).entries
        assert msgspec.convert(item.task, type(task("j", 2))) == task("j", 2)
        one, two, three = [(await dead(mesh, id=str(i))).entries[0] for i in (1, 2, 3)]
        assert (one.data, one.encoding, one.headers) == ("no täsk", "utf-8", {"Headrace-Schema": "task/1"})
        assert (base64.b64decode(two.data), two.encoding, two.headers) == (b"\xff\x00", "base64", {"a": "b"})
        assert (base64.b64decode(three.data), three.encoding) == (b"\x01" * 10_000, "base64")
        for id_, kind in {
            "j/0@1": NotFound, "j/1@1": NotFound, "j/2@2": NotFound, "9": NotFound, "": InvalidInput, "j": InvalidInput,
            "j/2": InvalidInput, "j/-1@1": InvalidInput, "a.b/1@1": InvalidInput, "1' OR true": InvalidInput,
        }.items():  # fmt: skip
            assert isinstance(await error_of(dead(mesh, id=id_)), kind), id_


# --- items ----------------------------------------------------------------------------------------
async def test_one_item_is_redriven_alone(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 2, failed=2, dead=3)
        reply = await redrive(mesh, id="j/5@1")
        assert (reply.redriven, reply.job, reply.generation) == (1, "j", 2)
        # It runs again: no longer in the list, and not redriven twice.
        assert [e.id for e in (await dead(mesh)).entries] == ["j/6@1", "j/4@1"]
        assert (await dead(mesh, id="j/5@1")).entries[0].redriven is True
        error = await error_of(redrive(mesh, id="j/5@1"))
        assert isinstance(error, Refused)
        assert (error.code, str(error)) == (
            "already_redriven",
            "j/5@1 was redriven before: it runs again as generation 2",
        )
        running = await error_of(redrive(mesh, id="j/4@1"))
        assert isinstance(running, Refused)
        assert running.code == "still_running"
        assert [t.index for t in await finish(job, 2, "dead")] == [5]
        assert [e.id for e in (await dead(mesh)).entries] == ["j/5@2", "j/6@1", "j/4@1"]
        assert (await redrive(mesh, id="j/5@2")).generation == 3
        await finish(job, 3)
        await assert_whole(job, 7, generation=3, ok=3, failed=2, dead=2)
        for id_ in ("j/0@1", "j/2@1", "j/99@1", "none/0@1"):  # ok, failed, not there
            assert isinstance(await error_of(redrive(mesh, id=id_)), NotFound), id_


async def test_all_of_a_job(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 2, failed=2, dead=3)
        reply = await redrive(mesh, job="j")
        assert (reply.redriven, reply.job, reply.generation, reply.left) == (3, "j", 2, 0)
        assert [t.index for t in await finish(job, 2)] == [4, 5, 6]
        await assert_whole(job, 7, generation=2, ok=5, failed=2)
        reply = await redrive(mesh, job="j")
        assert (reply.redriven, reply.generation) == (0, None)
        assert isinstance(await error_of(redrive(mesh, job="none")), NotFound)
        assert isinstance(await error_of(redrive(mesh)), InvalidInput)
        assert isinstance(await error_of(redrive(mesh, job="j", id="1")), InvalidInput)


async def test_items_without_their_task(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(2)
        await job.work([0], "dead")
        await fail(job, [1], "dead")
        await job.ended()
        error = await error_of(redrive(mesh, id="j/0@1"))
        assert isinstance(error, Refused)
        assert error.code == "task_lost"
        reply = await redrive(mesh, job="j")
        assert (reply.redriven, reply.generation, reply.left) == (1, 2, 1)
        assert "do not carry their task" in (reply.note or "")


# --- letters --------------------------------------------------------------------------------------
async def test_a_task_that_nobody_could_read_goes_its_way_again(mesh: Mesh, settings: Settings) -> None:
    """Its bytes, its subject and its headers, but for those that speak to the broker."""
    headers = {
        "Headrace-Schema": "task/1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "Nats-Batch-Id": "b",
        "Nats-Batch-Sequence": "3",
        "nats-batch-commit": "1",
        "Nats-Expected-Last-Subject-Sequence": "77",
        "Nats-Msg-Id": "theirs",
        "Nats-Rollup": "all",
    }
    async with serving(settings):
        bystander = Producer(mesh, "j")
        await bystander.submit(1)
        await dead_task_letter(mesh, b"no task \xff", headers=headers)
        await letters(mesh)
        reply = await redrive(mesh, id="1")
        assert (reply.redriven, reply.job, reply.generation) == (1, None, None)
        _, stored = await task_messages(mesh)
        assert stored.data == b"no task \xff"
        assert {k: v for k, v in stored.headers.items() if not k.startswith("Nats-")} == {
            k: v for k, v in headers.items() if not k.lower().startswith("nats-")
        }
        assert {k for k in stored.headers if k.startswith("Nats-")} == {"Nats-Msg-Id", "Nats-Expected-Stream"}
        (entry,) = (await dead(mesh)).entries
        assert entry.redriven is True
        error = await error_of(redrive(mesh, id="1"))
        assert isinstance(error, Refused)
        assert error.code == "already_redriven"
        assert "was redriven before, at 20" in str(error)
        assert "--again" in str(error)
        assert len(await task_messages(mesh)) == 2
        assert (await redrive(mesh, id="1", again=True)).redriven == 1
        assert len(await task_messages(mesh)) == 3


async def test_a_result_that_could_not_be_read_lands_once_it_can(mesh: Mesh, settings: Settings) -> None:
    """Redriven while it is no result yet, it comes back as another letter; one that is a result by now lands."""
    subject = "hr.results.job.echo.j"
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(2)
        await job.take_away([0, 1])
        await job.results([result("j", 0)])
        await letter(mesh, subject, b"{", "not a result/1", headers={})
        good = codec.RESULT.encode(result("j", 1))
        await letter(mesh, subject, good, "not a result/1", headers={"Headrace-Schema": "result/1"})
        await letters(mesh, 2)
        assert (await redrive(mesh, id="1")).redriven == 1
        await letters(mesh, 3)  # refused by landing as before
        assert (await redrive(mesh, id="2")).redriven == 1
        await assert_whole(job, 2, generation=1, ok=2)


async def test_only_this_meshs_own_subjects(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        subjects = [
            "$JS.API.STREAM.DELETE.HR_TASKS",
            "$KV.HR_functions.echo",
            "$SYS.REQ.SERVER.PING",
            "_INBOX.x.y",
            "hr.api.cancel",
            "hr.dead.HR_TASKS",
            "hr.tasks.manifest.j",
            "hr.tasks.echo.normal.t6.j.more",
            "hr.tasks.echo.normal.t99.j",
            "hr.tasks.echo.*.t6.j",
            "hr.results.none.echo.j",
            "hr.results.job.echo.>",
            "hr.jobs.j.none",
            "hr.jobs.j",
            "other.tasks.echo.normal.t6.j",
            "hr.tasks.echo.normal.t6.j\r\nPUB x 0",
            "",
        ]
        before = (await jsapi.stream_info(mesh, mesh.topology.tasks))["state"]["messages"]
        for subject in subjects:
            await letter(mesh, subject, b"x")
        await letters(mesh, len(subjects))
        for number, subject in enumerate(subjects, 1):
            error = await error_of(redrive(mesh, id=str(number)))
            assert isinstance(error, Refused), subject
            assert error.code == "foreign_subject", subject
        assert await sql(mesh, "SELECT count(*) FROM dead WHERE redriven_at IS NOT NULL") == [[0]]
        after = (await jsapi.stream_info(mesh, mesh.topology.tasks))["state"]["messages"]
        assert after == before
        # What somebody published among the letters without being one is kept, and goes nowhere.
        await publish(mesh, mesh.topology.dead, mesh.subjects.dead("x"), b"no letter")
        await letters(mesh, len(subjects) + 1)
        assert isinstance(await error_of(redrive(mesh, id=str(len(subjects) + 1))), Refused)


async def test_letters_that_cannot_be_redriven(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        await letter(mesh, TASK_SUBJECT, b"x" * 10, "not a task/1 (cut: the message had 900000 bytes)")
        await letters(mesh)
        error = await error_of(redrive(mesh, id="1"))
        assert isinstance(error, Refused)
        assert error.code == "letter_cut"
        job = Producer(mesh, "j")
        await job.whole(1)
        await letter(mesh, TASK_SUBJECT, b"x")
        await letters(mesh, 2)
        await cancel(mesh)
        await job.ended()
        error = await error_of(redrive(mesh, id="2"))
        assert isinstance(error, Refused)
        assert error.code == "job_cancelled"
        reply = await redrive(mesh, job="j")
        assert (reply.redriven, reply.left) == (0, 2)
        assert "letter 1 holds only a part" in (reply.note or "")
        assert await task_messages(mesh) == []


async def test_a_full_queue_is_said(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        await dead_task_letter(mesh, b"x")
        await letters(mesh)
        info = await jsapi.stream_info(mesh, mesh.topology.tasks)
        await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", info["config"] | {"max_bytes": 1})
        error = await error_of(redrive(mesh, id="1"))
        assert isinstance(error, Refused)
        assert error.code == "queue_full"
        await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", info["config"])
        assert (await redrive(mesh, id="1")).redriven == 1


async def test_all_of_a_job_with_a_letter_that_kept_it_from_ending(mesh: Mesh, settings: Settings) -> None:
    """One of three tasks could not be read, two are dead: the letter first, the items once the job has ended."""
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(3)
        await job.take_away([2])
        data = codec.TASK.encode(task("j", 2))
        await dead_task_letter(mesh, data)
        await fail(job, [0, 1], "dead")
        await letters(mesh)
        await until(job.results_empty)
        reply = await redrive(mesh, job="j")
        assert (reply.redriven, reply.generation, reply.left) == (1, None, 2)
        assert "still running" in (reply.note or "")
        error = await error_of(redrive(mesh, job="j"))  # the letter is gone, the items have to wait
        assert isinstance(error, Refused)
        assert [t.index for t in await run_stored(job)] == [2]
        await job.ended()
        assert (await redrive(mesh, job="j")).redriven == 2
        await finish(job, 2)
        await assert_whole(job, 3, generation=2, ok=3)


async def test_a_retry_takes_items_out_of_the_list(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = await ended_job(mesh, 1, dead=2)
        await retry(mesh)
        assert (await dead(mesh)).entries == []
        await finish(job, 2, lambda t: "dead" if t.index == 2 else "ok")
        assert [e.id for e in (await dead(mesh)).entries] == ["j/2@2"]
        await job.results([outcome(task("j", 2))])  # a late one of the first generation
        await until(job.results_empty)
        assert [e.id for e in (await dead(mesh)).entries] == ["j/2@2"]


async def test_a_request_that_is_none(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        for name, body in (
            ("dead", {"limit": 0}), ("dead", {"job": "a.b"}), ("redrive", {"id": "x" * 300}), ("redrive", {"job": "*"}),
            ("redrive", {"all": True}), ("retry", {}), ("retry", {"job": "j", "generation": 1}),
            ("retry", {"job": "j", "where": "x" * 2_049}),
        ):  # fmt: skip
            assert isinstance(await error_of(call_api(mesh, name, body)), InvalidInput), (name, body)
