"""Writing what must not be lost: again until it is stored, its leases renewed meanwhile.

A full disk is no reason to ack, to drop or to die: nothing is acked, each try has its back-off and its log line, and
once there is space everything that waited is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from headrace.completion.store import Connection, Store
from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.mesh import wire
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.consumer import Delivery
from headrace.mesh.leases import IN_PROGRESS
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.completion")

P = ParamSpec("P")
R = TypeVar("R")


async def write_patiently(
    store: Store, what: str, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """`store.write`, tried again with back-off while the data plane cannot write; `what` names it in the log."""
    attempt = 0
    while True:
        try:
            return await store.write(work, *args, **kwargs)
        except Unavailable as e:
            delay = backoff_s(attempt)
            attempt += 1
            log.warning(
                "not written yet", extra={"what": what, "reason": str(e)[:300], "retry_in_s": round(delay, 2)}
            )
            await asyncio.sleep(delay)


@contextlib.asynccontextmanager
async def renewed(
    mesh: Mesh, deliveries: Sequence[Delivery], waiting: Callable[[], Sequence[Delivery]] = tuple
) -> AsyncGenerator[None]:
    """Hold the leases of `deliveries`, and of what is `waiting` behind them, for as long as the block lasts."""
    task = asyncio.get_running_loop().create_task(_renew(mesh, deliveries, waiting))
    try:
        yield
    finally:
        task.cancel()


async def _renew(
    mesh: Mesh, deliveries: Sequence[Delivery], waiting: Callable[[], Sequence[Delivery]]
) -> None:
    every_s = deliveries[0].ack_wait_s / 3 if deliveries else 1.0
    while True:
        await asyncio.sleep(every_s)
        with contextlib.suppress(HeadraceError):  # away: the leases lapse, and landing again changes nothing
            held = (*deliveries, *waiting())
            await mesh.publish_frames([wire.frame(OutMessage(d.reply, IN_PROGRESS)) for d in held])
