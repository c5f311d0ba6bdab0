"""`headrace cancel`: end a job. Waiting items are removed, running ones aborted, finished ones kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.api import ask
from headrace.cli.options import Dir, Job, Json, Url
from headrace.cli.output import print_json, print_line
from headrace.cli.status import job_status
from headrace.cli.target import run_on_mesh
from headrace.cli.watching import ENDED
from headrace.contracts.api import CancelRequest, JobStatus
from headrace.contracts.errors import Unavailable
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh


def cancel(
    job: Job,
    *,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the job.")] = "",
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait until every item is accounted for.")
    ] = 10.0,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Cancel a job: what waits is removed, what runs is aborted, what is finished is kept.

    Returns once the job has ended, or once the cancellation is accepted and `--wait` is over (the mesh goes
    on with it). A job that had ended before is left as it is, and said to be.
    """
    check_token("job", job)
    found = run_on_mesh(folder, url, lambda mesh: _cancel(mesh, job, reason, wait))
    kept = found.ok + found.failed + found.dead
    if json:
        print_json({"job": job, "state": found.state, "kept": kept, "cancelled": found.cancelled,
                    "pending": found.submitted - kept - found.cancelled})  # fmt: skip
    elif found.state == "cancelled":
        print_line(f"{job} is cancelled: {kept:,} items kept, {found.cancelled:,} cancelled")
    elif found.state in ENDED:
        print_line(f"{job} had ended before ({found.state}): {kept:,} items kept, nothing cancelled")
    else:
        print_line(
            f"{job}: the cancellation is accepted; {kept:,} items kept, {found.cancelled:,} cancelled so far"
        )


async def _cancel(mesh: Mesh, job: str, reason: str, wait_s: float) -> JobStatus:
    deadline = time.monotonic() + wait_s
    await ask(mesh, "cancel", CancelRequest(job=job, reason=reason), dict[str, Any], timeout_s=30.0)
    found = await job_status(mesh, job)
    while found.state not in ENDED and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        with contextlib.suppress(Unavailable):
            found = await job_status(mesh, job)
    return found
