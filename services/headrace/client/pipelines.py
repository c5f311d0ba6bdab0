"""Pipelines from a file: read, checked whole, opened, and the input of the first stage submitted.

Running the same file again goes on where an earlier run ended, however it ended.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from headrace.client.formats import Form
from headrace.client.inputs import InputFormat
from headrace.client.options import OnProgress, Receipt, SubmitOptions
from headrace.client.policies import deadline_us
from headrace.client.submit import submit
from headrace.contracts.errors import Conflict, InvalidInput, NotFound, Unavailable
from headrace.contracts.generation import DEFAULT_GENERATION
from headrace.contracts.names import Lane, Token, check_token
from headrace.contracts.pipeline import (
    MAX_STAGES,
    PipelineAudit,
    PipelineCancelRequest,
    PipelineEntry,
    PipelineOpenReply,
    PipelineOpenRequest,
    PipelineRequest,
    PipelineSpec,
    PipelinesReply,
    PipelinesRequest,
    PipelineStatus,
    StageSpec,
)
from headrace.contracts.pipeline_checks import check_pipeline
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.microservice import call_api

MAX_FILE: Final = 1 << 20
ASK_AGAIN_S: Final = 8.0
"""A service that dies with a request leaves no sign of it: it is asked again after this time."""
T = TypeVar("T")


class PipelineFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file declares. `input` is relative to the file; `form`, `format` and the columns are those of a submit."""

    stage: Annotated[list[StageSpec], Meta(min_length=1, max_length=MAX_STAGES)]
    name: Token | None = None
    lane: Lane = Lane.NORMAL
    deadline: Annotated[str, Meta(max_length=64)] | None = None
    input: Annotated[str, Meta(min_length=1, max_length=4_096)] | None = None
    form: Form = "rows"
    format: InputFormat = "auto"
    column: str | None = None
    id_column: str | None = None


class Declared(Struct, frozen=True, kw_only=True):
    """A pipeline that was read: its stages, its input, and how to read that."""

    spec: PipelineSpec
    input: Path
    options: SubmitOptions


class PipelineReceipt(Struct, frozen=True, kw_only=True):
    """What a run achieved: the pipeline is open, `submitted` lines are stored as the rows of its first stage.

    `resumed_from` is how many an earlier run had stored. `jobs` are those of the stages, in order.
    """

    pipeline: str
    jobs: list[str]
    submitted: int
    resumed_from: int = 0
    refused: int = 0
    notes: list[str] = []


