"""Outcomes of a job, page by page and in the order of its indices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.contracts.api import ResultRequest, ResultsReply, ResultsRequest
from headrace.contracts.messages import Result
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api

PAGE: Final = 1_000
_page = msgspec.json.Decoder(ResultsReply)
_result = msgspec.json.Decoder(Result)


async def result(mesh: Mesh, job: str, index: int, *, wait_s: float = 0.0) -> Result:
    """The outcome of one item, waiting up to `wait_s` (4 at most) for it to land; else `NotFound`."""
    request = ResultRequest(job=job, index=index, wait_s=wait_s)
    return _result.decode(await call_api(mesh, "result", request, timeout_s=wait_s + 5.0))


async def pages(mesh: Mesh, job: str, *, after: int = -1, page: int = PAGE) -> AsyncIterator[list[Result]]:
    """The outcomes with an index above `after`, up to `page` at a time. A job that runs gives what has landed."""
    at: int | None = after
    while at is not None:
        request = ResultsRequest(job=job, after=at, limit=page)
        reply = _page.decode(await call_api(mesh, "results", request, timeout_s=30.0))
        if reply.results:
            yield reply.results
        at = reply.next


async def results(mesh: Mesh, job: str, *, after: int = -1) -> AsyncIterator[Result]:
    """Each outcome of the job, in the order of indices."""
    async for found in pages(mesh, job, after=after):
        for outcome in found:
            yield outcome
