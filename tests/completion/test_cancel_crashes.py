"""Cancellation with completion killed after each of its steps: the next start ends it the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.settings import Settings
from tests.completion.world import Process, Producer, assert_cancelled, cancel, process, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> object:
    """Completion is a process of its own here, and runs on uvloop as in production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


POINTS = (
    "cancel-noted", "cancel-intake-closed", "cancel-announced", "cancel-purged", "cancel-filling", "cancel-committed",
    "job-announcing", "job-announced",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_each_step_it_ends_the_same(
    mesh: Mesh, settings: Settings, tmp_path: Path, point: str
) -> None:
    job = Producer(mesh, "j")
    await job.open()
    await job.submit(40)
    async with process(settings, tmp_path, crash_at=point) as first:
        await job.work(range(6))
        await until(job.results_empty)
        await error_of_or_reply(mesh)
        assert await first.wait() == -9
    async with process(settings, tmp_path):
        # The start takes it up: nobody has to ask again.
        await assert_cancelled(job, count=40, ok=6)


async def error_of_or_reply(mesh: Mesh) -> None:
    """Ask for the cancellation; the service may die before it answers."""
    with_reply = asyncio.ensure_future(call_api(mesh, "cancel", {"job": "j"}, timeout_s=2))
    await asyncio.wait((with_reply,))
    with_reply.exception()


async def test_a_stop_in_the_middle_is_taken_up(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    job = Producer(mesh, "j")
    await job.whole(2_000)
    running = Process(settings, tmp_path)
    await running.start()
    await until(job.status)
    await cancel(mesh)
    assert await running.stop() == 0
    async with process(settings, tmp_path):
        await assert_cancelled(job, count=2_000, ok=0)
