"""The completion service: what it starts, what it serves, and the order in which it stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from headrace.completion.accounting import Accounting
from headrace.completion.announce import Announcer
from headrace.completion.blobs import Blobs
from headrace.completion.cancel import Canceller
from headrace.completion.capture import Captures
from headrace.completion.dead import DeadLetters
from headrace.completion.follower import Follower
from headrace.completion.jobs import Jobs
from headrace.completion.landing import Landing
from headrace.completion.pipeline_api import serve_pipelines
from headrace.completion.pipelines import Pipelines
from headrace.completion.policy import Policies
from headrace.completion.projection import Projection
from headrace.completion.query import Queries
from headrace.completion.results import Results
from headrace.completion.retry import Retrier
from headrace.completion.retry_api import serve_retries
from headrace.completion.selfcheck import SelfCheck
from headrace.completion.sources import SourceReader
from headrace.completion.store import Store
from headrace.contracts.api import (
    AuditRequest,
    CancelRequest,
    ChecksRequest,
    JobRequest,
    JobsRequest,
    JobStatus,
    LossesRequest,
    QueryRequest,
    ResultPartRequest,
    ResultRequest,
    ResultsRequest,
)
from headrace.mesh.checks.start import check_start
from headrace.mesh.jsapi import consumer_info
from headrace.mesh.microservice import ApiServer
from headrace.mesh.service import Service
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Settler

log = logging.getLogger("headrace.completion")

DATABASE = "data/headrace.duckdb"
REPLY_MARGIN_BYTES = 1_024


def database_path(settings: Settings) -> Path:
    """The DuckDB file: as set, else `data/headrace.duckdb` in the mesh's folder."""
    return Path(settings.completion.database or Path(settings.dir) / DATABASE)


