"""`headrace jobs`: the jobs of a mesh, newest first."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from headrace.cli.api import ask
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import JobsRequest, JobStatus
from headrace.contracts.errors import InvalidInput

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh


STATES = ("open", "sealed", "completed", "completed_with_errors", "cancelled")


class JobsReply(Struct, frozen=True, kw_only=True):
    """What the service answers."""

    jobs: list[JobStatus]


def jobs(
    *,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="How many at most.")] = 50,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            help=f"Only those in this state ({', '.join(STATES)}).",
        ),
    ] = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    if state is not None and state not in STATES:
        raise InvalidInput(f"state {state[:80]!r} is unknown: use one of {', '.join(STATES)}", field="state")
    request = JobsRequest(limit=limit, state=state)

    async def fetch(mesh: Mesh) -> JobsReply:
        return await ask(mesh, "jobs", request, JobsReply)

    found = run_on_mesh(folder, url, fetch).jobs
    if json:
        print_json(found)
        return
    columns = (
        "job",
        "state",
        "function",
        "submitted",
        "ok",
        "failed",
        "dead",
        "cancelled",
        "queued",
        "opened",
    )
    rows = [
        (
            j.job,
            j.state,
            j.function,
            j.submitted,
            j.ok,
            j.failed,
            j.dead,
            j.cancelled,
            j.queued,
            _when(j.opened_us),
        )
        for j in found
    ]
    print_table(columns, rows)


def _when(micros: int) -> str:
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S") if micros else ""
