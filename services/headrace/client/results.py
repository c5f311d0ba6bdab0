"""Outcomes of a job, page by page and in the order of its indices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.contracts.api import (
    ResultPartReply,
    ResultPartRequest,
    ResultRequest,
    ResultsReply,
    ResultsRequest,
)
from headrace.contracts.errors import Unavailable
from headrace.contracts.messages import Result
from headrace.contracts.objects import digest_of
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api

PAGE: Final = 1_000
_page = msgspec.json.Decoder(ResultsReply)
_part = msgspec.json.Decoder(ResultPartReply)
_result = msgspec.json.Decoder(Result)


async def result(mesh: Mesh, job: str, index: int, *, wait_s: float = 0.0) -> Result:
    """The outcome of one item, waiting up to `wait_s` (4 at most) for it to land; else `NotFound`."""
    request = ResultRequest(job=job, index=index, wait_s=wait_s)
    return await _whole(mesh, _result.decode(await call_api(mesh, "result", request, timeout_s=wait_s + 5.0)))


async def pages(mesh: Mesh, job: str, *, after: int = -1, page: int = PAGE) -> AsyncIterator[list[Result]]:
    """The outcomes with an index above `after`, up to `page` at a time. A job that runs gives what has landed.

    An outcome that is too large for a reply is fetched in parts, and is a page by itself: memory is bounded.
    """
    at: int | None = after
    while at is not None:
        request = ResultsRequest(job=job, after=at, limit=page)
        reply = _page.decode(await call_api(mesh, "results", request, timeout_s=30.0))
        small: list[Result] = []
        for outcome in reply.results:
            if outcome.blob is None:
                small.append(outcome)
                continue
            if small:
                yield small
                small = []
            yield [await _whole(mesh, outcome)]
        if small:
            yield small
        at = reply.next


async def _whole(mesh: Mesh, outcome: Result) -> Result:
    """The outcome itself, where `outcome` only says how large it is."""
    blob = outcome.blob
    if blob is None:
        return outcome
    pieces: list[str] = []
    part: int | None = 0
    while part is not None:
        request = ResultPartRequest(
            job=outcome.job, index=outcome.index, generation=outcome.generation, part=part
        )
        reply = _part.decode(await call_api(mesh, "result.part", request, timeout_s=30.0))
        pieces.append(reply.data)
        part = reply.next
    data = "".join(pieces).encode()
    if digest_of(data) != blob.digest:
        msg = f"the outcome of {blob.name} came with {len(data):,} bytes that are not those of its digest: ask again"
        raise Unavailable(msg, code="damaged")
    return _result.decode(data)


async def results(mesh: Mesh, job: str, *, after: int = -1) -> AsyncIterator[Result]:
    """Each outcome of the job, in the order of indices."""
    async for found in pages(mesh, job, after=after):
        for outcome in found:
            yield outcome
