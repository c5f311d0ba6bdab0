"""Every crash point of the services, in real processes: it is killed there, started again, and nothing is lost.

The points are found in the source, so that a new one is tried without being named here. `CASES` says what has to be
done to come to a point where running a job is not enough. Each point is tried twice: once the process that passes it
dies alone, once together with another part.
"""

from __future__ import annotations

import ast
import asyncio
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import uvloop

from headrace.client import AsyncClient
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos import scenarios
from tests.chaos.processes import ProcessMesh, kept_alive, process_mesh
from tests.chaos.scenarios import JOB, Scenario, assert_whole
from tests.completion.world import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services" / "headrace"
ROOMS = {"client": "submit", "inference_worker": "worker", "completion": "completion"}
"""Which process passes the points of a folder."""


class Case(NamedTuple):
    """A process that passes a point, in a scenario; `nth` is the pass at which it dies."""

    process: str
    scenario: type[Scenario] = Scenario
    nth: int = 1


CASES: dict[str, tuple[Case, ...]] = {
    "item-finished": (Case("worker", nth=20),),
    "result-published": (Case("worker"), Case("worker", nth=3)),
    "task-acked": (Case("worker", nth=2),),
    "landing-before-commit": (Case("completion"), Case("completion", nth=3)),
    "landing-committed": (Case("completion"), Case("completion", nth=3)),
    "landing-acked": (Case("completion", nth=2),),
    "blob-staged": (Case("submit", scenarios.Large), Case("worker", scenarios.Large)),
    "blob-half-deleted": (Case("completion", scenarios.Large),),
    "blobs-left": (Case("completion", scenarios.Large),),
    "submit-prompts-stored": (Case("submit", scenarios.Large),),
    "prompt-fetching": (Case("worker", scenarios.Large),),
    "result-object-stored": (Case("worker", scenarios.Large),),
    "letter-published": (Case("completion", scenarios.Redrive),),
    "letter-noted": (Case("completion", scenarios.Redrive),),
    "suspects-recorded": (Case("worker", scenarios.EngineDies),),
    "pipeline-cancel-noted": (Case("completion", scenarios.PipelineCancel),),
    "wreckage-recorded": (Case("worker", scenarios.ProcessDies),),
}
PREFIXES = {"cancel-": scenarios.Cancel, "retry-": scenarios.Retry, "pipeline-": scenarios.Pipeline}
OF_CALLS = ("gateway/", "agent/", "completion/projection", "completion/capture")
"""Where no task passes: governed calls have their own processes, and their own tests name these points."""


def found() -> dict[str, set[str]]:
    """Every crash point of the source, with the files that have it."""
    points: dict[str, set[str]] = {}
    for path in sorted(SERVICES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "crash_point":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), (
                    f"{path}:{node.lineno}: a crash point has a plain name"
                )
                points.setdefault(argument.value, set()).add(path.relative_to(SERVICES).as_posix())
    return points


POINTS = found()


def is_of_calls(point: str) -> bool:
    """Whether only governed calls pass the point."""
    return all(file.startswith(OF_CALLS) for file in POINTS[point])


def cases_of(point: str) -> tuple[Case, ...]:
    """How a point is tried: as the table says, else by the folder that has it and the beginning of its name."""
    if point in CASES:
        return CASES[point]
    kind = next((s for prefix, s in PREFIXES.items() if point.startswith(prefix)), Scenario)
    rooms = sorted({file.partition("/")[0] for file in POINTS[point]} & ROOMS.keys())
    return tuple(Case(ROOMS[room], kind) for room in rooms)


def every_case() -> list[Any]:
    """Each case alone, and the first of each point with another part that dies at the same time."""
    return [
        pytest.param(
            point, case, both, id=f"{point}-{case.process}-{case.nth}{'-and-another' if both else ''}"
        )
        for point in POINTS
        if not is_of_calls(point)
        for at, case in enumerate(cases_of(point))
        for both in ((False, True) if at == 0 else (False,))
    ]


def test_every_point_that_a_task_passes_has_a_case() -> None:
    assert sum(not is_of_calls(p) for p in POINTS) > 15
    without = [point for point in POINTS if not is_of_calls(point) and not cases_of(point)]
    assert without == [], "say in CASES which process comes to these, and how"
    assert set(CASES) <= set(POINTS), "a point of the table is gone from the source"


def test_every_point_of_calls_is_named_by_a_test() -> None:
    others = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    text = "".join(path.read_text("utf-8") for path in others)
    assert [point for point in POINTS if is_of_calls(point) and f'"{point}' not in text] == []


@pytest.fixture
def anyio_backend() -> object:
    """What is tested runs in other processes, on the loop of production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    return Settings(url=nats_server.url, dir=str(tmp_path), durability="relaxed", ack_wait_s=0.5)


@pytest.mark.parametrize(("point", "case", "with_another"), every_case())
async def test_killed_there_and_started_again(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, point: str, case: Case, with_another: bool
) -> None:
    scenario = case.scenario()
    options = {"ack_wait_s": 0.5, **scenario.settings}
    with process_mesh(nats_server, tmp_path / "mesh", options, scenario.worker) as parts:
        if case.scenario is scenarios.ProcessDies:
            await parts.start()
        else:
            await parts.start(crash={case.process: f"{point}:{case.nth}"})
        path = scenario.write(tmp_path / "items.jsonl")
        asking = await run_into(point, case, parts, scenario, mesh, path)
        if with_another:
            other = random.Random(point).choice(
                [p for p in ("worker", "completion", "broker") if p != case.process]
            )
            print(f"{other} is killed as well")
            parts.kill(other)
        async with kept_alive(parts):
            await until(lambda: mesh.connected)
            if case.process == "submit":
                done = await asyncio.to_thread(parts.submit, path, JOB)
                assert done.returncode == 0, done.stderr
                assert msgspec.json.decode(done.stdout)["submitted"] == len(scenario.prompts)
            await asking
            await assert_whole(mesh, parts, scenario)


async def run_into(
    point: str, case: Case, parts: ProcessMesh, scenario: Scenario, mesh: Mesh, path: Path
) -> asyncio.Future[None]:
    """Do what leads to the point, until the process is dead; return what goes on being asked."""
    if case.process == "submit":
        done = await asyncio.to_thread(parts.submit, path, JOB, crash_at=f"{point}:{case.nth}")
        assert done.returncode == -signal.SIGKILL, f"{point} was not passed: {done.stdout}{done.stderr}"
        return asyncio.ensure_future(scenario.ask(mesh))
    async with AsyncClient(mesh=mesh) as client:
        await client.submit(path, job=JOB)
    asking = asyncio.ensure_future(scenario.ask(mesh))
    part = parts.parts[case.process]
    if case.scenario is scenarios.ProcessDies:
        assert await part.died(30) == -signal.SIGSEGV, part.tail()
        part.start(crash_at=point)
    code = await part.died(40)
    assert code == -signal.SIGKILL, f"{point} was not passed by {case.process}: {part.tail()}"
    return asking
