"""The front door's part that runs things again: `retry`, `dead`, `redrive`."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.completion.dead_list import DeadThings
from headrace.completion.redrive import Redriver
from headrace.completion.retry import Retrier
from headrace.completion.store import Store
from headrace.contracts.api import DeadRequest, RedriveRequest, RetryReply, RetryRequest
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import ApiServer

TIMEOUT_S = 60.0
"""A retry of millions of items notes them in one transaction."""


def serve_retries(server: ApiServer, mesh: Mesh, store: Store, retrier: Retrier, *, max_bytes: int) -> None:
    """Add the endpoints to `server`; replies of lists stay under `max_bytes`."""
    things = DeadThings(store, prefix=mesh.subjects.prefix, max_bytes=max_bytes)
    redriver = Redriver(mesh, store, retrier)

    async def retry(request: RetryRequest, _headers: Mapping[str, str]) -> object:
        begun = await retrier.request(request)
        return RetryReply(
            job=begun.job,
            generation=begun.generation,
            resubmitted=begun.resubmitted,
            left_out=begun.left_out,
        )

    async def dead(request: DeadRequest, _headers: Mapping[str, str]) -> object:
        return await things.read(request)

    async def redrive(request: RedriveRequest, _headers: Mapping[str, str]) -> object:
        return await redriver.request(request)

    server.endpoint("retry", RetryRequest, retry, timeout_s=TIMEOUT_S)
    server.endpoint("dead", DeadRequest, dead, timeout_s=30.0)
    server.endpoint("redrive", RedriveRequest, redrive, timeout_s=TIMEOUT_S)
