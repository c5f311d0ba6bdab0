"""`headrace pipeline run|status|audit|list|cancel`: stages that feed one another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headrace.cli.api import ask
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Patience, Progress, Url
from headrace.cli.output import print_json, print_line, print_table, say, when_text
from headrace.cli.pipeline_view import PipelineView, print_pipeline, print_proof
from headrace.cli.submitting import SubmitProgress
from headrace.cli.target import connect, find_settings, run_async, run_on_mesh
from headrace.cli.watching import ENDED, follow_readings
from headrace.contracts.errors import HeadraceError
from headrace.contracts.names import check_token
from headrace.contracts.pipeline import (
    PipelineAudit,
    PipelineCancelRequest,
    PipelineRequest,
    PipelinesReply,
    PipelinesRequest,
    PipelineStatus,
)

if TYPE_CHECKING:
    from headrace.client.pipelines import Declared, PipelineReceipt
    from headrace.mesh.connection import Mesh
    from headrace.mesh.settings import Settings

AUDIT_S: Final = 120.0

app = typer.Typer(
    help="Stages that feed one another: each is a job, and its rows go on as they land, each exactly once.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Pipeline = Annotated[str, typer.Argument(help="Name of the pipeline.", show_default=False)]


@app.command(short_help="Open a pipeline and store its input")
def run(
    file: Annotated[Path, typer.Argument(help="The TOML file that declares it.", show_default=False)],
    *,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the pipeline [default: as the file says, or is called].",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input", help="The rows of the first stage, instead of the file's own.", show_default=False
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Take the good lines and report how many are bad.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it until every stage has ended.")] = False,
    patience: Patience = 60.0,
    progress: Progress = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Open the pipeline that FILE declares, store its input as the rows of the first stage, and exit.

    What the file says is checked whole first; an error names the stage and the field (2). Every stage's function must
    be registered. The same command again says what is there and goes on where an earlier one ended. With --wait it
    ends as `watch` does: 3 if any row of any stage is failed or dead, 4 if the pipeline was cancelled.
    """
    from headrace.client.pipelines import read_pipeline
    from headrace.client.problems import InvalidLines

    declared = read_pipeline(file, name=name, source=source)
    shown = SubmitProgress(wanted=progress)
    settings = find_settings(folder, url)
    again = f"run it again to go on: headrace pipeline run {file}"
    try:
        raise typer.Exit(
            run_async(_run(settings, declared, shown, skip_bad, patience, wait=wait, as_json=json))
        )
    except InvalidLines as e:
        for error in e.errors[:20]:
            say(f"line {error.line}{f', field {error.field}' if error.field else ''}: {error.error}")
        raise
    except KeyboardInterrupt:
        say(f"interrupted; {again}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    except HeadraceError:
        if shown.items:
            say(f"{shown.stored:,} of {shown.items:,} rows are known to be stored; {again}")
        raise


async def _run(
    settings: Settings,
    declared: Declared,
    shown: SubmitProgress,
    skip_bad: bool,
    patience_s: float,
    *,
    wait: bool,
    as_json: bool,
) -> Exit:
    from headrace.client.pipelines import run_pipeline

    async with await connect(settings, name="pipeline") as mesh:
        with shown:
            receipt = await run_pipeline(
                mesh, declared, skip_bad=skip_bad, patience_s=patience_s, on_progress=shown
            )
        _print_receipt(receipt, as_json=as_json and not wait, quiet=wait)
        return await _follow(mesh, receipt.pipeline, as_json=as_json) if wait else Exit.OK


def _print_receipt(receipt: PipelineReceipt, *, as_json: bool, quiet: bool) -> None:
    """The receipt on standard output; `quiet`: on standard error, since what is printed is the pipeline's end."""
    for note in receipt.notes:
        say(f"note: {note}")
    if as_json:
        keys = ("pipeline", "jobs", "submitted", "refused", "resumed_from")
        print_json({key: getattr(receipt, key) for key in keys})
        return
    resumed = f", {receipt.resumed_from:,} of them by an earlier run" if receipt.resumed_from else ""
    refused = f", {receipt.refused:,} lines refused" if receipt.refused else ""
    line = f"pipeline {receipt.pipeline}: {receipt.submitted:,} rows stored as {receipt.jobs[0]}{resumed}{refused}"
    (say if quiet else print_line)(line)


async def _follow(mesh: Mesh, pipeline: str, *, as_json: bool) -> Exit:
    with PipelineView() as view:
        ended = await follow_readings(
            lambda: _status(mesh, pipeline),
            lambda found: found.state in ENDED,
            show=view.show,
            trouble=view.note,
        )
    if ended is None:  # only with a time limit
        return Exit.TIMED_OUT
    if as_json:
        print_json(ended)
    else:
        print_pipeline(ended)
    if ended.state == "cancelled":
        return Exit.CANCELLED
    return Exit.ITEMS_FAILED if any(s.failed or s.dead for s in ended.stages) else Exit.OK


async def _status(mesh: Mesh, pipeline: str) -> PipelineStatus:
    return await ask(
        mesh, "pipeline.status", PipelineRequest(pipeline=pipeline), PipelineStatus, timeout_s=30.0
    )


@app.command(short_help="Where each stage stands")
def status(pipeline: Pipeline, *, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Show every stage: its rows by state, what waits to be fed to it, and what the stage before lost."""
    check_token("pipeline", pipeline)
    found = run_on_mesh(folder, url, lambda mesh: _status(mesh, pipeline))
    if json:
        print_json(found)
    else:
        print_pipeline(found)


@app.command(short_help="Prove every stage, and what fed it")
def audit(pipeline: Pipeline, *, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Prove the account of each stage's job, and that each row that landed fed the next stage exactly once.

    Exit code 1 unless every stage balances.
    """
    check_token("pipeline", pipeline)
    request = PipelineRequest(pipeline=pipeline)
    found = run_on_mesh(
        folder, url, lambda mesh: ask(mesh, "pipeline.audit", request, PipelineAudit, timeout_s=AUDIT_S)
    )
    if json:
        print_json(found)
    else:
        print_proof(found)
    if not found.balanced:
        raise typer.Exit(Exit.FAILED)


@app.command("list", short_help="The pipelines of a mesh, newest first")
def list_(
    *,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="How many at most.")] = 50,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List pipelines, newest first."""
    found = run_on_mesh(
        folder, url, lambda mesh: ask(mesh, "pipeline.list", PipelinesRequest(limit=limit), PipelinesReply)
    ).pipelines
    if json:
        print_json(found)
        return
    rows = [(p.pipeline, p.state, p.stages, when_text(p.opened_us)) for p in found]
    print_table(("pipeline", "state", "stages", "opened"), rows)


@app.command(short_help="End every stage, keep what is finished")
def cancel(
    pipeline: Pipeline,
    *,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the pipeline and its jobs.")] = "",
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Cancel every stage that has not ended: what waits is removed, what runs is aborted, what is finished is kept.

    Returns once that is durable; the mesh goes on with it.
    """
    check_token("pipeline", pipeline)
    request = PipelineCancelRequest(pipeline=pipeline, reason=reason)
    found = run_on_mesh(
        folder, url, lambda mesh: ask(mesh, "pipeline.cancel", request, PipelineStatus, timeout_s=60.0)
    )
    if json:
        print_json(found)
    else:
        print_pipeline(found)
