"""`headrace retry`: run what failed of an ended job again, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from headrace.cli.options import Dir, Job, Json, Url
from headrace.cli.output import print_json, print_line, say
from headrace.cli.status import job_status
from headrace.cli.target import run_on_mesh
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.contracts.api import RetryReply
    from headrace.mesh.connection import Mesh

LONGEST_WHERE: Final = 2_048


def retry(
    job: Job,
    *,
    where: Annotated[
        str,
        typer.Option(
            "--where",
            help="Only items whose outcome fits: a condition in SQL over the columns of outcomes, as "
            "\"error_type = 'tries_exhausted' AND attempt > 3\".",
        ),
    ] = "",
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Run the failed and dead items of an ended job again, as its next generation.

    Their new outcomes stand beside the old ones (`generation` tells them apart), and the latest of each item counts.
    Items that are ok do not run again. The job is `sealed` until it ends anew: `headrace watch` follows it. A job
    that still runs, or was cancelled, is refused. If nothing fits, nothing is changed, and that is no error.
    """
    check_token("job", job)
    if len(where) > LONGEST_WHERE:
        raise InvalidInput(f"--where has {len(where):,} characters: {LONGEST_WHERE:,} at most", field="where")
    found = run_on_mesh(folder, url, lambda mesh: _retry(mesh, job, where))
    if json:
        print_json({"job": job, "generation": found.generation, "resubmitted": found.resubmitted})
    elif found.resubmitted:
        print_line(f"{job}: {found.resubmitted:,} items run again as generation {found.generation}")
    if not found.resubmitted:
        fits = " that fits" if where.strip() else ""
        say(f"{job} has no failed or dead item{fits}: nothing runs again")
    if found.left_out:
        say(
            f"{found.left_out:,} items cannot run again, since their task was too large to be kept with their outcome: "
            "submit them as another job"
        )


async def _retry(mesh: Mesh, job: str, where: str) -> RetryReply:
    from headrace.client.retries import retry as retry_job

    await job_status(mesh, job)  # says which service does not answer
    return await retry_job(mesh, job, where=where)
