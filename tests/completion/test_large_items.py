"""Results that came by reference: landed whole, read in parts, and every object gone that nobody needs (A7)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.client import results as client
from headrace.completion.blobs import Blobs
from headrace.completion.large_rows import read_parts
from headrace.contracts import codec
from headrace.contracts.api import ResultPartReply, ResultsReply
from headrace.contracts.messages import Blob, BlobPrompt, Choice, ItemError, Result, Task
from headrace.contracts.objects import blob_of
from headrace.mesh import jsapi
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.settings import Settings
from tests.completion.world import (
    FUNCTION,
    Producer,
    assert_cancelled,
    cancel,
    error_of,
    process,
    register,
    result,
    serving,
    sql,
    until,
)

pytestmark = pytest.mark.anyio


def answer(index: int, size: int) -> str:
    """A text that no other item has, with what JSON escapes and what UTF-8 needs several bytes for."""
    return (f'{index} "é\\🎈\n' * (size // 8 + 1))[:size]


async def put_input(mesh: Mesh, index: int, job: str = "j") -> Blob:
    data = b'{"type":"text","text":"%b"}' % (b"x" * 700_000)
    blob = blob_of(f"{job}/{index}@1", "input", data)
    await BlobStore(mesh).put(blob, data)
    return blob


async def put_result(mesh: Mesh, index: int, size: int, **fields: Any) -> Result:
    """The message of a large result, its object stored, as a worker stores it."""
    whole = result("j", index, choices=[Choice(text=answer(index, size))], **fields)
    data = codec.RESULT.encode(whole)
    blob = blob_of(f"j/{index}@1", "result", data)
    await BlobStore(mesh).put(blob, data)
    return msgspec.structs.replace(whole, choices=[], blob=blob, task=task(index, blob))


def task(index: int, blob: Blob) -> Task:
    return Task(job="j", index=index, function=FUNCTION, prompt=BlobPrompt(blob=blob))


def empty(mesh: Mesh) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        state = (await jsapi.stream_info(mesh, mesh.topology.blobs))["state"]
        return (state["messages"], state["bytes"]) == (0, 0)

    return look


async def named(mesh: Mesh) -> set[str]:
    return set(await BlobStore(mesh).names())


async def test_large_results_land_whole_and_their_objects_go(mesh: Mesh, settings: Settings) -> None:
    sizes = {0: 1_100_000, 1: 5_000_000, 2: 12_000_000, 3: 20}
    job = Producer(mesh, "j")
    async with serving(settings):
        await job.whole(4)
        inputs = {i: await put_input(mesh, i) for i in sizes}
        await job.results([
            await put_result(mesh, i, sizes[i], input_blob=inputs[i].name) for i in (0, 1, 2)
        ])  # fmt: skip
        small = result("j", 3, choices=[Choice(text=answer(3, 20))], input_blob=inputs[3].name)
        await job.results([small])
        await job.take_away(range(4))
        status = await job.ended()
        assert (status.state, status.ok, status.duplicates) == ("completed", 4, 0)
        await until(empty(mesh))

        found = {r.index: r async for r in client.results(mesh, "j")}
        assert {i: r.text for i, r in found.items()} == {i: answer(i, size) for i, size in sizes.items()}
        assert all(r.blob is None and r.task is None for r in found.values())
        one = await client.result(mesh, "j", 1)
        assert (one.text, one.usage) == (answer(1, 5_000_000), found[1].usage)
        rows = await sql(mesh, 'SELECT "index", text IS NULL, status, worker FROM outcomes ORDER BY 1')
        assert rows == [[i, i != 3, "ok", "w1"] for i in range(4)]
        parts = "SELECT strlen(string_agg(data, '' ORDER BY part)) FROM large_parts WHERE \"index\" = 1"
        assert (await sql(mesh, parts))[0][0] > 5_000_000


async def test_a_page_says_how_large_it_is_and_the_parts_are_the_result(
    mesh: Mesh, settings: Settings
) -> None:
    job = Producer(mesh, "j")
    async with serving(settings):
        await job.whole(3)
        large = [await put_result(mesh, i, 3_000_000) for i in (0, 2)]
        await job.results([*large, result("j", 1)])
        await job.take_away(range(3))
        await job.ended()
        body = await call_api(mesh, "results", {"job": "j"})
        assert len(body) < 5_000
        page = msgspec.json.decode(body, type=ResultsReply)
        assert [r.blob is not None for r in page.results] == [True, False, True]
        assert page.results[0].blob is not None
        assert page.results[0].blob.size > 3_000_000

        pieces: list[str] = []
        part: int | None = 0
        while part is not None:
            body = await call_api(mesh, "result.part", {"job": "j", "index": 2, "part": part})
            assert len(body) < mesh.max_payload - 512
            reply = msgspec.json.decode(body, type=ResultPartReply)
            assert (reply.index, reply.part) == (2, part)
            pieces.append(reply.data)
            part = reply.next
        assert len(pieces) > 3
        assert codec.RESULT.decode("".join(pieces).encode()).text == answer(2, 3_000_000)
        assert [len(p) async for p in client.pages(mesh, "j")] == [1, 1, 1], "a large one is a page by itself"
        error = await error_of(call_api(mesh, "result.part", {"job": "j", "index": 1}))
        assert error.code == "no_part"


async def test_parts_hold_to_the_bound_whatever_the_text_has(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service:
        text = '"\\\n' * 400_000
        data = codec.RESULT.encode(result("j", 0, choices=[Choice(text=text)]))
        stub = msgspec.structs.replace(result("j", 0, choices=[]), blob=blob_of("j/0@1", "result", data))
        from headrace.completion.landing import land

        assert service._store is not None
        await service._store.write(land, [stub, stub], {("j", 0, 1): data})
        at: int | None = 0
        joined = ""
        while at is not None:
            found = await service._store.read(read_parts, ("j", 0, 1), at, 200_000)
            assert found is not None
            assert len(msgspec.json.encode(found.data)) <= 200_000
            joined, at = joined + found.data, found.next
        assert joined.encode() == data


async def test_a_result_whose_object_is_gone_is_failed_and_can_be_retried(
    mesh: Mesh, settings: Settings
) -> None:
    job = Producer(mesh, "j")
    await job.whole(3)
    kept = await put_input(mesh, 0)
    lost = await put_result(mesh, 0, 1_500_000, input_blob=kept.name)
    other = await put_result(mesh, 1, 1_500_000)
    swapped = msgspec.structs.replace(other, index=2)
    assert lost.blob is not None
    await BlobStore(mesh).delete(lost.blob.name)
    await job.results([lost, other, swapped])
    await job.take_away(range(3))
    async with serving(settings):
        status = await job.ended()
        assert (status.state, status.ok, status.failed) == ("completed_with_errors", 1, 2)
        found = {r.index: r async for r in client.results(mesh, "j")}
        assert {i: r.error.type for i, r in found.items() if r.error} == {
            0: "result_missing",
            2: "result_damaged",
        }
        assert found[0].task == lost.task, "a retry needs nothing else"

        async def only_the_input() -> bool:
            return await named(mesh) == {kept.name}

        await until(only_the_input)


POINTS = ["landing-before-commit", "landing-committed", "landing-acked", "blobs-left", "blob-half-deleted:2"]


@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {}), id="asyncio")], indirect=True)
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_each_point_it_lands_once_and_leaves_nothing(
    mesh: Mesh, settings: Settings, tmp_path: Path, point: str
) -> None:
    job = Producer(mesh, "j")
    await job.whole(6)
    inputs = [await put_input(mesh, i) for i in range(6)]
    await job.results([await put_result(mesh, i, 1_500_000, input_blob=inputs[i].name) for i in range(6)])
    await job.take_away(range(6))
    async with process(settings, tmp_path, crash_at=point) as doomed:
        assert await doomed.wait() == -9
    async with process(settings, tmp_path):
        status = await job.ended()
        assert (status.state, status.ok) == ("completed", 6)
        await until(job.results_empty)
        await until(empty(mesh))
        assert [(r.index, r.text == answer(r.index, 1_500_000)) async for r in client.results(mesh, "j")] == [
            (i, True) for i in range(6)
        ]
        assert (await job.audit()).balanced


async def test_a_second_outcome_changes_nothing_and_leaves_no_object(mesh: Mesh, settings: Settings) -> None:
    """A failed item's prompt stays for a retry, also if a late `ok` of another worker comes after it."""
    job = Producer(mesh, "j")
    async with serving(settings):
        await job.whole(2)
        inputs = [await put_input(mesh, i) for i in range(2)]
        failed = result("j", 0, "failed", input_blob=inputs[0].name, task=task(0, inputs[0]))
        await job.results([failed, await put_result(mesh, 1, 2_000_000, input_blob=inputs[1].name)])

        async def landed() -> bool:
            return (await job.status()).failed == 1

        await until(landed)
        await job.results([await put_result(mesh, 0, 2_000_000, input_blob=inputs[0].name)])
        await job.results([await put_result(mesh, 1, 2_500_000, input_blob=inputs[1].name)])
        await job.take_away(range(2))
        status = await job.ended()

        async def both_counted() -> bool:
            return (await job.status()).duplicates == 2

        await until(both_counted)
        assert (status.ok, status.failed) == (1, 1)
        assert (await client.result(mesh, "j", 1)).text == answer(1, 2_000_000)

        async def only_the_input() -> bool:
            return await named(mesh) == {inputs[0].name}

        await until(only_the_input)
        await register(mesh)
        reply = msgspec.json.decode(await call_api(mesh, "retry", {"job": "j"}, timeout_s=20))
        assert (reply["generation"], reply["resubmitted"]) == (2, 1)
        again = result("j", 0, generation=2, input_blob=inputs[0].name)
        await job.results([again])
        await until(empty(mesh))


