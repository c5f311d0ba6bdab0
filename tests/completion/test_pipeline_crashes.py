"""Pipelines with completion killed in the middle: between commit and feed, between feed and commit, at random.

That it is killed at each of its steps is in `tests/chaos`; here are the steps that are passed more than once.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.contracts.messages import FunctionSpec
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import register_function
from headrace.mesh.settings import Settings
from tests.completion.pipes import (
    DOCUMENTS,
    answered,
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
from tests.completion.world import Process, process, until, with_options
from tests.worker.harness import running, with_worker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
ROWS = documents(150, bad=10)


@pytest.fixture
def anyio_backend() -> object:
    """Completion is a process of its own here, and runs on uvloop as in production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.mark.parametrize(
    "point",
    ["pipeline-assigned:3", "pipeline-batch-stored:6",
     "pipeline-unfit-told:2", "pipeline-sealed:2"],
)  # fmt: skip
async def test_killed_once_more(mesh: Mesh, settings: Settings, tmp_path: Path, point: str) -> None:
    settings = with_options(settings, batch_rows=40)
    path = write(tmp_path / "rows", ROWS)
    async with running(with_worker(settings, engine="echo")):
        async with process(settings, tmp_path, crash_at=point) as first:
            running_ = asyncio.ensure_future(until(lambda: answered(run(mesh, DOCUMENTS, path)), 60))
            assert await first.wait(60) == -9
        async with process(settings, tmp_path):
            await running_
            await assert_documents(mesh, ROWS)


async def test_a_batch_whose_ack_is_lost_is_not_stored_again(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """Killed after the commit and before anything else: the tasks that are there are those that stay."""
    path = write(tmp_path / "rows", [list(range(500))])
    spec = pipeline("p", stage("next", each="value"))
    async with process(settings, tmp_path, crash_at="pipeline-batch-stored:1") as first:
        async with running(with_worker(settings, engine="echo")):
            await until(lambda: answered(run(mesh, spec, path)), 60)
            assert await first.wait(60) == -9
        stored = await jsapi.count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job("p-next"))
    async with process(settings, tmp_path):

        async def all_stored() -> bool:
            left = await jsapi.count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job("p-next"))
            return left == 500 - (128 - stored)

        await until(all_stored, 30)
        async with running(with_worker(settings, engine="echo")):
            status = await ended(mesh, "p")
            assert [(s.ok, s.duplicates) for s in status.stages] == [(1, 0), (500, 0)]
            assert sorted(await values(mesh, "p-next")) == list(range(500))
            await assert_proved(mesh, "p")


@pytest.mark.slow
async def test_killed_at_random_moments(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    settings = with_options(settings, batch_rows=100)
    rows = documents(400, chunks=9, bad=50)
    path = write(tmp_path / "rows", rows)
    worker = with_worker(settings, engine="echo", slots=64, engine_options={"delay_ms": "5"})
    running_completion = Process(settings, tmp_path)
    await running_completion.start()
    asking = asyncio.ensure_future(until(lambda: answered(run(mesh, DOCUMENTS, path)), 90))
    async with running(worker):
        for _ in range(6):
            await asyncio.sleep(rng.uniform(0.05, 0.6))
            running_completion.kill()
            await running_completion.start()
        await asking
        running_completion.kill()
        async with process(settings, tmp_path):
            await assert_documents(mesh, rows)


async def test_a_pipeline_that_was_recorded_is_known_after_the_data_plane_is_new(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """The record is in the broker: another completion takes it up, and feeds what lands from then on."""
    spec = pipeline("p", stage("next"))
    async with process(settings, tmp_path, crash_at="pipeline-recorded") as first:
        await register_function(mesh, FunctionSpec(name="generate", engine="echo", model="echo"))
        asking = asyncio.ensure_future(
            until(lambda: answered(run(mesh, spec, write(tmp_path / "r", range(20)))), 60)
        )
        assert await first.wait(60) == -9
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    async with (
        process(msgspec.structs.replace(settings), tmp_path),
        running(with_worker(settings, engine="echo")),
    ):
        await asking
        status = await ended(mesh, "p")
        assert [s.ok for s in status.stages] == [20, 20]
        await assert_proved(mesh, "p")
