"""Another chance for what failed: retry a job, list what is dead, redrive it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from headrace.client.status import status
from headrace.contracts.api import (
    DeadEntry,
    DeadReply,
    DeadRequest,
    RedriveReply,
    RedriveRequest,
    RetryReply,
    RetryRequest,
)
from headrace.contracts.errors import Unavailable
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api

TIMEOUT_S: Final = 60.0
_ASK_AGAIN_S: Final = 10.0
"""A service that dies with a request leaves no sign of it: it is asked again after this time."""
_PAUSE_S: Final = 0.5

_retry = msgspec.json.Decoder(RetryReply)
_dead = msgspec.json.Decoder(DeadReply)
_redrive = msgspec.json.Decoder(RedriveReply)


async def retry(mesh: Mesh, job: str, *, where: str = "", patience_s: float = 60.0) -> RetryReply:
    """Run the failed and dead items of an ended job again, those whose outcome fits `where`; see `RetryRequest`.

    A lost answer is asked for again for `patience_s`: the request names its generation, and stays one retry. Raise
    `Refused` (it runs, it was cancelled), `InvalidInput` (the condition), `Conflict`, `NotFound`, `Unavailable`.
    """
    generation = (await status(mesh, job)).generation + 1
    request = RetryRequest(job=job, where=where, generation=generation)
    clock = asyncio.get_running_loop().time
    until = clock() + patience_s
    while True:
        try:
            return _retry.decode(await call_api(mesh, "retry", request, timeout_s=_ASK_AGAIN_S))
        except Unavailable:
            if clock() >= until or mesh.closed.is_set():
                raise
        await asyncio.sleep(_PAUSE_S)


async def dead(mesh: Mesh, *, job: str | None = None) -> AsyncIterator[DeadEntry]:
    """What is dead, newest first: items whose tries are exhausted, and letters that no consumer could take."""
    after: str | None = None
    while True:
        request = DeadRequest(job=job, after=after, limit=1_000)
        page = _dead.decode(await call_api(mesh, "dead", request, timeout_s=30.0))
        for entry in page.entries:
            yield entry
        after = page.next
        if after is None:
            return


async def redrive(
    mesh: Mesh, dead_id: str | None = None, *, job: str | None = None, again: bool = False
) -> RedriveReply:
    """Let one dead thing, or all of a job, go its way once more; see `RedriveRequest`."""
    request = RedriveRequest(job=job, id=dead_id, again=again)
    return _redrive.decode(await call_api(mesh, "redrive", request, timeout_s=TIMEOUT_S))
