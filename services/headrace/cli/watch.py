"""`headrace watch`: a job's progress, live, until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Job, Json, Url
from headrace.cli.output import print_json, say
from headrace.cli.status import print_status
from headrace.cli.target import run_on_mesh
from headrace.cli.watch_view import WatchView
from headrace.cli.watching import exit_of, follow
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.contracts.api import JobStatus
    from headrace.mesh.connection import Mesh


def watch(
    job: Job,
    *,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0, help="Give up after this many seconds (exit code 5).", show_default=False
        ),
    ] = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Watch a job until it ends: ok, failed, queued, running, landing, tokens/s, time left, stragglers.

    Exit code 0 if every item is ok, 3 if any is failed or dead, 4 if the job was cancelled or ended early (deadline,
    failure limit), 5 if --timeout came first. A job that ended long ago is answered at once. It outlives restarts of
    the services.
    """
    check_token("job", job)
    raise typer.Exit(
        run_on_mesh(folder, url, lambda mesh: watch_job(mesh, job, timeout_s=timeout, as_json=json))
    )


async def watch_job(mesh: Mesh, job: str, *, timeout_s: float | None = None, as_json: bool = False) -> Exit:
    """Show the job's progress on standard error and its end on standard output; return what the end means."""
    latest: list[JobStatus] = []
    with WatchView() as view:

        def show(status: JobStatus) -> None:
            latest[:] = [status]
            view.show(status)

        ended = await follow(mesh, job, show=show, trouble=view.note, timeout_s=timeout_s)
    found = ended or (latest[0] if latest else None)
    if found is not None:
        (print_json if as_json else print_status)(found)
    if ended is None:
        say(f"{job} had not ended after {timeout_s:g} s; it goes on")
        return Exit.TIMED_OUT
    return exit_of(ended)
