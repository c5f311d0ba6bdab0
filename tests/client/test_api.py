"""The Python API, against a real worker (echo) and completion: submit, watch, wait, results, audit, cancel, SQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.client import AsyncClient, Client, Progress, SubmitOptions
from headrace.contracts.errors import InvalidInput, NotFound, Unavailable
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.client.harness import batch_line, plain, text_line, write
from tests.completion.world import serving
from tests.worker.harness import running, with_worker

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(mesh: Mesh, settings: Settings) -> AsyncIterator[Settings]:
    """A mesh with completion and one worker whose model takes 128 tokens."""
    everything = with_worker(settings, engine="echo", context=128)
    async with serving(everything), running(everything):
        yield everything


@pytest.fixture
async def client(world: Settings) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(settings=world) as connected:
        yield connected


async def test_from_lines_to_results(client: AsyncClient, tmp_path: Path) -> None:
    receipt = await client.submit(plain(1_500, max_tokens=8), job="j")
    assert receipt.submitted == 1_500
    states = [status.state async for status in client.watch("j", poll_s=0.05)]
    assert states[-1] == "completed"
    status = await client.wait("j", timeout_s=10)
    assert (status.ok, status.submitted, status.queued, status.landing) == (1_500, 1_500, 0, 0)
    found = [r async for r in client.results("j")]
    assert [(r.index, r.custom_id) for r in found] == [(i, f"id-{i}") for i in range(1_500)]
    assert [r.index async for r in client.results("j", after=1_497)] == [1_498, 1_499]
    assert (await client.result("j", 7)).custom_id == "id-7"
    audit = await client.audit("j")
    assert (audit.balanced, audit.missing) == (True, [])
    assert [j.job for j in await client.jobs()] == ["j"]
    reply = await client.query("SELECT count(*) FROM outcomes WHERE job = 'j'")
    assert reply.rows == [[1_500]]
    out = tmp_path / "out.jsonl"
    assert await client.write_results("j", out, format="openai") == 1_500
    assert json.loads(out.read_text().splitlines()[3])["custom_id"] == "id-3"
    # A repeat after the job has completed adds nothing.
    again = await client.submit(plain(1_500, max_tokens=8), job="j")
    assert (again.submitted, again.resumed_from) == (1_500, 1_500)
    assert (await client.status("j")).duplicates == 0


async def test_one_prompt_that_is_too_long_fails_alone(client: AsyncClient) -> None:
    lines = [*plain(100, max_tokens=8), {"prompt_token_ids": [1] * 500, "max_tokens": 8}]
    assert (await client.submit(lines, job="j")).submitted == 101
    status = await client.wait("j", timeout_s=20)
    assert (status.state, status.ok, status.failed) == ("completed_with_errors", 100, 1)
    last = await client.result("j", 100)
    assert last.error is not None
    assert last.error.type == "too_long"


async def test_both_endpoints_of_an_openai_batch(client: AsyncClient, tmp_path: Path) -> None:
    lines = [
        batch_line(max_tokens=4) | {"custom_id": "chat"},
        text_line(max_tokens=4) | {"custom_id": "text"},
    ]
    await client.submit(write(tmp_path / "in.jsonl", lines), job="j")
    await client.wait("j", timeout_s=10)
    out = tmp_path / "out.jsonl"
    await client.write_results("j", out, format="openai")
    chat, text = (json.loads(line) for line in out.read_text().splitlines())
    assert (chat["custom_id"], chat["response"]["body"]["object"]) == ("chat", "chat.completion")
    assert (text["custom_id"], text["response"]["body"]["object"]) == ("text", "text_completion")


async def test_an_empty_job_completes(client: AsyncClient) -> None:
    await client.submit([], job="j")
    status = await client.wait("j", timeout_s=10)
    assert (status.state, status.submitted) == ("completed", 0)
    assert [r async for r in client.results("j")] == []


async def test_a_job_that_is_cancelled(mesh: Mesh, settings: Settings) -> None:
    everything = with_worker(settings, engine="echo")
    async with serving(everything), AsyncClient(settings=everything) as client:
        async with running(everything):
            pass  # it registers the function and goes
        await client.submit(plain(50), job="j")
        with pytest.raises(Unavailable, match="has not ended within") as caught:
            await client.wait("j", timeout_s=0.5)
        assert caught.value.code == "timeout"
        await client.cancel("j", reason="enough")
        status = await client.wait("j", timeout_s=10)
        assert (status.state, status.cancelled) == ("cancelled", 50)


async def test_what_is_not_there(client: AsyncClient) -> None:
    for call in (
        client.status("nope"),
        client.audit("nope"),
        client.result("nope", 0),
        client.cancel("nope"),
    ):
        with pytest.raises(NotFound):
            await call
    with pytest.raises(InvalidInput, match="no option 'skipbad'"):
        await client.submit([], skipbad=True)
    with pytest.raises(InvalidInput, match="not connected"):
        await AsyncClient("nats://x").status("j")


async def test_blocking_calls(world: Settings, tmp_path: Path) -> None:
    def use() -> None:
        seen: list[Progress] = []
        with Client(settings=world) as client:
            receipt = client.submit(
                ["one", "two"], job="j", on_progress=seen.append, defaults={"max_tokens": 4}
            )
            assert receipt.submitted == 2
            assert [s.state for s in client.watch("j", poll_s=0.05)][-1] == "completed"
            assert client.wait("j", timeout_s=5).ok == client.status("j").ok == 2
            assert [r.index for r in client.results("j")] == [0, 1]
            assert client.result("j", 1).status == "ok"
            assert client.audit("j").balanced
            assert len(client.jobs()) == 1
            assert client.query("SELECT 1").rows == [[1]]
            assert client.write_results("j", tmp_path / "out") == 2
            with pytest.raises(NotFound):
                client.cancel("nope")
            options = SubmitOptions(skip_bad=True)
            assert client.submit(["", "x"], job="k", options=options).refused == 1
        client.close()
        assert seen[-1].phase == "sealed"

    await asyncio.to_thread(use)


async def test_no_mesh_and_no_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_NATS_URL", raising=False)
    with pytest.raises(NotFound, match="no mesh found"):
        await asyncio.to_thread(Client, None, tmp_path)
