"""Pipelines as tests see them: declared in a line, run through a real worker, and proved at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from headrace.client.pipelines import (
    Declared,
    PipelineReceipt,
    pipeline_audit,
    pipeline_status,
    run_pipeline,
)
from headrace.client.submit import SubmitOptions
from headrace.contracts.errors import HeadraceError, NotFound, Unavailable
from headrace.contracts.generation import Generation
from headrace.contracts.pipeline import PipelineAudit, PipelineSpec, PipelineStatus, StageSpec
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from tests.completion.world import sql, until

FUNCTION = "generate"
ENDED = ("completed", "completed_with_errors", "cancelled")


def stage(name: str, **fields: Any) -> StageSpec:
    """A stage whose function returns a row as it is."""
    fields.setdefault("function", FUNCTION)
    if "params" in fields:
        fields["params"] = Generation(**fields["params"])
    return StageSpec(name=name, **fields)


def pipeline(name: str, *stages: StageSpec, **fields: Any) -> PipelineSpec:
    """A pipeline of these stages after a first one, which takes the input."""
    return PipelineSpec(name=name, stages=[stage("first"), *stages], **fields)


DOCUMENTS = pipeline(
    "docs",
    stage("chunks", each="value.chunks", keep=["value.title"], row={"text": "item", "title": "value.title"}),
    stage("ask", prompt="About {kept.title}: {value.text}", keep=["kept.title"], params={"max_tokens": 4}),
    stage("perdoc", collect="parent", row={"q": "text", "title": "kept.title"}),
    stage("all", after="ask", collect=True, row="text"),
)
"""Every kind of feeding: fan-out, one to one, fan-in by parent, fan-in of all."""


def documents(count: int, *, chunks: int = 5, bad: int = 0) -> list[dict[str, Any]]:
    """`count` documents with 0..`chunks`-1 chunks each, in turn; each `bad`-th has none where they should be."""
    return [
        {
            "title": f"doc {i}",
            "chunks": None if bad and i % bad == bad - 1 else [f"chunk {i}.{k}" for k in range(i % chunks)],
        }
        for i in range(count)
    ]


def question(row: dict[str, Any], k: int) -> str:
    """What DOCUMENTS asks about a chunk."""
    return f"About {row['title']}: {row['chunks'][k]}"


def write(path: Path, rows: Iterable[Any]) -> Path:
    """The rows as a file, one a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


async def run(mesh: Mesh, spec: PipelineSpec, path: Path, **fields: Any) -> PipelineReceipt:
    """Run the pipeline on the rows of `path`, as the command does."""
    options = SubmitOptions(
        function=spec.stages[0].function, form="rows", pipeline=spec.name, stage=spec.stages[0].name
    )
    return await run_pipeline(mesh, Declared(spec=spec, input=path, options=options), **fields)


async def ended(mesh: Mesh, name: str, timeout_s: float = 60.0) -> PipelineStatus:
    """The status once every stage has ended."""

    async def look() -> PipelineStatus | None:
        with contextlib.suppress(NotFound, Unavailable):
            found = await pipeline_status(mesh, name)
            if found.state in ENDED:
                return found
        return None

    return await until(look, timeout_s)


async def values(mesh: Mesh, job: str) -> list[Any]:
    """What each ok row of a job returned, in the order of indices: a function's value, or a model's text."""
    of_job = f"WHERE job = '{job}' AND status = 'ok' ORDER BY \"index\""
    rows = await sql(
        mesh, f"SELECT value, coalesce(text, '') FROM current_outcomes {of_job}", max_rows=10_000
    )
    return [text if value is None else _value(value) for value, text in rows]


def _value(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value


async def assert_proved(mesh: Mesh, name: str, *, jobs: Iterable[str] = ()) -> PipelineAudit:
    """The audit balances, no index is doubled in any table, and nothing is left in the broker."""

    async def audited() -> PipelineAudit | None:
        with contextlib.suppress(Unavailable):
            return await pipeline_audit(mesh, name)
        return None

    audit = await until(audited, 60)
    assert audit.balanced, audit
    doubled = await sql(
        mesh, 'SELECT job, "index" FROM outcomes GROUP BY job, "index", generation HAVING count(*) > 1'
    )
    assert doubled == []
    for table, key in (("stage_feeds", "job, parent_index"), ("stage_arrivals", "job, parent_index"),
                       ("stage_members", 'job, "index"'), ("stage_kept", 'job, "index"')):  # fmt: skip
        found = await sql(mesh, f"SELECT {key} FROM {table} GROUP BY {key} HAVING count(*) > 1")
        assert found == [], table
    p = mesh.subjects.prefix
    for job in jobs or [s.job for s in audit.stages]:
        assert await jsapi.count_subject(mesh, mesh.topology.tasks, f"{p}.tasks.*.*.*.{job}") == 0
    return audit


async def assert_documents(mesh: Mesh, rows: list[dict[str, Any]], name: str = "docs") -> None:
    """DOCUMENTS ran over `rows`: each chunk once through each stage, and collected in the order of the input."""
    status = await ended(mesh, name, 120)
    bad = sum(row["chunks"] is None for row in rows)
    assert status.state == ("completed_with_errors" if bad else "completed"), status
    asked = [[question(row, k) for k in range(len(row["chunks"] or []))] for row in rows]
    chunks = sum(map(len, asked))
    assert [(s.submitted, s.ok, s.unfit, s.lost) for s in status.stages] == [
        (len(rows), len(rows), 0, 0), (chunks + bad, chunks, bad, 0), (chunks, chunks, 0, bad),
        (len(rows), len(rows), 0, 0), (1, 1, 0, 0),
    ]  # fmt: skip
    assert sorted(await values(mesh, f"{name}-ask")) == sorted(q for each in asked for q in each)
    assert await values(mesh, f"{name}-all") == [[q for each in asked for q in each]]
    wanted = [[{"q": q, "title": row["title"]} for q in each] for row, each in zip(rows, asked, strict=True)]
    assert await values(mesh, f"{name}-perdoc") == wanted
    await assert_proved(mesh, name)


async def answered(asked: Any) -> Any:
    """The answer, or False while a service or the broker is away."""
    try:
        return await asked
    except NotFound as e:
        if e.code == "unknown_function":
            return False
        raise
    except (Unavailable, HeadraceError) as e:
        if e.code in ("job_exists", "pipeline_cancelled", "invalid_pipeline"):
            raise
        return False