def read_pipeline(path: Path, *, name: str | None = None, source: Path | None = None) -> Declared:
    """The pipeline that a TOML file declares; `name` and `source` go before what it says itself.

    Raise `NotFound`, or `InvalidInput` naming the stage and the field that is wrong.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {path}", code="no_file")
    if path.stat().st_size > MAX_FILE:
        raise InvalidInput(f"{path.name} has more than {MAX_FILE:,} bytes: it is no pipeline")
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidInput(f"{path.name} is no TOML: {e}", code="invalid_pipeline") from None
    try:
        found = msgspec.convert(table, PipelineFile)
    except msgspec.ValidationError as e:
        raise _explained(e, table) from None
    given = source or (None if found.input is None else path.parent / found.input)
    if given is None:
        raise InvalidInput("input: which file has the rows of the first stage?", field="input")
    own = check_token("pipeline", name or found.name or path.stem)
    spec = PipelineSpec(name=own, stages=found.stage, lane=found.lane, deadline=found.deadline)
    check_pipeline(spec)
    if found.deadline is not None:
        deadline_us(found.deadline)
    first = spec.stages[0]
    plain = asdict(DEFAULT_GENERATION)
    params = {k: v for k, v in asdict(first.params).items() if v != plain[k]}
    options = SubmitOptions(
        function=first.function,
        lane=spec.lane_of(first),
        form=found.form,
        input_format=found.format,
        column=found.column,
        id_column=found.id_column,
        defaults=params,
        max_failed=first.max_failed,
        pipeline=spec.name,
        stage=first.name,
    )
    return Declared(spec=spec, input=given, options=options)


def _explained(error: msgspec.ValidationError, table: dict[str, Any]) -> InvalidInput:
    """The error with the stage by its name, where it has one."""
    what, _, path = str(error).partition(" - at `")
    path = path.removesuffix("`").removeprefix("$").removeprefix(".")
    if not path.startswith("stage["):
        return InvalidInput(f"{path or 'the file'}: {what}", field=path or None, code="invalid_pipeline")
    number, _, inside = path.removeprefix("stage[").partition("]")
    field = inside.removeprefix(".")
    stages = table.get("stage")
    name = number
    if number.isdecimal() and isinstance(stages, list):
        stage = cast("list[Any]", stages)[int(number)]
        if isinstance(stage, dict) and isinstance(given := cast("dict[str, Any]", stage).get("name"), str):
            name = given[:128]
    where = f"stage {name}" + (f", {field}" if field else "")
    return InvalidInput(
        f"{where}: {what}", field=f"stage.{name}.{field}".rstrip("."), code="invalid_pipeline"
    )


async def run_pipeline(
    mesh: Mesh,
    declared: Declared,
    *,
    skip_bad: bool = False,
    patience_s: float = 60.0,
    on_progress: OnProgress | None = None,
) -> PipelineReceipt:
    """Open the pipeline unless it is, and store its input unless it is; return once that is durable.

    Raise `NotFound` (a stage's function is not registered), `Conflict` (another pipeline, or a job, has the name; it
    was cancelled), and what a submit raises.
    """
    spec = declared.spec
    if not declared.input.exists():
        raise NotFound(f"input: there is no file {declared.input}", code="no_file")
    wanted = None if spec.deadline is None else deadline_us(spec.deadline)
    request = PipelineOpenRequest(spec=spec, deadline_us=wanted, tenant=mesh.settings.tenant)
    opened = await _patiently(
        mesh, lambda: _ask(mesh, "open", request, PipelineOpenReply, timeout_s=ASK_AGAIN_S), patience_s
    )
    if opened.state == "cancelled":
        raise Conflict(
            f"pipeline {spec.name} was cancelled: run it under another name", code="pipeline_cancelled"
        )
    options = replace(declared.options, skip_bad=skip_bad, patience_s=patience_s)
    if opened.deadline_us is not None:
        options = replace(options, deadline=datetime.fromtimestamp(opened.deadline_us / 1e6, UTC))
    receipt: Receipt = await submit(
        mesh, declared.input, job=opened.jobs[0], options=options, on_progress=on_progress
    )
    return PipelineReceipt(
        pipeline=spec.name,
        jobs=opened.jobs,
        submitted=receipt.submitted,
        resumed_from=receipt.resumed_from,
        refused=receipt.refused,
        notes=receipt.notes,
    )


async def pipeline_status(mesh: Mesh, pipeline: str) -> PipelineStatus:
    """Every stage with its counts."""
    return await _ask(mesh, "status", PipelineRequest(pipeline=pipeline), PipelineStatus)


async def pipeline_audit(mesh: Mesh, pipeline: str, *, timeout_s: float = 120.0) -> PipelineAudit:
    """Every stage with its proof."""
    return await _ask(mesh, "audit", PipelineRequest(pipeline=pipeline), PipelineAudit, timeout_s=timeout_s)


async def pipeline_list(mesh: Mesh, *, limit: int = 50) -> list[PipelineEntry]:
    """Pipelines, newest first."""
    return (await _ask(mesh, "list", PipelinesRequest(limit=limit), PipelinesReply)).pipelines


async def pipeline_cancel(
    mesh: Mesh, pipeline: str, *, reason: str = "", timeout_s: float = 60.0
) -> PipelineStatus:
    """Cancel every stage that has not ended; finished rows are kept."""
    request = PipelineCancelRequest(pipeline=pipeline, reason=reason)
    return await _ask(mesh, "cancel", request, PipelineStatus, timeout_s=timeout_s)


async def _ask(mesh: Mesh, name: str, request: Struct, reply: type[T], *, timeout_s: float = 30.0) -> T:
    return msgspec.json.decode(
        await call_api(mesh, f"pipeline.{name}", request, timeout_s=timeout_s), type=reply
    )


async def _patiently(mesh: Mesh, ask: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """The answer to what is safe to ask again; asked again while the service does not answer."""
    clock = asyncio.get_running_loop().time
    until, attempt = clock() + patience_s, 0
    while True:
        try:
            return await ask()
        except Unavailable:
            if clock() >= until or mesh.closed.is_set():
                raise
        await asyncio.sleep(min(backoff_s(attempt, base=0.1), max(0.0, until - clock())))
        attempt += 1
