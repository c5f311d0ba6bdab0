"""Prompts that are too large for a message: objects before tasks, once each, whoever is killed in between."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.client.submit import SubmitOptions, submit
from headrace.contracts.codec import PROMPT
from headrace.contracts.errors import Refused
from headrace.contracts.messages import BlobPrompt, ChatPrompt, Prompt, Row, TextPrompt, TokenPrompt
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import stream_info
from headrace.mesh.provision import provision, register_function
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.client.harness import (
    SPEC,
    SubmitProcess,
    assert_whole,
    count_tasks,
    manifest,
    plain,
    stored_tasks,
    until,
    write,
)

pytestmark = pytest.mark.anyio
LARGE = 600_000


async def prompts(mesh: Mesh, job: str = "j") -> list[Prompt]:
    """What each task of the job asks, wherever it lies."""
    store = BlobStore(mesh)
    return [
        PROMPT.decode(await store.get(t.prompt.blob)) if isinstance(t.prompt, BlobPrompt) else t.prompt
        for t in await stored_tasks(mesh, job)
    ]


async def referred(mesh: Mesh, job: str = "j") -> list[str]:
    return [t.prompt.blob.name for t in await stored_tasks(mesh, job) if isinstance(t.prompt, BlobPrompt)]


async def test_large_prompts_become_objects_and_small_ones_stay_in_their_tasks(ready: Mesh) -> None:
    ids = list(range(900)) * 200
    lines: list[dict[str, Any]] = [
        {"prompt": "small"},
        {"prompt": "é" * LARGE},
        {"prompt_token_ids": ids},
        {"messages": [{"role": "user", "content": "m" * 2_000_000}]},
    ]
    assert (await submit(ready, lines, job="j")).submitted == 4
    assert [type(t.prompt) for t in await stored_tasks(ready, "j")] == [TextPrompt, *[BlobPrompt] * 3]
    small, text, tokens, chat = await prompts(ready)
    assert small == TextPrompt(text="small")
    assert text == TextPrompt(text="é" * LARGE)
    assert tokens == TokenPrompt(ids=ids)
    assert isinstance(chat, ChatPrompt)
    assert chat.messages[0]["content"] == "m" * 2_000_000
    assert sorted(await BlobStore(ready).names()) == sorted(await referred(ready))


async def test_rows_may_be_large_too(ready: Mesh) -> None:
    rows = [{"a": 1}, {"a": "x" * 1_500_000}]
    await submit(ready, rows, job="j", options=SubmitOptions(form="rows"))
    small, large = await prompts(ready)
    assert isinstance(small, Row)
    assert isinstance(large, Row)
    assert len(bytes(large.value)) > 1_500_000


async def test_the_threshold_is_a_setting(settings: Settings, ready: Mesh) -> None:
    low = Settings(url=settings.url, durability="relaxed", large_item_bytes=2_000, max_item_bytes=50_000)
    async with await Mesh.connect(low, name="low") as mesh:
        receipt = await submit(
            mesh,
            [{"prompt": "x" * size} for size in (1_000, 3_000, 60_000)],
            job="j",
            options=SubmitOptions(skip_bad=True),
        )
        assert (receipt.submitted, receipt.refused) == (2, 1)
        assert "max_item_bytes allows 50,000" in receipt.errors[0].error
        assert [isinstance(t.prompt, BlobPrompt) for t in await stored_tasks(mesh, "j")] == [False, True]


@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {}), id="asyncio")], indirect=True)
@pytest.mark.parametrize(
    ("crash_at", "objects"), [("blob-staged", 0), ("blob-staged:3", 2), ("submit-prompts-stored:1", 7)]
)
async def test_killed_between_the_objects_and_the_batch_the_same_command_goes_on(
    ready: Mesh, settings: Settings, tmp_path: Path, crash_at: str, objects: int
) -> None:
    """Objects that were stored are stored again under their names, so none is there twice."""
    source = write(tmp_path / "in", plain(20, size=LARGE))
    code, _ = await SubmitProcess(settings, source, "j", crash_at=crash_at).finished()
    assert code == -signal.SIGKILL
    left = await BlobStore(ready).names()
    assert objects - 4 <= len(left) <= objects + 4, "as many as were on their way"
    assert await count_tasks(ready, "j") == 0
    code, receipt = await SubmitProcess(settings, source, "j").finished()
    assert (code, receipt["submitted"]) == (0, 20), receipt
    await assert_whole(ready, "j", 20)
    names = await referred(ready)
    assert len(set(names)) == 20
    assert sorted(await BlobStore(ready).names()) == sorted(names)
    assert [p.text for p in await prompts(ready) if isinstance(p, TextPrompt)] == [
        line["prompt"] for line in plain(20, size=LARGE)
    ]


@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {}), id="asyncio")], indirect=True)
async def test_two_submitters_of_one_job_store_each_object_once(
    ready: Mesh, settings: Settings, tmp_path: Path
) -> None:
    source = write(tmp_path / "in", plain(30, size=LARGE))
    both = [SubmitProcess(settings, source, "j") for _ in range(2)]
    assert [(await p.finished())[0] for p in both] == [0, 0]
    await assert_whole(ready, "j", 30)
    assert sorted(await BlobStore(ready).names()) == sorted(await referred(ready))
    assert len(await prompts(ready)) == 30


async def test_a_full_bucket_holds_the_submit_up_and_it_goes_on_when_there_is_room(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    bounded = Settings(url=nats_server.url, dir=str(tmp_path), durability="relaxed", max_bytes=6_000_000)
    async with await Mesh.connect(bounded, name="bounded") as mesh:
        await provision(mesh)
        await register_function(mesh, SPEC)
        lines = plain(9, size=900_000)
        with pytest.raises(Refused, match=r"[23] of 9 items are confirmed as stored") as caught:
            await submit(mesh, lines, job="j", options=SubmitOptions(patience_s=3))
        assert caught.value.code == "queue_full"
        used = int((await stream_info(mesh, mesh.topology.blobs))["state"]["bytes"])
        assert used <= 3_000_000, "half of the bucket is for results"

        again = asyncio.create_task(submit(mesh, lines, job="j", options=SubmitOptions(patience_s=30)))
        store = BlobStore(mesh)
        for done in (3, 6):
            await store.delete_all(await store.names())  # as completion does with what has landed

            async def more(done: int = done) -> bool:
                return (await manifest(mesh, "j")).stored >= done

            await until(more)
            await store.delete_all(await referred(mesh))
        assert (await again).submitted == 9


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {}), id="asyncio")], indirect=True)
async def test_memory_is_bounded_by_an_item_and_not_by_the_input(
    ready: Mesh, settings: Settings, tmp_path: Path
) -> None:
    peaks: list[int] = []
    for job, count in (("few", 3), ("many", 20)):
        source = write(tmp_path / job, plain(count, size=10_000_000))
        code, receipt = await SubmitProcess(settings, source, job).finished(100)
        assert (code, receipt["submitted"]) == (0, count), receipt
        peaks.append(receipt["peak_mib"])
    few, many = peaks
    assert many < few + 40, peaks
    assert many < 350
