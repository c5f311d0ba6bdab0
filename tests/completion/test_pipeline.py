"""Pipelines through a real worker and completion: each row once through each stage, whatever it is made of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.client.pipelines import pipeline_audit, pipeline_cancel, pipeline_list, pipeline_status
from headrace.client.submit import SubmitOptions, submit
from headrace.contracts import codec
from headrace.contracts.messages import ItemError, Result
from headrace.contracts.pipeline import MAX_FAN_OUT, PipelineOpenReply, PipelineOpenRequest, PipelineSpec
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.settings import Settings
from tests.completion.again import retry
from tests.completion.pipes import (
    DOCUMENTS,
    assert_documents,
    assert_proved,
    documents,
    ended,
    pipeline,
    run,
    stage,
    values,
    write,
)
from tests.completion.world import Producer, cancel, error_of, serving, sql, until
from tests.worker.harness import running, with_worker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend() -> object:
    """Worker and completion run here, on the loop of production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def services(settings: Settings, mesh: Mesh) -> AsyncIterator[None]:
    """Completion, and a worker whose items come back as they are; one with BAD in it is refused."""
    worker = with_worker(settings, engine="echo", engine_options={"fail_on": "BAD"})
    async with serving(settings), running(worker):
        yield


async def open_alone(mesh: Mesh, spec: PipelineSpec) -> PipelineOpenReply:
    """Open a pipeline without its input."""
    body = await call_api(mesh, "pipeline.open", PipelineOpenRequest(spec=spec), timeout_s=10)
    return msgspec.json.decode(body, type=PipelineOpenReply)


async def test_fan_out_one_to_one_and_both_fan_ins(services: None, mesh: Mesh, tmp_path: Path) -> None:
    rows = documents(40)
    path = write(tmp_path / "rows.jsonl", rows)
    receipt = await run(mesh, DOCUMENTS, path)
    assert (receipt.submitted, receipt.resumed_from) == (40, 0)
    assert receipt.jobs == ["docs-first", "docs-chunks", "docs-ask", "docs-perdoc", "docs-all"]
    await assert_documents(mesh, rows)
    again = await run(mesh, DOCUMENTS, path)
    assert (again.submitted, again.resumed_from) == (40, 40)
    await assert_documents(mesh, rows)
    audit = await pipeline_audit(mesh, "docs")
    assert [(s.arrived, s.fed, s.assigned, s.expected) for s in audit.stages[1:]] == [
        (40, 40, 80, 80), (80, 80, 80, 80), (80, 40, 40, 40), (80, 1, 1, 1)
    ]  # fmt: skip
    assert [(p.pipeline, p.state, p.stages) for p in await pipeline_list(mesh)] == [("docs", "completed", 5)]
    opened = await jsapi.last_message(mesh, mesh.topology.jobs, mesh.subjects.job_event("docs-ask", "opened"))
    assert opened is not None
    event = codec.JOB_EVENT.decode(opened.data, opened.headers)
    assert (event.pipeline, event.stage) == ("docs", "ask")  # type: ignore[union-attr]
    lineage = await sql(
        mesh, "SELECT parent_index, part FROM stage_sources WHERE job = 'docs-chunks' ORDER BY ALL"
    )
    assert lineage == [[i, k] for i, row in enumerate(rows) for k in range(len(row["chunks"]))]


async def test_a_row_that_fails_feeds_nothing_and_is_counted(
    services: None, mesh: Mesh, tmp_path: Path
) -> None:
    rows = [{"x": f"BAD {i}" if i % 4 == 0 else i} for i in range(20)]
    spec = pipeline("p", stage("next", row="value.x"), stage("sum", collect=True))
    await run(mesh, spec, write(tmp_path / "r", rows))
    status = await ended(mesh, "p")
    assert status.state == "completed_with_errors"
    assert [(s.submitted, s.ok, s.failed, s.lost) for s in status.stages] == [
        (20, 15, 5, 0), (15, 15, 0, 5), (1, 1, 0, 0)
    ]  # fmt: skip
    assert await values(mesh, "p-sum") == [[i for i in range(20) if i % 4]]
    await assert_proved(mesh, "p")
    refused = await error_of(retry(mesh, "p-first"))
    assert refused.code == "feeds_a_stage"
    assert "p-next" in str(refused)
    assert (await retry(mesh, "p-sum")).resubmitted == 0


