"""How a job stands: once, as a stream until it ends, or awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.contracts.api import (
    AuditRequest,
    CancelRequest,
    JobAudit,
    JobRequest,
    JobsRequest,
    JobStatus,
    QueryReply,
    QueryRequest,
    TenantAudit,
)
from headrace.contracts.errors import NotFound, Unavailable
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api

ENDED: Final = frozenset({"completed", "completed_with_errors", "cancelled"})
"""The states that a job does not leave."""

_FIRST_POLL_S: Final = 0.1
_LAST_POLL_S: Final = 1.0
_status = msgspec.json.Decoder(JobStatus)
_audit = msgspec.json.Decoder(JobAudit)
_tenant = msgspec.json.Decoder(TenantAudit)
_query = msgspec.json.Decoder(QueryReply)
_jobs = msgspec.json.Decoder(dict[str, list[JobStatus]])


async def status(mesh: Mesh, job: str) -> JobStatus:
    """The job's status; raise `NotFound`, or `Unavailable` if the completion service does not answer."""
    return _status.decode(await call_api(mesh, "status", JobRequest(job=job)))


async def audit(mesh: Mesh, job: str, *, timeout_s: float = 30.0) -> JobAudit:
    """The job's status with its proof from three sources. It may take seconds, and is bounded by `timeout_s`."""
    return _audit.decode(await call_api(mesh, "audit", AuditRequest(job=job), timeout_s=timeout_s))


async def audit_all(mesh: Mesh, *, timeout_s: float = 30.0) -> TenantAudit:
    """The account of all jobs together, with the names of those that do not balance."""
    return _tenant.decode(await call_api(mesh, "audit", AuditRequest(), timeout_s=timeout_s))


async def cancel(mesh: Mesh, job: str, *, reason: str = "") -> JobStatus:
    """Cancel a job: waiting items go, running ones are aborted, finished ones stay. Return its status then."""
    reply = await call_api(mesh, "cancel", CancelRequest(job=job, reason=reason), timeout_s=30.0)
    return _status.decode(reply)


async def query(mesh: Mesh, sql: str, *, max_rows: int = 1_000, timeout_s: float = 30.0) -> QueryReply:
    """Run one read-only statement over the data plane; rows and time are bounded by the service too."""
    return _query.decode(
        await call_api(mesh, "query", QueryRequest(sql=sql, max_rows=max_rows), timeout_s=timeout_s)
    )


async def jobs(mesh: Mesh, *, limit: int = 50, state: str | None = None) -> list[JobStatus]:
    """The newest jobs, newest first."""
    return _jobs.decode(await call_api(mesh, "jobs", JobsRequest(limit=limit, state=state)))["jobs"]


async def watch(
    mesh: Mesh, job: str, *, poll_s: float = _LAST_POLL_S, patience_s: float = 60.0
) -> AsyncIterator[JobStatus]:
    """Yield the job's status until it has ended, that last one included.

    It asks soon at first and every `poll_s` seconds later. Nobody answering, or a job that completion has not
    heard of yet, is borne for `patience_s`; then `Unavailable` or `NotFound` is raised.
    """
    clock = asyncio.get_running_loop().time
    heard, wait = clock(), min(_FIRST_POLL_S, poll_s)
    while True:
        try:
            found = await status(mesh, job)
        except (Unavailable, NotFound) as e:
            # A job that was just opened is known to the broker a moment before it is to completion.
            limit = min(patience_s, 5.0) if isinstance(e, NotFound) else patience_s
            if clock() - heard >= limit or mesh.closed.is_set():
                raise
        else:
            heard = clock()
            yield found
            if found.state in ENDED:
                return
        await asyncio.sleep(wait)
        wait = min(poll_s, wait * 1.5)


async def wait_for_job(
    mesh: Mesh, job: str, *, timeout_s: float | None = None, patience_s: float = 60.0
) -> JobStatus:
    """The job's last status, once it has ended; `Unavailable` (code `timeout`) with how it stands after `timeout_s`."""
    last: JobStatus | None = None
    try:
        async with asyncio.timeout(timeout_s):
            async for found in watch(mesh, job, patience_s=patience_s):
                last = found
    except TimeoutError:
        so_far = f"{last.state}, {last.ok:,} of {last.submitted:,} ok" if last else "unknown"
        msg = f"job {job} has not ended within {timeout_s:g} s: it is {so_far}"
        raise Unavailable(msg, code="timeout") from None
    if last is None:  # watch yields at least once, or raises
        msg = f"job {job} has no status"
        raise NotFound(msg)
    return last