async def test_a_cancelled_job_leaves_no_object(mesh: Mesh, settings: Settings) -> None:
    job = Producer(mesh, "j")
    other = await put_input(mesh, 0, job="other")
    async with serving(settings):
        await job.open()
        await job.submit(5)
        inputs = [await put_input(mesh, i) for i in range(7)]
        await job.results([await put_result(mesh, 0, 1_500_000, input_blob=inputs[0].name)])
        await job.results([
            result("j", 1, "failed", input_blob=inputs[1].name, task=task(1, inputs[1]),
                   error=ItemError(type="x"))
        ])  # fmt: skip
        await job.take_away([0, 1])
        await cancel(mesh)
        status = await job.ended()
        assert (status.ok, status.failed, status.cancelled) == (1, 1, 3)

        async def only_the_others() -> bool:
            return await named(mesh) == {other.name}

        await until(only_the_others)
        assert (await client.result(mesh, "j", 0)).text == answer(0, 1_500_000)


async def test_objects_of_a_running_job_are_not_touched(mesh: Mesh, settings: Settings) -> None:
    job = Producer(mesh, "j")
    async with serving(settings) as service:
        await job.open()
        await job.submit(3)
        inputs = {(await put_input(mesh, i)).name for i in range(4)}
        assert service._store is not None
        blobs = Blobs(service.mesh, service._store)
        assert await blobs.sweep() == 0
        assert await named(mesh) == inputs
        await cancel(mesh)
        await assert_cancelled(job, count=3)
        await until(empty(mesh))