async def test_garbage_where_an_array_should_be_is_one_failed_row(
    services: None, mesh: Mesh, tmp_path: Path
) -> None:
    rows: list[Any] = [{"q": [1, 2]}, {"q": 5}, {}, None, "text", {"q": []}, {"q": None}, {"q": [3]}, [1]]
    spec = pipeline("p", stage("next", each="value.q"))
    await run(mesh, spec, write(tmp_path / "r", rows))
    status = await ended(mesh, "p")
    assert [(s.submitted, s.ok, s.failed, s.unfit) for s in status.stages] == [(9, 9, 0, 0), (9, 3, 6, 6)]
    found = await sql(
        mesh,
        "SELECT error_type, error_field, count(*) FROM outcomes WHERE job = 'p-next' GROUP BY ALL ORDER BY ALL",
    )
    assert found == [["feed_each", "each", 2], ["feed_missing", "each", 4], [None, None, 3]]
    assert sorted(await values(mesh, "p-next")) == [1, 2, 3]
    message = await sql(
        mesh, "SELECT error_message FROM outcomes WHERE error_type = 'feed_each' ORDER BY 1 LIMIT 1"
    )
    assert message == [["value.q of row 1 is no array"]]
    await assert_proved(mesh, "p")


async def test_what_is_left_out_and_what_has_no_text(services: None, mesh: Mesh, tmp_path: Path) -> None:
    rows = [
        {"t": "one", "use": True},
        {"t": "", "use": 1},
        {"t": "two"},
        {"t": "three", "use": "yes"},
        {"use": 1},
    ]
    spec = pipeline("p", stage("say", where="value.use", chat="{value.t}", system="{{short}}"),
                    stage("read", prompt="{text}!"))  # fmt: skip
    await run(mesh, spec, write(tmp_path / "r", rows))
    status = await ended(mesh, "p")
    assert [(s.submitted, s.ok, s.unfit) for s in status.stages] == [(5, 5, 0), (4, 3, 1), (3, 3, 0)]
    assert sorted(await values(mesh, "p-read")) == ["!", "one!", "three!"]
    await assert_proved(mesh, "p")


async def test_nothing_in_nothing_out(services: None, mesh: Mesh, tmp_path: Path) -> None:
    await run(mesh, DOCUMENTS, write(tmp_path / "r", []))
    status = await ended(mesh, "docs")
    assert [s.submitted for s in status.stages] == [0, 0, 0, 0, 1]
    assert await values(mesh, "docs-all") == [[]]
    await assert_proved(mesh, "docs")


@pytest.mark.slow
async def test_one_row_becomes_ten_thousand_and_one_again(services: None, mesh: Mesh, tmp_path: Path) -> None:
    spec = pipeline("p", stage("many", each="value"), stage("one", collect="parent"))
    await run(mesh, spec, write(tmp_path / "r", [list(range(10_000)), [-1], list(range(3))]))
    status = await ended(mesh, "p", 90)
    assert [s.ok for s in status.stages] == [3, 10_004, 3]
    assert await values(mesh, "p-one") == [list(range(10_000)), [-1], [0, 1, 2]]
    await assert_proved(mesh, "p")


async def test_too_many_and_too_large_are_clear_failures_of_that_row(
    settings: Settings, mesh: Mesh, tmp_path: Path
) -> None:
    """What completion takes for a row is set to 2 MB here."""
    small = msgspec.structs.replace(settings, max_item_bytes=2_000_000)
    rows = [[0] * (MAX_FAN_OUT + 1), ["x" * 600_000] * 2, ["y" * 600_000] * 10]
    spec = pipeline(
        "p", stage("parts", each="value"), stage("back", collect="parent"), stage("all", collect=True)
    )
    async with serving(small), running(with_worker(settings, engine="echo")):
        await run(mesh, spec, write(tmp_path / "r", rows))
        status = await ended(mesh, "p")
        assert [(s.submitted, s.ok, s.unfit) for s in status.stages] == [
            (3, 3, 0),
            (13, 12, 1),
            (3, 2, 1),
            (1, 1, 0),
        ]
        found = await sql(mesh, "SELECT job, error_type FROM outcomes WHERE status = 'failed' ORDER BY ALL")
        assert found == [["p-back", "feed_too_large"], ["p-parts", "feed_too_many"]]
        # The second group came by reference, and was collected from the object that it became.
        assert await sql(mesh, "SELECT size > 1200000 FROM large_outcomes WHERE job = 'p-back'") == [[True]]
        (collected,) = await sql(
            mesh, "SELECT sum(length(data)) > 1200000 FROM large_parts WHERE job = 'p-all'"
        )
        assert collected == [True]
        assert (await pipeline_audit(mesh, "p")).balanced


