"""Prompts that lie in the object store, and results that have to: fetched, run, stored, and what goes wrong there."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from headrace.contracts import codec
from headrace.contracts.generation import Generation
from headrace.contracts.messages import (
    BlobPrompt,
    Choice,
    JobCancelled,
    Prompt,
    Result,
    Row,
    Task,
    TextPrompt,
)
from headrace.contracts.objects import blob_of
from headrace.inference_worker.engines.echo import EchoEngine
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import Output, Work
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import call, purge, stream_info
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.worker.conftest import StartWorker
from tests.worker.harness import (
    left,
    one_loop,
    put,
    results,
    running,
    task,
    until,
    until_empty,
    until_stored,
    with_worker,
)

pytestmark = pytest.mark.anyio


async def put_large(mesh: Mesh, index: int, prompt: Prompt | str, **fields: Any) -> Task:
    """A task whose prompt is an object, stored as the client does."""
    prompt = TextPrompt(text=prompt) if isinstance(prompt, str) else prompt
    data = codec.PROMPT.encode(prompt)
    blob = blob_of(f"j/{index}@1", "input", data)
    await BlobStore(mesh).put(blob, data)
    made = task(index, prompt=BlobPrompt(blob=blob), **fields)
    await put(mesh, [made])
    return made


async def whole(mesh: Mesh, result: Result) -> Result:
    """The result itself, wherever it lies."""
    if result.blob is None:
        return result
    return codec.RESULT.decode(await BlobStore(mesh).get(result.blob))


async def test_prompts_are_fetched_and_large_results_stored(mesh: Mesh, settings: Settings) -> None:
    texts = {0: "a" * 700_000, 1: "b" * 1_200_000, 2: "c" * 20_000_000, 3: "small"}
    async with running(with_worker(settings)):
        tasks = {i: await put_large(mesh, i, text) for i, text in texts.items()}
        row = await put_large(mesh, 4, Row(value=msgspec.Raw(b'{"x":"' + b"y" * 2_000_000 + b'"}')))
        await until_empty(mesh)
    got = {r.index: r for r in await results(mesh)}
    assert {r.status for r in got.values()} == {"ok"}
    assert {i: got[i].blob is not None for i in got} == {0: False, 1: True, 2: True, 3: False, 4: True}
    for i, text in texts.items():
        found = await whole(mesh, got[i])
        assert found.text == text
        assert (found.job, found.index, found.usage) == ("j", i, got[i].usage)
        assert got[i].input_blob == tasks[i].prompt.blob.name  # type: ignore[union-attr]
    assert len(bytes((await whole(mesh, got[4])).value)) > 2_000_000  # type: ignore[arg-type]
    assert got[4].task == row, "in case that the object gets lost"
    assert (await whole(mesh, got[4])).task is None


async def test_a_result_over_the_limit_fails_naming_its_size(mesh: Mesh, settings: Settings) -> None:
    async with running(with_worker(settings, max_item_bytes=1_500_000)):
        big = await put_large(mesh, 0, "a" * 900_000, params=Generation(n=2, max_tokens=9))
        await put(mesh, [task(1)])
        await until_empty(mesh)
    got = sorted(await results(mesh), key=lambda r: r.index)
    assert [r.status for r in got] == ["failed", "ok"]
    assert got[0].error is not None
    assert got[0].error.type == "result_too_large"
    assert "1,80" in got[0].error.message
    assert "1,500,000" in got[0].error.message
    assert got[0].task == big


async def test_an_object_that_is_missing_or_damaged_ends_its_item_only(
    mesh: Mesh, settings: Settings
) -> None:
    tasks = [await put_large(mesh, i, f"{i}" * 600_000) for i in range(5)]
    store = BlobStore(mesh)
    await store.delete(tasks[0].prompt.blob.name)  # type: ignore[union-attr]
    sequence = int((await stream_info(mesh, mesh.topology.blobs))["state"]["first_seq"])
    await call(mesh, f"STREAM.MSG.DELETE.{mesh.topology.blobs}", {"seq": sequence})
    no_prompt = b'{"type":"strange"}'
    strange = blob_of("j/9@1", "input", no_prompt)
    await store.put(strange, no_prompt)
    await put(mesh, [task(9, prompt=BlobPrompt(blob=strange))])
    async with running(with_worker(settings)):
        await until_empty(mesh)
    got = {r.index: r for r in await results(mesh)}
    assert {i: r.error.type for i, r in got.items() if r.error} == {
        0: "input_missing",
        1: "input_damaged",
        9: "input_damaged",
    }
    assert {i for i, r in got.items() if r.status == "ok"} == {2, 3, 4}
    assert "j/0@1/input-" in got[0].error.message  # type: ignore[union-attr]
    assert (got[0].attempt, got[0].task) == (1, tasks[0])


async def test_a_prompt_over_the_workers_own_limit_is_not_fetched(mesh: Mesh, settings: Settings) -> None:
    async with running(with_worker(settings, max_item_bytes=600_000)):
        await put_large(mesh, 0, "a" * 700_000)
        await until_empty(mesh)
    (got,) = await results(mesh)
    assert got.error is not None
    assert got.error.type == "input_too_large"
    assert "600,000" in got.error.message


async def test_bytes_of_prompts_are_bounded_and_all_get_their_turn(mesh: Mesh, settings: Settings) -> None:
    """Slots and tokens leave room for all of them at once; memory does not."""
    for i in range(12):
        await put_large(mesh, i, chr(97 + i) * 1_000_000)
    await put_large(mesh, 12, "z" * 5_000_000)
    peak = 0
    async with running(with_worker(settings, engine_options={"delay_ms": "30"})) as worker:
        assert worker.runner is not None
        fetcher = worker.runner.prompts
        fetcher._limit = 3_100_000
        while await left(mesh):
            peak = max(peak, fetcher.bytes if len(fetcher._held) > 1 else 0)
            await asyncio.sleep(0.002)
        await until_stored(mesh, 13)
        assert fetcher.bytes == 0, "all of it is given back"
    assert 2_000_000 < peak <= 3_100_000
    assert Counter(r.status for r in await results(mesh)) == {"ok": 13}


@one_loop
@pytest.mark.parametrize("point", ["prompt-fetching", "blob-staged", "result-object-stored"])
async def test_a_worker_that_dies_on_the_way_loses_no_item(
    mesh: Mesh, start_worker: StartWorker, point: str
) -> None:
    worker = start_worker(ack_wait_s=1.0)
    worker.kill()
    worker.start(HEADRACE_CRASH_AT=f"{point}:2")
    for i in range(6):
        await put_large(mesh, i, chr(97 + i) * 1_500_000)
    assert await asyncio.to_thread(worker.wait) == -9
    worker.start()
    await until_empty(mesh)
    got = await results(mesh)
    assert {r.index for r in got} == set(range(6))
    assert all(r.status == "ok" for r in got)
    for r in got:
        assert (await whole(mesh, r)).text == chr(97 + r.index) * 1_500_000


@one_loop
async def test_a_broker_that_is_away_is_waited_for(
    nats_server: NatsServer, mesh: Mesh, settings: Settings
) -> None:
    """The broker goes while prompts are on their way: nothing is given up for it."""
    async with running(with_worker(settings)) as worker:
        assert worker.runner is not None
        fetcher = worker.runner.prompts
        for i in range(8):
            await put_large(mesh, i, chr(97 + i) * 3_000_000)

        async def fetching() -> bool:
            return bool(fetcher.bytes) or await left(mesh) == 0

        await until(fetching, every_s=0.001)
        nats_server.kill()
        await asyncio.to_thread(nats_server.restart)

        async def back() -> bool:
            return mesh.connected

        await until(back)
        await until_empty(mesh, within_s=40)
    got = await results(mesh)
    assert {r.index for r in got} == set(range(8))
    assert {r.status for r in got} == {"ok"}


async def test_a_worker_that_stops_gives_back_what_waits_for_its_prompt(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(with_worker(settings, engine_options={"delay_ms": "300"}, grace_s=10)) as worker:
        assert worker.runner is not None
        worker.runner.prompts._limit = 1
        for i in range(5):
            await put_large(mesh, i, "x" * 700_000)

        async def one_runs() -> bool:
            return bool(worker.runner and worker.runner.running and worker.runner._asking)

        await until(one_runs)
    assert [r.status for r in await results(mesh)] == ["ok"]
    assert await left(mesh) == 4


async def test_a_cancelled_job_ends_the_waiting_for_its_prompts(mesh: Mesh, settings: Settings) -> None:
    async with running(with_worker(settings, engine_options={"delay_ms": "60000"})) as worker:
        runner = worker.runner
        assert runner is not None
        runner.prompts._limit = 1
        for i in range(4):
            await put_large(mesh, i, "x" * 700_000)

        async def one_runs() -> bool:
            return bool(runner.running and runner._asking)

        await until(one_runs)
        subject = mesh.subjects.job_event("j", "cancelled")
        event = codec.JOB_EVENT.encode(JobCancelled(job="j", count=4))
        await publish(mesh, mesh.topology.jobs, subject, event)
        await purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))

        async def gone() -> bool:
            return not runner.held() and runner.prompts.bytes == 0

        await until(gone, within_s=5)
    assert await results(mesh) == []


async def test_a_failed_run_is_tried_again_with_its_prompt_fetched_anew(
    mesh: Mesh, settings: Settings
) -> None:
    class Once(EchoEngine):
        def __init__(self, options: EngineOptions) -> None:
            super().__init__(options)
            self.seen: set[int] = set()

        async def run(self, work: Work) -> Output:
            index = int(work.id.split("/")[1].split("@")[0])
            if index not in self.seen:
                self.seen.add(index)
                raise OSError("a refused connection")
            return Output(choices=[Choice(text=str(len(work.prompt.text)))])  # type: ignore[union-attr]

    async with running(with_worker(settings), lambda _: Once(EngineOptions())):
        await put_large(mesh, 0, "x" * 700_000)
        await until_empty(mesh)
    (got,) = await results(mesh)
    assert (got.status, got.attempt, got.text) == ("ok", 2, "700000")
