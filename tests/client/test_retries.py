"""Retry, dead and redrive by the Python API, against a real worker (echo) and completion."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.client import AsyncClient, Client
from headrace.client.retries import retry
from headrace.contracts.errors import NotFound, Refused
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.completion.again import fail
from tests.completion.world import Producer, process, register, serving
from tests.worker.harness import running, with_worker

pytestmark = pytest.mark.anyio


async def test_failed_items_run_again_through_a_real_worker(mesh: Mesh, settings: Settings) -> None:
    """The first worker's engine refuses them; the second one's does not."""
    small = with_worker(settings, engine="echo", engine_options={"fail_on": "item 7"})
    async with serving(settings), AsyncClient(settings=settings) as client:
        async with running(small):
            await client.submit([{"prompt": f"item {i}", "max_tokens": 4} for i in range(80)], job="j")
            status = await client.wait("j", timeout_s=30)
            assert (status.ok, status.failed) == (69, 11)
        reply = await client.retry("j", where='"index" >= 70')
        assert (reply.generation, reply.resubmitted) == (2, 10)
        with pytest.raises(Refused, match="still running"):
            await client.retry("j")
        async with running(with_worker(settings, engine="echo")):
            status = await client.wait("j", timeout_s=30)
            assert (status.ok, status.failed, status.generation) == (79, 1, 2)
            assert (await client.retry("j")).resubmitted == 1
            status = await client.wait("j", timeout_s=30)
        assert (status.state, status.ok) == ("completed", 80)
        found = [r async for r in client.results("j")]
        assert [r.text for r in found] == [f"item {i}" for i in range(80)]
        assert {r.index: r.generation for r in found if r.generation > 1} == {7: 3} | dict.fromkeys(
            range(70, 80), 2
        )
        assert {r.shape for r in found} <= {6, None}
        audit = await client.audit("j")
        assert (audit.balanced, audit.missing, audit.doubled) == (True, [], [])


async def test_dead_things_by_the_blocking_client(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(3)
        await fail(job, range(3), "dead")
        await job.ended()

        def use() -> None:
            with Client(settings=settings) as client:
                assert [e.id for e in client.dead(job="j")] == ["j/2@1", "j/1@1", "j/0@1"]
                assert client.redrive("j/1@1").generation == 2
                assert [e.index for e in client.dead()] == [2, 0]
                with pytest.raises(NotFound):
                    client.redrive("9")
                with pytest.raises(NotFound):
                    client.retry("none")

        await asyncio.to_thread(use)


@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {}), id="asyncio")], indirect=True)
async def test_a_lost_answer_is_asked_for_again_and_is_one_retry(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """Completion dies after it has noted the retry and before it answers; the client asks until it is back."""
    await register(mesh)
    async with process(settings, tmp_path, crash_at="retry-noted") as first:
        job = Producer(mesh, "j")
        await job.whole(3)
        await fail(job, range(3))
        await job.ended()
        asking = asyncio.ensure_future(retry(mesh, "j"))
        assert await first.wait() == -9
        assert not asking.done()
    async with process(settings, tmp_path):
        reply = await asking
        assert (reply.generation, reply.resubmitted) == (2, 3)
        status = await job.status()
        assert (status.generation, status.state) == (2, "sealed")