async def test_results_that_come_twice_feed_once(settings: Settings, mesh: Mesh, tmp_path: Path) -> None:
    """A worker that stores each result three times, in batches that mix them, the later ones with another value."""
    worker = with_worker(settings, engine="echo")
    spec = pipeline("p", stage("next", each="value"))
    rows = [[i, i] for i in range(30)]
    async with serving(settings):
        async with running(worker):
            await run(mesh, pipeline("other"), write(tmp_path / "o", [1]))
            await ended(mesh, "other")
        await run(mesh, spec, write(tmp_path / "r", rows))
        job = Producer(mesh, "p-first")
        results = [
            Result(
                job="p-first",
                index=i,
                function="generate",
                status="ok",
                value=msgspec.Raw(b"[%d,%d]" % (i, i)),
            )
            for i in range(30)
        ]
        wrong = [msgspec.structs.replace(r, value=msgspec.Raw(b'["wrong"]')) for r in results]
        failed = [
            msgspec.structs.replace(r, status="failed", value=msgspec.UNSET, error=ItemError(type="x"))
            for r in wrong
        ]
        for some in (results[:20], results[:10] + results[20:] + wrong, failed + results):
            await job.results(some)
            await until(job.results_empty)
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("p-first"))
        async with running(worker):
            status = await ended(mesh, "p")
            assert [(s.submitted, s.ok) for s in status.stages] == [(30, 30), (60, 60)]
            assert status.stages[0].duplicates == 100
            assert sorted(await values(mesh, "p-next")) == sorted([*range(30), *range(30)])
            await assert_proved(mesh, "p")


async def test_odd_values_go_through_or_fail_alone(services: None, mesh: Mesh, tmp_path: Path) -> None:
    """Values as only a program writes them: controls, huge numbers, repeated keys, deep nesting."""
    odd = [
        rb'{"q":["\u0000\u0001"],"k":"\u0000"}', rb'{"q":["\ud83d\ude00"],"k":1e300}', b'{"q":[4],"k":1e400}',
        b'{"q":[123456789012345678901234567890]}',
        rb'{"q":[1],"q":[2,3],"k":"' + b"x" * 10_000 + rb'"}', b'{"q":[' + b"[" * 400 + b"]" * 400 + b"]}",
        b'{"q":' + b"[" * 3_000 + b"]" * 3_000 + b"}", b'"text"', b"[]",
    ]  # fmt: skip
    then = stage("then", row={"v": "value", "k": "kept.k"})
    spec = pipeline("p", stage("next", each="value.q", keep=["value.k"]), then)
    await open_alone(mesh, spec)
    job = Producer(mesh, "p-first")
    await job.results(
        Result(job="p-first", index=i, function="generate", status="ok", value=msgspec.Raw(v))
        for i, v in enumerate(odd)
    )
    counts = "SELECT (SELECT count(*) FROM outcomes WHERE job = 'p-first'), (SELECT count(*) FROM dead)"

    async def all_seen() -> bool:
        ((landed, dead),) = await sql(mesh, counts)
        return landed + dead == len(odd)

    await until(all_seen)

    async def all_fed() -> bool:
        ((arrived, fed),) = await sql(
            mesh,
            "SELECT (SELECT count(*) FROM stage_arrivals WHERE job = 'p-next'), "
            "(SELECT count(*) FROM stage_feeds WHERE job = 'p-next')",
        )
        status = await pipeline_status(mesh, "p")
        return arrived == fed and all(s.submitted == s.ok + s.failed for s in status.stages[1:])

    await until(all_fed, 30)
    found = await values(mesh, "p-next")
    assert "\x00\x01" in found
    assert "\U0001f600" in found
    assert 4 not in found  # beside it is a number that is none
    assert all(s.balanced for s in (await pipeline_audit(mesh, "p")).stages[1:])


async def test_two_pipelines_at_once(services: None, mesh: Mesh, tmp_path: Path) -> None:
    rows = [documents(25), documents(31, chunks=4)]
    specs = [msgspec.structs.replace(DOCUMENTS, name=name) for name in ("a", "b")]
    paths = [write(tmp_path / f"{i}", each) for i, each in enumerate(rows)]
    await asyncio.gather(*(run(mesh, s, p) for s, p in zip(specs, paths, strict=True)))
    for name, each in zip(("a", "b"), rows, strict=True):
        await assert_documents(mesh, each, name)


