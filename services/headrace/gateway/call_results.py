"""Results of calls that ran on our own workers: removed once the ledger has the call's end, and not before.

Whoever made a call reads its result from the stream. This only takes away what nobody needs any more: an end that the
ledger does not have yet is waited for, whichever gateway writes it.
"""

from __future__ import annotations

import logging
from typing import Final

from headrace.contracts import codec
from headrace.contracts.account import view_of
from headrace.contracts.errors import HeadraceError, Undecodable
from headrace.gateway.ledger import Ledger
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer, Delivery
from headrace.mesh.settle import Reject, Settler

log = logging.getLogger("headrace.gateway")

LOOK_AGAIN_S: Final = 1.0
NOBODYS_AFTER: Final = 600
"""Looks after which a result is taken for nobody's: its call was taken back, or there never was one."""


class CallResults:
    """Takes results of calls away for one gateway."""

    def __init__(self, mesh: Mesh, ledger: Ledger) -> None:
        self._ledger = ledger
        self._objects = BlobStore(mesh)
        self._settler = Settler(mesh)
        self._consumer = BatchConsumer(mesh, mesh.topology.call_results_consumer(), batch=100, wait_s=0.05)

    async def run(self) -> None:
        """Take away for ever; after `stop`, what is in hand, then return."""
        await self._consumer.start()
        async for batch in self._consumer:
            try:
                done = [d for d in batch if await self._is_done(d)]
                if done:
                    await self._settler.ack_all(done)
                    await self._objects.delete_all(
                        [name for d in done if (name := _object_of(d)) is not None]
                    )
            except HeadraceError as e:
                log.warning("results of calls wait", extra={"results": len(batch), "reason": str(e)[:200]})
            finally:
                self._consumer.release(batch)

    async def stop(self) -> None:
        """Pull no more."""
        await self._consumer.stop()

    async def _is_done(self, delivery: Delivery) -> bool:
        try:
            result = codec.RESULT.decode(delivery.data, delivery.headers)
        except Undecodable as e:
            await self._settler.settle(delivery, Reject(str(e)))
            return False
        call, _, attempt = result.job.rpartition("-")
        view = view_of((await self._ledger.call(result.tenant, call)).records) if call else None
        if view is not None and attempt.isdigit() and 1 <= int(attempt) <= len(view.attempts):
            if view.attempts[int(attempt) - 1].state != "open":
                return True
        elif delivery.delivered > NOBODYS_AFTER:
            return True
        self._settler.nak(delivery, LOOK_AGAIN_S)
        return False


def _object_of(delivery: Delivery) -> str | None:
    """The object in which a large result lies."""
    blob = codec.RESULT.decode(delivery.data, delivery.headers).blob
    return None if blob is None else blob.name
