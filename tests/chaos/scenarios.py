"""What is done with a mesh so that a certain step is passed, and what must be true of it at the end.

Each scenario can be asked for again after a crash, as a person or a script would do.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.client import AsyncClient
from headrace.client.pipelines import pipeline_cancel, pipeline_status
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, NotFound, Refused
from headrace.contracts.messages import JobCompleted
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.publisher import publish
from tests.chaos.processes import ProcessMesh
from tests.completion import pipes
from tests.completion.world import sql, until

JOB = "j"
ENGINE = """
[completion]
batch_rows = 15
[worker]
engine = "echo"
slots = 16
[worker.engine_options]
delay_ms = "15"
fail_on = "BAD"
die_on = "DIE"
"""
SLOW = ENGINE.replace("slots = 16", "slots = 3").replace("15", "250")
SIM = """
[worker]
engine = "sim"
slots = 16
[worker.engine_options]
time_scale = "0.05"
output_median = "20"
segfault = "SEGV"
"""
ASK_S = 20.0


@dataclass
class Scenario:
    """The items, and what is asked of the mesh beside running them."""

    prompts: list[str] = field(default_factory=lambda: [f"item {i}" for i in range(60)])
    worker: str = ENGINE
    settings: dict[str, Any] = field(default_factory=dict)
    generation: int = 1

    def write(self, path: Path) -> Path:
        """The items as a file."""
        path.write_text("".join(json.dumps({"prompt": p, "max_tokens": 8}) + "\n" for p in self.prompts))
        return path

    async def ask(self, mesh: Mesh) -> None:
        """What is asked once the job runs, by a client that goes on asking: nothing."""

    async def check(self, mesh: Mesh) -> None:
        """What must be true at the end beside what is true of every job."""
        assert await by_status(mesh) == {"ok": len(self.prompts)}


@dataclass
class Cancel(Scenario):
    """The job is cancelled once some of it has landed; it would take five seconds."""

    worker: str = SLOW

    async def ask(self, mesh: Mesh) -> None:
        async def some() -> bool:
            return await event(mesh) is not None or sum((await by_status(mesh)).values()) >= 3

        await until(lambda: _answered(some()), ASK_S)
        await until(lambda: _answered(call_api(mesh, "cancel", {"job": JOB}, timeout_s=5)), ASK_S)

    async def check(self, mesh: Mesh) -> None:
        found = await by_status(mesh)
        assert sum(found.values()) == len(self.prompts)
        assert found.get("cancelled", 0) > 0, "the cancellation came too late to show anything"
        assert found.get("ok", 0) >= 3
        told = await event(mesh)
        assert told is not None
        assert told.state == "cancelled"


@dataclass
class Retry(Scenario):
    """What failed runs again once the job has ended; it fails again, as another generation."""

    prompts: list[str] = field(
        default_factory=lambda: [f"item {i} {'BAD' if i % 3 == 0 else ''}" for i in range(60)]
    )
    generation: int = 2

    async def ask(self, mesh: Mesh) -> None:
        await until(lambda: _answered(event(mesh)), ASK_S)
        again = {"job": JOB, "generation": 2}
        await until(lambda: _answered(call_api(mesh, "retry", again, timeout_s=5)), ASK_S)

    async def check(self, mesh: Mesh) -> None:
        assert await by_status(mesh) == {"ok": 40, "failed": 20}
        rows = await sql(mesh, "SELECT generation, count(*) FROM outcomes GROUP BY 1 ORDER BY 1")
        assert rows == [[1, 60], [2, 20]]


class Redrive(Scenario):
    """A letter is redriven: what nobody could take is sent once more, and nobody can take it."""

    async def ask(self, mesh: Mesh) -> None:
        await until(lambda: _answered(event(mesh)), ASK_S)
        subject = mesh.subjects.task("generate", "normal", 6, JOB)
        if not await self._letters(mesh):
            await publish(mesh, mesh.topology.tasks, subject, b"no task", msg_id="no task")
        letters = await until(lambda: _answered(self._letters(mesh)), ASK_S)
        with contextlib.suppress(Refused):  # it was redriven, and who asked did not hear of it
            await until(
                lambda: _answered(call_api(mesh, "redrive", {"id": str(letters[0][0])}, timeout_s=5)), ASK_S
            )

    async def check(self, mesh: Mesh) -> None:
        await super().check(mesh)

        async def both() -> bool:
            return len(await self._letters(mesh)) == 2

        await until(both, ASK_S)
        (_, first), (_, second) = await self._letters(mesh)
        assert first is not None
        assert second is None

    @staticmethod
    async def _letters(mesh: Mesh) -> list[list[Any]]:
        return await sql(mesh, "SELECT sequence, redriven_at FROM dead ORDER BY sequence")


@dataclass
class Large(Scenario):
    """Some items are too large for a message, and so are their results."""

    prompts: list[str] = field(
        default_factory=lambda: [f"{i} ".ljust(1_200_000 if i in (3, 9) else 10, "x") for i in range(20)]
    )

    async def check(self, mesh: Mesh) -> None:
        await super().check(mesh)
        async with AsyncClient(mesh=mesh) as client:
            for index in (3, 9):
                assert (await client.result(JOB, index)).text == self.prompts[index]
        objects = f"$O.{mesh.topology.blobs_bucket}.>"

        async def none_left() -> bool:
            return await jsapi.count_subject(mesh, mesh.topology.blobs, objects) == 0

        await until(none_left, 30)


@dataclass
class EngineDies(Scenario):
    """One item kills the engine that it is in."""

    prompts: list[str] = field(
        default_factory=lambda: [f"item {i} {'DIE' if i == 20 else ''}" for i in range(60)]
    )

    async def check(self, mesh: Mesh) -> None:
        assert await by_status(mesh) == {"ok": 59, "dead": 1}
        assert await sql(mesh, "SELECT index FROM outcomes WHERE status = 'dead'") == [[20]]


@dataclass
class ProcessDies(Scenario):
    """One item ends the process that it is in."""

    worker: str = SIM
    prompts: list[str] = field(
        default_factory=lambda: [f"item {i} {'SEGV' if i == 20 else ''}" for i in range(60)]
    )

    async def check(self, mesh: Mesh) -> None:
        assert await by_status(mesh) == {"ok": 59, "dead": 1}


@dataclass
class Pipeline(Scenario):
    """Beside the job runs a pipeline with every kind of feeding, and some rows that cannot be made."""

    prompts: list[str] = field(default_factory=lambda: ["beside it"])
    rows: list[dict[str, Any]] = field(default_factory=lambda: pipes.documents(60, bad=6))

    async def ask(self, mesh: Mesh) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = pipes.write(Path(folder) / "rows.jsonl", self.rows)
            await until(lambda: pipes.answered(pipes.run(mesh, pipes.DOCUMENTS, path)), 60)

    async def check(self, mesh: Mesh) -> None:
        await super().check(mesh)
        await pipes.assert_documents(mesh, self.rows)


@dataclass
class PipelineCancel(Pipeline):
    """The pipeline is cancelled once some of its first stage has landed; it would take minutes."""

    worker: str = SLOW
    rows: list[dict[str, Any]] = field(default_factory=lambda: pipes.documents(300))

    async def ask(self, mesh: Mesh) -> None:
        await super().ask(mesh)

        async def some() -> bool:
            return (await pipeline_status(mesh, "docs")).stages[0].ok >= 3

        await until(lambda: _answered(some()), 40)
        await until(lambda: _answered(pipeline_cancel(mesh, "docs", reason="enough", timeout_s=5)), 40)

    async def check(self, mesh: Mesh) -> None:
        await Scenario.check(self, mesh)
        status = await pipes.ended(mesh, "docs", 60)
        assert (status.state, status.reason) == ("cancelled", "enough")
        assert status.stages[0].ok >= 3
        assert [s.state for s in status.stages[1:]] == ["cancelled"] * 4, status
        await pipes.assert_proved(mesh, "docs")


async def _answered(asked: Any) -> Any:
    """The answer, or False while a part is away; an answer without content counts as one."""
    try:
        answer = await asked
    except (Refused, NotFound) as e:
        if e.code in ("still_running", "unknown_job"):
            return False
        raise
    except HeadraceError:
        return False
    return True if answer is None else answer


# --- what is seen -----------------------------------------------------------------------------------


async def by_status(mesh: Mesh) -> dict[str, int]:
    """Current outcomes of the job, counted by status."""
    rows = await sql(mesh, f"SELECT status, count(*) FROM current_outcomes WHERE job = '{JOB}' GROUP BY 1")
    return dict(rows)


async def event(mesh: Mesh, job: str = JOB) -> JobCompleted | None:
    """The job's last `completed` event."""
    found = await jsapi.last_message(mesh, mesh.topology.jobs, mesh.subjects.job_event(job, "completed"))
    if found is None:
        return None
    told = codec.JOB_EVENT.decode(found.data)
    assert isinstance(told, JobCompleted)
    return told


