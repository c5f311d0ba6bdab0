"""`headrace results`: the outcomes of a job in the order of its input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Dir, Job, Url
from headrace.cli.output import say
from headrace.cli.status import job_status
from headrace.cli.target import run_on_mesh
from headrace.cli.watching import ENDED, terminal_items
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.client.writers import ResultFormat
    from headrace.contracts.api import JobStatus
    from headrace.mesh.connection import Mesh

FORMATS = ("jsonl", "openai", "parquet")


def results(
    job: Job,
    *,
    format: Annotated[  # noqa: A002  (the name of the flag)
        str, typer.Option("--format", help="jsonl, openai (the Batch API's output file) or parquet.")
    ] = "jsonl",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File to write [default: standard output, but for parquet].", show_default=False
        ),
    ] = None,
    folder: Dir = None,
    url: Url = None,
) -> None:
    """Write the outcomes that have landed, in index order, whatever their state.

    jsonl has index, custom_id, status, output, finish_reason, usage, error, attempt and model. A job that has
    not ended gives what there is so far, and says so on standard error.
    """
    check_token("job", job)
    if format not in FORMATS:
        raise InvalidInput(
            f"format {format[:80]!r} is unknown: use one of {', '.join(FORMATS)}", field="format"
        )
    if format == "parquet" and out is None:
        raise InvalidInput("--format parquet needs --out FILE", field="out")
    written, status = run_on_mesh(folder, url, lambda mesh: _write(mesh, job, format, out))
    if out is not None and str(out) != "-":
        say(f"{written:,} results of {job} in {out}")
    if status.cause not in (None, "requested"):
        say(f"{job} was ended before all its items ran: {status.reason}")
    if status.state not in ENDED:
        say(
            f"{job} has not ended ({status.state}): {terminal_items(status):,} of {status.submitted:,} have landed"
        )


async def _write(mesh: Mesh, job: str, form: ResultFormat, out: Path | None) -> tuple[int, JobStatus]:
    from headrace.client.results import pages
    from headrace.client.writers import write_results

    status = await job_status(mesh, job)
    return await write_results(pages(mesh, job), form, out or "-"), status
