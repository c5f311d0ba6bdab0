"""The Python API for async code: `AsyncClient`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from headrace.client import results as results_
from headrace.client import retries as retries_
from headrace.client import status as status_
from headrace.client.inputs import SourceArgument
from headrace.client.submit import OnProgress, Receipt, SubmitOptions, submit
from headrace.client.writers import ResultFormat, write_results
from headrace.contracts.api import (
    DeadEntry,
    JobAudit,
    JobStatus,
    QueryReply,
    RedriveReply,
    RetryReply,
    TenantAudit,
)
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import Result
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings, load_settings


class AsyncClient:
    """A producer's connection to a mesh. Use it as an async context manager.

    It finds the mesh as the command does: `url`, else `HEADRACE_NATS_URL`, else the folder `dir`, else `./.headrace`.
    `settings`, where given, are taken as they are. Errors are those of `headrace.contracts.errors`.

    >>> async def main() -> None:
    ...     async with AsyncClient() as client:
    ...         receipt = await client.submit(["What is a headrace?"], job="first")
    ...         await client.wait(receipt.job)
    ...         async for result in client.results(receipt.job):
    ...             print(result.choices[0].text)
    """

    def __init__(
        self,
        url: str | None = None,
        dir: str | Path | None = None,  # noqa: A002  (the name users know from --dir)
        *,
        settings: Settings | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._settings = settings
        self._url = url
        self._dir = dir
        self._mesh = mesh
        self._owned = mesh is None

    async def connect(self) -> Self:
        """Connect; raise `NotFound` if there is no mesh here, `Unavailable` if it does not answer."""
        if self._mesh is None:
            settings = self._settings or load_settings(self._dir, {"url": self._url})
            self._mesh = await Mesh.connect(settings, name="client")
        return self

    async def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._mesh is not None and self._owned:
            await self._mesh.close()
            self._mesh = None

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def mesh(self) -> Mesh:
        """The connection."""
        if self._mesh is None:
            msg = "the client is not connected: use it as a context manager, or call connect()"
            raise InvalidInput(msg, code="not_connected")
        return self._mesh

    async def submit(
        self,
        source: SourceArgument,
        *,
        job: str | None = None,
        on_progress: OnProgress | None = None,
        options: SubmitOptions | None = None,
        **fields: Any,
    ) -> Receipt:
        """Store every line of `source` (a path, `-`, or an iterable of dicts and prompts) durably.

        `fields` are those of `SubmitOptions`. See `headrace.client.submit.submit` for what it raises.
        """
        return await submit(
            self.mesh, source, job=job, options=make_options(options, fields), on_progress=on_progress
        )

    async def status(self, job: str) -> JobStatus:
        """How the job stands."""
        return await status_.status(self.mesh, job)

    def watch(self, job: str, *, poll_s: float = 1.0) -> AsyncIterator[JobStatus]:
        """The job's status again and again, until it has ended."""
        return status_.watch(self.mesh, job, poll_s=poll_s)

    async def wait(self, job: str, *, timeout_s: float | None = None) -> JobStatus:
        """The job's last status once it has ended; `Unavailable` with code `timeout` after `timeout_s`."""
        return await status_.wait_for_job(self.mesh, job, timeout_s=timeout_s)

    def results(self, job: str, *, after: int = -1) -> AsyncIterator[Result]:
        """The outcomes that have landed, in the order of indices, from `after` + 1 on."""
        return results_.results(self.mesh, job, after=after)

    async def result(self, job: str, index: int, *, wait_s: float = 0.0) -> Result:
        """The outcome of one item."""
        return await results_.result(self.mesh, job, index, wait_s=wait_s)

    async def write_results(
        self,
        job: str,
        out: str | Path,
        *,
        format: ResultFormat = "jsonl",  # noqa: A002  (the name users know from --format)
    ) -> int:
        """Write the outcomes that have landed to a file (`-`: standard output); return how many."""
        return await write_results(results_.pages(self.mesh, job), format, out)

    async def cancel(self, job: str, *, reason: str = "") -> JobStatus:
        """Cancel the job; what has finished stays."""
        return await status_.cancel(self.mesh, job, reason=reason)

    async def retry(self, job: str, *, where: str = "") -> RetryReply:
        """Run the failed and dead items of an ended job again: all, or those whose outcome fits `where` (SQL)."""
        return await retries_.retry(self.mesh, job, where=where)

    def dead(self, *, job: str | None = None) -> AsyncIterator[DeadEntry]:
        """What was given up, newest first: items whose tries are exhausted, and dead letters."""
        return retries_.dead(self.mesh, job=job)

    async def redrive(
        self,
        dead_id: str | None = None,
        *,
        job: str | None = None,
        again: bool = False,
    ) -> RedriveReply:
        """Let one dead thing, by its id, or all of a job go its way once more."""
        return await retries_.redrive(self.mesh, dead_id, job=job, again=again)

    async def audit(self, job: str) -> JobAudit:
        """The job's accounting with its proof."""
        return await status_.audit(self.mesh, job)

    async def audit_all(self) -> TenantAudit:
        """The account of all jobs together."""
        return await status_.audit_all(self.mesh)

    async def jobs(self, *, limit: int = 50, state: str | None = None) -> list[JobStatus]:
        """The newest jobs."""
        return await status_.jobs(self.mesh, limit=limit, state=state)

    async def query(self, sql: str, *, max_rows: int = 1_000) -> QueryReply:
        """One read-only SQL statement over the data plane."""
        return await status_.query(self.mesh, sql, max_rows=max_rows)


def make_options(options: SubmitOptions | None, fields: dict[str, Any]) -> SubmitOptions:
    """`options` with `fields` set; raise `InvalidInput` for a name that does not exist."""
    known = SubmitOptions.__struct_fields__
    for name in fields:
        if name not in known:
            msg = f"submit has no option {name!r}: known are {', '.join(known)}"
            raise InvalidInput(msg, field=name)
    base = options or SubmitOptions()
    return SubmitOptions(**{name: getattr(base, name) for name in known} | fields)