async def test_a_stage_may_feed_two(services: None, mesh: Mesh, tmp_path: Path) -> None:
    spec = pipeline("p", stage("left", row="value.l"), stage("right", after="first", row="value.r"))
    await run(mesh, spec, write(tmp_path / "r", [{"l": i, "r": -i} for i in range(10)]))
    await ended(mesh, "p")
    assert (await values(mesh, "p-left"), await values(mesh, "p-right")) == (
        list(range(10)), [-i for i in range(10)]
    )  # fmt: skip
    await assert_proved(mesh, "p")


async def test_rows_go_on_before_their_stage_has_ended(
    services: None, mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """The first stage is never sealed here: half of its rows are through the second all the same."""
    spec = pipeline("p", stage("next"))
    await run(mesh, spec, write(tmp_path / "r", [{"n": i} for i in range(10)]))
    await ended(mesh, "p")
    open_ = pipeline("q", stage("next"))
    reply = await open_alone(mesh, open_)
    assert (reply.jobs, reply.again) == (["q-first", "q-next"], False)
    job = Producer(mesh, "q-first")
    await job.results(
        Result(job="q-first", index=i, function="generate", status="ok", value=msgspec.Raw(b"%d" % i))
        for i in range(7)
    )

    async def through() -> bool:
        return len(await values(mesh, "q-next")) == 7

    await until(through)
    status = await pipeline_status(mesh, "q")
    assert (status.state, status.stages[1].state) == ("running", "open")
    assert (await pipeline_audit(mesh, "q")).stages[1].balanced


async def test_a_full_queue_is_waited_for_and_landing_goes_on(
    settings: Settings, mesh: Mesh, tmp_path: Path
) -> None:
    """The queue takes 60 messages: the second stage cannot be stored until a worker comes; all of the first lands."""
    spec = pipeline("p", stage("next"), stage("third"))
    worker = with_worker(settings, engine="echo")
    async with serving(settings):
        async with running(worker):
            await run(mesh, pipeline("other"), write(tmp_path / "o", [1]))
            await ended(mesh, "other")
        await run(mesh, spec, write(tmp_path / "r", range(300)))
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("p-first"))
        info = await jsapi.stream_info(mesh, mesh.topology.tasks)
        config = info["config"] | {"max_msgs": 60}
        await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", config)
        job = Producer(mesh, "p-first")
        await job.results(
            Result(job="p-first", index=i, function="generate", status="ok", value=msgspec.Raw(b"%d" % i))
            for i in range(300)
        )
        first = await job.ended()
        assert first.ok == 300

        async def full() -> bool:
            found = await jsapi.stream_info(mesh, mesh.topology.tasks)
            return found["state"]["messages"] >= 50

        await until(full)
        waiting = (await pipeline_status(mesh, "p")).stages[1].waiting
        assert waiting >= 240
        assert (await pipeline_audit(mesh, "p")).balanced
        async with running(worker):
            status = await ended(mesh, "p", 90)
            assert [s.ok for s in status.stages] == [300, 300, 300]
            await assert_proved(mesh, "p")


async def test_cancelled_in_the_middle_it_keeps_what_is_finished(
    settings: Settings, mesh: Mesh, tmp_path: Path
) -> None:
    worker = with_worker(settings, engine="echo", slots=3, engine_options={"delay_ms": "100"})
    spec = pipeline("p", stage("next"), stage("all", collect=True))
    path = write(tmp_path / "r", range(200))
    async with serving(settings), running(worker):
        await run(mesh, spec, path)

        async def some() -> bool:
            return (await pipeline_status(mesh, "p")).stages[0].ok >= 2

        await until(some, 30)
        await pipeline_cancel(mesh, "p", reason="enough")
        status = await ended(mesh, "p", 30)
        assert (status.state, status.reason) == ("cancelled", "enough")
        first = status.stages[0]
        assert first.ok >= 2
        assert first.ok + first.cancelled == 200
        assert [s.state for s in status.stages] == ["cancelled"] * 3, status
        await assert_proved(mesh, "p")
        assert (await error_of(run(mesh, spec, path))).code == "pipeline_cancelled"
        await pipeline_cancel(mesh, "p")
        assert (await pipeline_status(mesh, "p")).reason == "enough"


async def test_cancelled_before_its_input_it_takes_none(services: None, mesh: Mesh, tmp_path: Path) -> None:
    spec = pipeline("p", stage("next"), stage("all", collect=True))
    await open_alone(mesh, spec)
    assert (await pipeline_status(mesh, "p")).stages[0].state == "waiting"
    await pipeline_cancel(mesh, "p", reason="no input")
    status = await ended(mesh, "p")
    assert [(s.state, s.submitted) for s in status.stages] == [("cancelled", 0)] * 3
    path = write(tmp_path / "r", [1])
    assert (await error_of(run(mesh, spec, path))).code == "pipeline_cancelled"
    late = await error_of(submit(mesh, path, job="p-first", options=SubmitOptions(form="rows")))
    assert late.code == "job_exists"
    await assert_proved(mesh, "p")


