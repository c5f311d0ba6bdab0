"""`headrace status`: where a job stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.cli.api import ask
from headrace.cli.options import Dir, Job, Json, Url
from headrace.cli.output import clock_text, print_json, print_table, when_text
from headrace.cli.target import run_on_mesh
from headrace.contracts.api import AuditRequest, JobAudit, JobRequest, JobStatus
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


async def job_status(mesh: Mesh, job: str) -> JobStatus:
    """The service's account of a job."""
    return await ask(mesh, "status", JobRequest(job=job), JobStatus)


async def job_audit(mesh: Mesh, job: str, *, timeout_s: float = 30.0) -> JobAudit:
    """The service's audit of a job; it reads its sources again until a difference is settled or stands."""
    return await ask(mesh, "audit", AuditRequest(job=job), JobAudit, timeout_s=timeout_s)


def print_status(found: JobStatus) -> None:
    """The account as a table on standard output."""
    rows: list[tuple[str, object]] = [("state", found.state)]
    if found.cause and found.cause != "requested":
        rows.append(("ended by", found.cause))
    if found.reason:
        rows.append(("reason", found.reason))
    if found.function:
        rows.append(("function", found.function))
    if found.model:
        rows.append(("model", found.model))
    if found.generation > 1:
        rows.append(("generation", found.generation))
    rows += [(name, getattr(found, name)) for name in COUNTS]
    rows += [("tokens in", found.tokens_in), ("tokens out", found.tokens_out)]
    if found.deadline_us:
        rows.append(("deadline", when_text(found.deadline_us)))
    if found.ended_us and found.opened_us:
        rows.append(("took", clock_text((found.ended_us - found.opened_us) / 1e6)))
    print_table(("job", found.job), rows)
