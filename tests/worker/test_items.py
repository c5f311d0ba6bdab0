"""One delivery at a time: what becomes of good, bad, late, oversized and exhausted items (B1, B2, B4)."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from headrace.contracts import codec
from headrace.contracts.generation import Generation
from headrace.contracts.messages import Choice, FunctionSpec, Result, Row, TextPrompt, TokenPrompt
from headrace.inference_worker.engines.protocol import EngineInfo, Output, Work
from headrace.inference_worker.registration import spec_of
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import get_message, last_message
from headrace.mesh.publisher import OutMessage, publish_all
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Settler
from tests.worker.harness import (
    HEADERS,
    lease,
    put,
    results,
    running,
    task,
    until_empty,
    until_stored,
    with_worker,
)

pytestmark = pytest.mark.anyio


async def run_all(
    mesh: Mesh, settings: Settings, tasks: list[Any], factory: Any = None, **worker: Any
) -> list[Result]:
    async with running(with_worker(settings, **worker), factory):
        await put(mesh, tasks)
        await until_empty(mesh)
        found = await results(mesh)
    assert sorted(r.index for r in found) == [t.index for t in tasks]
    return sorted(found, key=lambda r: r.index)


async def test_results_carry_what_their_task_was(mesh: Mesh, settings: Settings) -> None:
    asked = task(
        3, job="nightly", custom_id="a/b", tenant="t1", prompt=TextPrompt(text="hello"), prompt_tokens=2
    )
    got = (await run_all(mesh, settings, [asked], engine="echo", name="w1"))[0]
    assert (got.job, got.index, got.custom_id, got.tenant, got.generation) == ("nightly", 3, "a/b", "t1", 1)
    assert (got.status, got.attempt, got.worker, got.engine, got.model) == ("ok", 1, "w1", "echo", "echo")
    assert got.choices[0].text == "hello"
    assert got.usage.prompt_tokens == 2
    t = got.timings
    assert 0 < t.submitted_us <= t.received_us <= t.started_us <= t.finished_us <= time.time_ns() // 1_000
    assert got.task is None
    stored = await last_message(mesh, mesh.topology.results, "hr.results.job.generate.nightly")
    assert stored is not None
    assert stored.headers["Headrace-Schema"] == "result/1"


async def test_the_result_goes_to_the_sink_that_the_task_names(mesh: Mesh, settings: Settings) -> None:
    await run_all(mesh, settings, [task(0, sink="call")])
    assert await last_message(mesh, mesh.topology.results, "hr.results.call.generate.j") is not None


async def test_the_trace_goes_on_in_the_result(mesh: Mesh, settings: Settings) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    async with running(with_worker(settings)):
        subject = mesh.subjects.task("generate", "normal", 6, "j")
        block = HEADERS + f"traceparent: {parent}\r\n".encode()
        await publish_all(mesh, mesh.topology.tasks, [OutMessage(subject, codec.TASK.encode(task(0)), block)])
        await until_stored(mesh, 1)
    assert (await results(mesh))[0].trace_id == "0af7651916cd43dd8448eb211c80319c"
    stored = await last_message(mesh, mesh.topology.results, "hr.results.job.generate.j")
    assert stored is not None
    assert stored.headers["traceparent"] == parent


async def test_b1_one_prompt_over_the_limit_fails_and_its_neighbours_do_not(
    mesh: Mesh, settings: Settings
) -> None:
    tasks = [task(i) for i in range(101)]
    tasks[50] = task(50, prompt=TokenPrompt(ids=[1] * 600))
    got = await run_all(mesh, settings, tasks, engine="echo", context=512)
    assert [r.index for r in got if r.status != "ok"] == [50]
    assert got[50].status == "failed"
    assert got[50].error is not None
    assert got[50].error.type == "too_long"
    assert got[50].task == tasks[50], "a failed outcome carries its task, so that it can run again"


async def test_b2_an_id_outside_the_vocabulary_fails_by_name(mesh: Mesh, settings: Settings) -> None:
    tasks = [task(0), task(1, prompt=TokenPrompt(ids=[1, 99_999])), task(2)]
    got = await run_all(mesh, settings, tasks, engine="echo", engine_options={"vocab_size": "1000"})
    assert [r.status for r in got] == ["ok", "failed", "ok"]
    error = got[1].error
    assert error is not None
    assert (error.type, error.field) == ("invalid_token", "prompt_token_ids[1]")
    assert "99999" in error.message


async def test_b4_an_item_larger_than_the_cache_fails_at_once(mesh: Mesh, settings: Settings) -> None:
    big = task(0, params=Generation(n=10, max_tokens=200, temperature=1.0))
    tasks = [big, *(task(i) for i in range(1, 40))]
    got = await run_all(mesh, settings, tasks, engine="echo", engine_options={"capacity_tokens": "1000"})
    assert [r.status for r in got] == ["failed"] + ["ok"] * 39
    assert got[0].error is not None
    assert got[0].error.type in ("too_large_for_engine", "too_long")
    assert "1000" in got[0].error.message


async def test_b5_large_items_among_small_ones_all_finish_and_never_thrash(
    mesh: Mesh, settings: Settings
) -> None:
    large = [task(i, prompt=TokenPrompt(ids=[1] * 900), max_tokens=100) for i in range(5)]
    small = [task(i, prompt=TokenPrompt(ids=[1] * 8), max_tokens=20) for i in range(5, 205)]
    options = {"capacity_tokens": "4000", "time_scale": "0.02", "output_median": "20"}
    tasks = large + small
    async with running(with_worker(settings, engine="sim", slots=64, engine_options=options)) as worker:
        await put(mesh, tasks)
        await until_empty(mesh)
        got = await results(mesh)
        assert worker.runner is not None
    assert sorted(r.index for r in got) == list(range(205))
    assert all(r.status == "ok" and r.attempt == 1 for r in got), "nothing was evicted or passed around"
    order = [r.index for r in sorted(got, key=lambda r: r.timings.finished_us)]
    last_large = max(order.index(i) for i in range(5))
    assert sum(i >= 5 for i in order[:last_large]) >= 40, "short ones flow beside the large"


async def test_items_of_many_choices_take_a_slot_for_each(mesh: Mesh, settings: Settings) -> None:
    options = {"time_scale": "0.05", "output_median": "10", "capacity_tokens": "20000"}
    asked = [task(i, params=Generation(n=4, max_tokens=16, temperature=1.0)) for i in range(60)]
    got = await run_all(mesh, settings, asked, engine="sim", slots=16, engine_options=options)
    assert all(r.status == "ok" and len(r.choices) == 4 for r in got)


async def test_without_max_tokens_the_default_applies_or_what_the_model_leaves(
    mesh: Mesh, settings: Settings
) -> None:
    seen: dict[int, int] = {}

    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            seen[len(work.prompt.ids)] = work.max_tokens  # type: ignore[union-attr]
            return Output(choices=[Choice(text="x")])

    tasks = [task(i, prompt=TokenPrompt(ids=[1] * n), max_tokens=None) for i, n in enumerate((10, 400))]
    await run_all(mesh, settings, tasks, lambda _: Engine(max_model_len=512))
    assert seen == {10: 256, 400: 112}


async def test_a_deadline_that_passed_is_a_failure_and_not_a_run(mesh: Mesh, settings: Settings) -> None:
    now = time.time_ns() // 1_000
    tasks = [task(0, deadline_us=now - 2_000_000), task(1, deadline_us=now + 60_000_000)]
    got = await run_all(mesh, settings, tasks)
    assert [r.status for r in got] == ["failed", "ok"]
    assert got[0].error is not None
    assert got[0].error.type == "deadline"
    assert "2." in got[0].error.message


async def test_a_result_over_the_limit_fails_naming_its_size(mesh: Mesh, settings: Settings) -> None:
    tasks = [
        task(
            0, prompt=TextPrompt(text="a" * 700_000), prompt_tokens=10, params=Generation(n=3, max_tokens=9)
        ),
        task(1),
    ]
    got = await run_all(mesh, settings, tasks, max_item_bytes=2_000_000)
    assert [r.status for r in got] == ["failed", "ok"]
    assert got[0].error is not None
    assert got[0].error.type == "result_too_large"
    assert "2,100," in got[0].error.message
    assert "2,000,000" in got[0].error.message
    assert got[0].task == tasks[0]


async def test_undecodable_messages_are_dead_lettered_and_their_neighbours_go_on(
    mesh: Mesh, settings: Settings
) -> None:
    subject = mesh.subjects.task("generate", "normal", 6, "j")
    strange = codec.TASK.encode(task(1, job="another"))
    bad = [
        OutMessage(subject, b"{not json", HEADERS),
        OutMessage(subject, b'{"job":"j"}'),
        OutMessage(subject, codec.TASK.encode(task(1)), b"Headrace-Schema: task/9\r\n"),
        OutMessage(subject, strange, HEADERS),
    ]
    async with running(with_worker(settings)):
        await publish_all(mesh, mesh.topology.tasks, bad)
        await put(mesh, [task(i) for i in range(5)])
        await until_empty(mesh)
    assert {r.index for r in await results(mesh)} == set(range(5))
    letters = []
    for sequence in range(1, 5):
        message = await get_message(mesh, mesh.topology.dead, sequence)
        assert message is not None
        letters.append(codec.DEAD_LETTER.decode(message.data, message.headers))
    assert sorted(x.data for x in letters) == sorted(m.data for m in bad)
    assert all(x.subject == subject and x.tries == 1 and x.origin == mesh.topology.tasks for x in letters)
    assert any("another" in x.reason for x in letters)


async def test_a3_an_item_that_always_raises_is_dead_after_its_tries_with_its_last_error(
    mesh: Mesh, settings: Settings
) -> None:
    runs: list[float] = []

    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            if work.prompt == TextPrompt(text="poison"):
                runs.append(time.monotonic())
                raise RuntimeError(f"boom {len(runs)}")
            return Output(choices=[Choice(text="x")])

    tasks = [task(0), task(1, prompt=TextPrompt(text="poison")), task(2)]
    got = await run_all(mesh, settings, tasks, lambda _: Engine(), max_tries=3)
    assert [r.status for r in got] == ["ok", "dead", "ok"]
    assert len(runs) == 3
    assert got[1].attempt == 3
    assert got[1].error is not None
    assert got[1].error.type == "tries_exhausted"
    assert "boom 3" in got[1].error.message
    assert got[1].task == tasks[1]
    gaps = [b - a for a, b in pairwise(runs)]
    assert gaps[0] >= 0.2
    assert gaps[1] >= 0.45, "tries are spaced, each longer than the last"


async def test_an_item_delivered_more_often_than_its_tries_is_dead_without_running(
    mesh: Mesh, settings: Settings
) -> None:
    ran: list[str] = []

    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            ran.append(work.id)
            return Output(choices=[Choice(text="x")])

    async with running(with_worker(settings, engine="echo")):
        pass  # registers the function, so that its consumers are there
    await put(mesh, [task(0)])
    for _ in range(2):
        [taken] = await lease(mesh, 1)
        Settler(mesh).nak(taken, 0.01)
    async with running(with_worker(settings, max_tries=2), lambda _: Engine(model="echo")):
        await until_stored(mesh, 1)
        await until_empty(mesh)
    [dead] = await results(mesh)
    assert dead.status == "dead"
    assert dead.attempt == 3
    assert dead.error is not None
    assert "lease lapsed" in dead.error.message
    assert ran == []


async def test_a_row_is_hosted_as_any_prompt_is(mesh: Mesh, settings: Settings) -> None:
    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            assert isinstance(work.prompt, Row)
            return Output(value=work.prompt.value)

    rows = [task(i, prompt=None) for i in range(3)]
    rows = [
        codec.TASK.decode(
            codec.TASK.encode(t).replace(
                b'"type":"tokens","ids":[1,2,3,4]', b'"type":"row","value":{"a":%d}' % t.index
            )
        )
        for t in rows
    ]
    assert isinstance(rows[0].prompt, Row)
    async with running(with_worker(settings), lambda _: Engine()):
        await put(mesh, rows, at=0)
        await until_stored(mesh, 3)
    values = {r.index: bytes(r.value) for r in await results(mesh)}  # type: ignore[arg-type]
    assert values == {0: b'{"a":0}', 1: b'{"a":1}', 2: b'{"a":2}'}


class Stub:
    """An engine of a few lines; tests give it their own `run`."""

    def __init__(self, **info: Any) -> None:
        defaults = {"engine": "stub", "model": "stub", "slots": 16, "capacity_tokens": 0}
        self.info = EngineInfo(**{**defaults, **info})

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def prepare(self, work: Work) -> Work:
        return work

    def tokens_generated(self) -> int:
        return 0

    def stats(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("limit", "default", "shapes"),
    [
        (0, 256, (6, 13)),
        (512, 256, (6, 9)),
        (256, 128, (6, 8)),
        (40, 20, (6, 6)),
        (10, 5, (4, 4)),
        (131_072, 256, (6, 17)),
    ],
)
async def test_the_function_follows_from_the_engine(
    limit: int, default: int, shapes: tuple[int, int]
) -> None:
    spec = spec_of("f", EngineInfo(engine="e", model="m", slots=1, capacity_tokens=0, max_model_len=limit))
    assert isinstance(spec, FunctionSpec)
    assert (spec.default_max_tokens, (spec.min_shape, spec.max_shape)) == (default, shapes)