async def test_one_stage_cancelled_the_next_takes_what_is_there(
    settings: Settings, mesh: Mesh, tmp_path: Path
) -> None:
    worker = with_worker(settings, engine="echo", slots=3, engine_options={"delay_ms": "50"})
    async with serving(settings), running(worker):
        await run(
            mesh, pipeline("p", stage("next"), stage("all", collect=True)), write(tmp_path / "r", range(100))
        )

        async def some() -> bool:
            return (await pipeline_status(mesh, "p")).stages[0].ok >= 5

        await until(some, 30)
        await cancel(mesh, "p-first")
        status = await ended(mesh, "p", 30)
        assert status.stages[0].state == "cancelled"
        assert status.stages[1].ok == status.stages[0].ok
        assert status.stages[1].lost == status.stages[0].cancelled
        assert len((await values(mesh, "p-all"))[0]) == status.stages[0].ok
        await assert_proved(mesh, "p")


async def test_a_deadline_ends_every_stage(settings: Settings, mesh: Mesh, tmp_path: Path) -> None:
    worker = with_worker(settings, engine="echo", slots=2, engine_options={"delay_ms": "200"})
    async with serving(settings), running(worker):
        spec = pipeline("p", stage("next"), deadline="3s")
        await run(mesh, spec, write(tmp_path / "r", range(300)))
        status = await ended(mesh, "p", 40)
        assert status.state == "cancelled"
        assert [s.state for s in status.stages] == ["cancelled", "cancelled"]
        await assert_proved(mesh, "p")


async def test_a_name_that_is_taken_and_a_function_that_is_unknown(
    services: None, mesh: Mesh, tmp_path: Path
) -> None:
    path = write(tmp_path / "r", [1])
    await run(mesh, pipeline("p", stage("next")), path)
    other = await error_of(run(mesh, pipeline("p", stage("next", row="index")), path))
    assert other.code == "pipeline_exists"
    taken = await error_of(run(mesh, pipeline("q", stage("next", job="p-next")), path))
    assert taken.code == "job_exists"
    unknown = await error_of(run(mesh, pipeline("r", stage("next", function="nobody")), path))
    assert unknown.code == "unknown_function"
    assert str(unknown) == "stage next: function 'nobody' is not registered; known: generate"
    missing = await error_of(pipeline_status(mesh, "nothing"))
    assert missing.code == "unknown_pipeline"
    assert [e.pipeline for e in await pipeline_list(mesh)] == ["p"]
    await ended(mesh, "p")


async def test_an_audit_that_cannot_be_fooled(settings: Settings, mesh: Mesh, tmp_path: Path) -> None:
    """What the law forbids is done by hand to the data plane: the audit says what it is."""
    from headrace.completion.store import Store

    worker = with_worker(settings, engine="echo")
    rows = documents(12)
    async with serving(settings), running(worker):
        await run(mesh, DOCUMENTS, write(tmp_path / "r", rows))
        await assert_documents(mesh, rows)
    spoilt = random.Random(7).choice(("DELETE FROM stage_feeds WHERE job = 'docs-ask' AND first = 3",
              "UPDATE stage_feeds SET items = items + 1 WHERE job = 'docs-chunks' AND first = 0"))  # fmt: skip
    for statement, stage_name in (
        (spoilt, None),
        ("DELETE FROM stage_members WHERE job = 'docs-perdoc' AND \"index\" = 2", "perdoc"),
        ("UPDATE stage_members SET position = 9 WHERE job = 'docs-all' AND \"index\" = 2", "all"),
        ("DELETE FROM stage_arrivals WHERE job = 'docs-chunks' AND parent_index = 4", "chunks"),
    ):
        store = Store(tmp_path / "data" / "headrace.duckdb")
        await store.open()
        await store.write(lambda c, s=statement: c.execute(s) and None)
        await store.close()
        async with serving(settings):
            audit = await pipeline_audit(mesh, "docs")
            assert not audit.balanced
            wrong = {s.stage for s in audit.stages if not s.balanced}
            assert stage_name is None or stage_name in wrong, (statement, wrong)
            assert all(s.problems for s in audit.stages if not s.balanced)