class CompletionService(Service):
    """Lands results, keeps the states of jobs, answers who asks.

    A stop goes in this order:

    1. no more is pulled; what is in hand is landed and acked (requests are still answered meanwhile)
    2. no more requests are taken, those in hand are answered
    3. cancellations, retries and the feeding of stages are left where they are: the next start takes them up
    4. queries are interrupted, DuckDB is closed with a checkpoint
    5. the connection is closed
    """

    name = "completion"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._loops: list[asyncio.Task[Any]] = []
        self._parts: list[Landing | Follower] = []
        self._store: Store | None = None
        self._checks: SelfCheck | None = None
        self._queries: Queries | None = None
        self._server: ApiServer | None = None

    async def on_start(self) -> None:
        """Open the file, take up what a crash left out, then pull and serve.

        Raise `Conflict` if another process has the file, `NotFound` if the streams are not provisioned.
        """
        await check_start(self.mesh, [spec.name for spec in self.mesh.topology.streams()])
        for spec in self.mesh.topology.completion_consumers():
            await consumer_info(self.mesh, spec.stream, spec.durable)
        options = self.settings.completion
        store = Store(database_path(self.settings), memory_limit=options.memory_limit)
        await store.open()
        self._store = store
        checks = self._checks = SelfCheck(self.mesh, store)
        await checks.at_start()
        settler = Settler(self.mesh)
        announcer = Announcer(self.mesh, store)
        canceller = Canceller(self.mesh, store, announcer, self.spawn)
        blobs = Blobs(self.mesh, store)
        landing = Landing(self.mesh, store, settler, announcer, blobs)
        projection = Projection(self.mesh, store, settler)
        self._parts = [
            landing,
            Jobs(self.mesh, store, settler, announcer, canceller.start, on_ended=blobs.ended),
            DeadLetters(self.mesh, store, settler),
            projection,
            Captures(self.mesh, store, settler),
        ]
        max_bytes = self.mesh.max_payload - REPLY_MARGIN_BYTES
        self._queries = Queries(
            store, timeout_s=options.query_timeout_s, max_rows=options.query_max_rows, max_bytes=max_bytes
        )
        sources = SourceReader(self.mesh)
        results = Results(store, sources, landing, max_bytes=max_bytes)
        retrier = Retrier(self.mesh, store, announcer, self._queries, self.spawn)
        await canceller.resume()
        await retrier.resume()
        pipelines = Pipelines(self.mesh, store, canceller, landing.next_commit, self.spawn)
        await pipelines.resume()
        self._loops = [self.spawn(part.run(), type(part).__name__.lower()) for part in self._parts]
        self.spawn(projection.mend(), "mending the ledger's tables")
        self.spawn(announcer.sweep_for_ever(), "announcer")
        self.spawn(blobs.sweep_for_ever(), "objects")
        self.spawn(Policies(store, canceller, landing).run(), "policies")
        self.spawn(checks.marks.run(), "marks")
        self.spawn(checks.run(), "checks")
        accounting = Accounting(sources, store)
        self._server = self._serve(accounting, canceller, results, self._queries, checks)
        self._server.endpoint("rebuild", dict[str, Any], projection.serve_rebuild, timeout_s=600.0)
        serve_retries(self._server, self.mesh, store, retrier, max_bytes=max_bytes)
        serve_pipelines(self._server, store, sources, accounting, pipelines)
        await self._server.start()
        # Ready means that a request which comes now is answered: the broker has read the subscriptions.
        await self.mesh.flush()

    async def on_drain(self) -> None:
        """Land and ack what is in hand, then answer what is asked already."""
        for part in self._parts:
            await part.stop()
        if self._loops:
            await asyncio.wait(self._loops, timeout=self.settings.grace_s)
        if self._server is not None:
            await self._server.stop()
        if self._checks is not None:
            await self._checks.at_stop()

    async def on_stop(self) -> None:
        """Close the file."""
        if self._queries is not None:
            await asyncio.to_thread(self._queries.close)
        if self._store is not None:
            await self._store.close()

    # --- the front door ----------------------------------------------------------------------------
    def _serve(
        self,
        accounting: Accounting,
        canceller: Canceller,
        results: Results,
        queries: Queries,
        checks: SelfCheck,
    ) -> ApiServer:
        server = ApiServer(
            self.mesh,
            "headrace-completion",
            description="status, audit, results, SQL; cancel, retry, redrive",
        )

        async def status(request: JobRequest, _headers: Mapping[str, str]) -> object:
            return await accounting.status(request.job)

        async def audit(request: AuditRequest, _headers: Mapping[str, str]) -> object:
            return await (accounting.tenant() if request.job is None else accounting.audit(request.job))

        async def jobs(request: JobsRequest, _headers: Mapping[str, str]) -> object:
            return {"jobs": await accounting.jobs(request)}

        async def result(request: ResultRequest, _headers: Mapping[str, str]) -> object:
            return await results.one(request)

        async def part(request: ResultPartRequest, _headers: Mapping[str, str]) -> object:
            return await results.part(request)

        async def page(request: ResultsRequest, _headers: Mapping[str, str]) -> object:
            return await results.page(request)

        async def query(request: QueryRequest, headers: Mapping[str, str]) -> object:
            return await queries.ask(request, headers)

        async def own_checks(request: ChecksRequest, _headers: Mapping[str, str]) -> object:
            return await checks.answer(request)

        async def losses(request: LossesRequest, _headers: Mapping[str, str]) -> object:
            return await checks.losses(request)

        async def cancel(request: CancelRequest, _headers: Mapping[str, str]) -> object:
            changed = await canceller.request(request.job, request.reason)
            return _cancel_reply(await accounting.status(request.job), changed=changed)

        server.endpoint("status", JobRequest, status)
        server.endpoint("audit", AuditRequest, audit, timeout_s=30.0)
        server.endpoint("jobs", JobsRequest, jobs, timeout_s=30.0)
        server.endpoint("result", ResultRequest, result)
        server.endpoint("result.part", ResultPartRequest, part)
        server.endpoint("results", ResultsRequest, page)
        server.endpoint(
            "query", QueryRequest, query, timeout_s=self.settings.completion.query_timeout_s + 10.0
        )
        server.endpoint("checks", ChecksRequest, own_checks, timeout_s=30.0)
        server.endpoint("losses", LossesRequest, losses, timeout_s=30.0)
        server.endpoint("cancel", CancelRequest, cancel, timeout_s=30.0)
        return server


def _cancel_reply(status: JobStatus, *, changed: bool) -> dict[str, Any]:
    """The job's status, whether this request changed anything, and one sentence."""
    if changed:
        message = f"job {status.job} is being cancelled: finished items are kept"
    else:
        message = f"job {status.job} had ended before ({status.state}): nothing was changed"
    return asdict(status) | {"changed": changed, "message": message}
