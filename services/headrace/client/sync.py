"""The Python API for code without an event loop: `Client`, which runs one in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from headrace.client.aio import AsyncClient
from headrace.client.inputs import SourceArgument
from headrace.client.submit import OnProgress, Receipt, SubmitOptions
from headrace.client.writers import ResultFormat
from headrace.contracts.api import (
    DeadEntry,
    JobAudit,
    JobStatus,
    QueryReply,
    RedriveReply,
    RetryReply,
    TenantAudit,
)
from headrace.contracts.messages import Result
from headrace.mesh.settings import Settings

T = TypeVar("T")


class Client:
    """`AsyncClient` with blocking calls. Use it as a context manager; it connects when it is made.

    An iterator asks for its next page when it is advanced. Calls may come from several threads.

    >>> def main() -> None:
    ...     with Client() as client:
    ...         receipt = client.submit("prompts.jsonl", job="nightly")
    ...         print(client.wait(receipt.job).ok)
    """

    def __init__(
        self,
        url: str | None = None,
        dir: str | Path | None = None,  # noqa: A002  (the name users know from --dir)
        *,
        settings: Settings | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(url, dir, settings=settings)
        try:
            self._run(self._client.connect())
        except BaseException:
            self._stop()
            raise

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller's thread must end the work too
            raise

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def advance() -> list[T]:
            async for item in items:
                return [item]
            return []

        while found := self._run(advance()):
            yield found[0]

    def close(self) -> None:
        """Close the connection and end the thread; safe to call twice."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        source: SourceArgument,
        *,
        job: str | None = None,
        on_progress: OnProgress | None = None,
        options: SubmitOptions | None = None,
        **fields: Any,
    ) -> Receipt:
        """As `AsyncClient.submit`."""
        return self._run(
            self._client.submit(source, job=job, on_progress=on_progress, options=options, **fields)
        )

    def status(self, job: str) -> JobStatus:
        """How the job stands."""
        return self._run(self._client.status(job))

    def watch(self, job: str, *, poll_s: float = 1.0) -> Iterator[JobStatus]:
        """The job's status again and again, until it has ended."""
        return self._iterate(self._client.watch(job, poll_s=poll_s))

    def wait(self, job: str, *, timeout_s: float | None = None) -> JobStatus:
        """The job's last status once it has ended; `Unavailable` with code `timeout` after `timeout_s`."""
        return self._run(self._client.wait(job, timeout_s=timeout_s))

    def results(self, job: str, *, after: int = -1) -> Iterator[Result]:
        """The outcomes that have landed, in the order of indices, from `after` + 1 on."""
        return self._iterate(self._client.results(job, after=after))

    def result(self, job: str, index: int, *, wait_s: float = 0.0) -> Result:
        """The outcome of one item."""
        return self._run(self._client.result(job, index, wait_s=wait_s))

    def write_results(
        self,
        job: str,
        out: str | Path,
        *,
        format: ResultFormat = "jsonl",  # noqa: A002  (the name users know from --format)
    ) -> int:
        """Write the outcomes that have landed to a file (`-`: standard output); return how many."""
        return self._run(self._client.write_results(job, out, format=format))

    def cancel(self, job: str, *, reason: str = "") -> JobStatus:
        """Cancel the job; what has finished stays."""
        return self._run(self._client.cancel(job, reason=reason))

    def retry(self, job: str, *, where: str = "") -> RetryReply:
        """Run the failed and dead items of an ended job again: all, or those whose outcome fits `where` (SQL)."""
        return self._run(self._client.retry(job, where=where))

    def dead(self, *, job: str | None = None) -> Iterator[DeadEntry]:
        """What was given up, newest first: items whose tries are exhausted, and dead letters."""
        return self._iterate(self._client.dead(job=job))

    def redrive(
        self,
        dead_id: str | None = None,
        *,
        job: str | None = None,
        again: bool = False,
    ) -> RedriveReply:
        """Let one dead thing, by its id, or all of a job go its way once more."""
        return self._run(self._client.redrive(dead_id, job=job, again=again))

    def audit(self, job: str) -> JobAudit:
        """The job's accounting with its proof."""
        return self._run(self._client.audit(job))

    def audit_all(self) -> TenantAudit:
        """The account of all jobs together."""
        return self._run(self._client.audit_all())

    def jobs(self, *, limit: int = 50, state: str | None = None) -> list[JobStatus]:
        """The newest jobs."""
        return self._run(self._client.jobs(limit=limit, state=state))

    def query(self, sql: str, *, max_rows: int = 1_000) -> QueryReply:
        """One read-only SQL statement over the data plane."""
        return self._run(self._client.query(sql, max_rows=max_rows))
