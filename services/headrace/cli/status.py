"""`headrace status` and `headrace audit`: where a job stands, and the proof of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from headrace.cli.api import ask
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Job, Json, Url
from headrace.cli.output import clock_text, print_json, print_table
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import JobAudit, JobRequest, JobStatus
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

COUNTS = ("submitted", "ok", "failed", "dead", "cancelled", "queued", "landing", "running", "duplicates")


def status(job: Job, *, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Show where a job stands: its state, its items by state, tokens in and out."""
    check_token("job", job)
    found = run_on_mesh(folder, url, lambda mesh: job_status(mesh, job))
    if json:
        print_json(found)
    else:
        print_status(found)


def audit(job: Job, *, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Prove the account of a job from three sources: the producer's manifest, the broker, the data plane.

    Balanced means submitted = ok + failed + dead + cancelled + queued + landing. Exit code 1 if it is not.
    """
    check_token("job", job)
    found = run_on_mesh(folder, url, lambda mesh: job_audit(mesh, job))
    if json:
        print_json(found)
    else:
        print_audit(found)
    if not found.balanced:
        raise typer.Exit(Exit.FAILED)


async def job_status(mesh: Mesh, job: str) -> JobStatus:
    """The service's account of a job."""
    return await ask(mesh, "status", JobRequest(job=job), JobStatus)


async def job_audit(mesh: Mesh, job: str) -> JobAudit:
    """The service's audit of a job; it reads its sources again until a difference is settled or stands."""
    return await ask(mesh, "audit", JobRequest(job=job), JobAudit, timeout_s=30.0)


def print_status(found: JobStatus) -> None:
    """The account as a table on standard output."""
    rows: list[tuple[str, object]] = [("state", found.state)]
    if found.function:
        rows.append(("function", found.function))
    if found.model:
        rows.append(("model", found.model))
    rows += [(name, getattr(found, name)) for name in COUNTS]
    rows += [("tokens in", found.tokens_in), ("tokens out", found.tokens_out)]
    if found.ended_us and found.opened_us:
        rows.append(("took", clock_text((found.ended_us - found.opened_us) / 1e6)))
    print_table(("job", found.job), rows)


def print_audit(found: JobAudit) -> None:
    """The account, its sources and its verdict on standard output."""
    print_status(found)
    sources = found.sources
    print_table(
        ("source", "says", "value"),
        [
            ("manifest", "stored", sources.manifest_stored),
            ("manifest", "closed", sources.manifest_closed or "open"),
            ("broker", "tasks", sources.tasks_in_broker),
            ("broker", "results", sources.results_in_broker),
            ("data plane", "rows landed", sources.rows_landed),
            ("data plane", "distinct indices", sources.distinct_indices),
        ],
    )
    missing = ", ".join(
        f"{first}-{last}" if first != last else f"{first}" for first, last in found.missing[:20]
    )
    verdict = "balanced" if found.balanced else "NOT balanced"
    print_table(("audit", verdict), [("missing", missing or "none")])