async def assert_whole(mesh: Mesh, mesh_of: ProcessMesh, scenario: Scenario) -> None:
    """The job has ended; each item has one outcome for each generation; the account balances; nothing is left."""

    async def ended() -> bool:
        told = await event(mesh)
        return told is not None and told.generation == scenario.generation

    await until(lambda: _answered(ended()), 40)

    async def empty() -> bool:
        p = mesh.subjects.prefix
        tasks = await jsapi.count_subject(mesh, mesh.topology.tasks, f"{p}.tasks.*.*.*.{JOB}")
        return tasks + await jsapi.count_subject(mesh, mesh.topology.results, f"{p}.results.>") == 0

    await until(lambda: _answered(empty()), 30)
    count = len(scenario.prompts)
    once = f"""SELECT count(*), count(DISTINCT "index"), min("index"), max("index") FROM outcomes
        WHERE generation = 1 AND job = '{JOB}'"""
    rows = await until(lambda: _answered(sql(mesh, once)), 20)
    assert rows == [[count, count, 0, count - 1]], mesh_of.logs()
    audit = msgspec.json.decode(
        await until(lambda: _answered(call_api(mesh, "audit", {"job": JOB}, timeout_s=20)), 20)
    )
    assert audit["balanced"], audit
    assert (audit["missing"], audit["doubled"], audit["submitted"]) == ([], [], count)
    told = await jsapi.count_subject(mesh, mesh.topology.jobs, mesh.subjects.job_event(JOB, "completed"))
    assert told == scenario.generation, "one `completed` event for each generation"
    await scenario.check(mesh)
