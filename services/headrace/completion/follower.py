"""What follows a stream into the data plane: batch after batch, each committed, then acked."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.completion.patience import renewed
from headrace.completion.store import Store
from headrace.contracts.errors import HeadraceError
from headrace.contracts.specs import ConsumerSpec
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer, Delivery
from headrace.mesh.settle import Settler

log = logging.getLogger("headrace.completion")


class Follower:
    """Pulls from one consumer until it is stopped; a part of completion says in `take` what a batch is for.

    What `take` does not ack comes again once its lease is over. So it commits first and acks after that, and what it
    has committed changes nothing when it comes again.
    """

    what = "messages"
    """What they are, for the log."""

    def __init__(
        self,
        mesh: Mesh,
        store: Store,
        settler: Settler,
        spec: ConsumerSpec,
        *,
        batch: int,
        wait_s: float = 0.0,
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._settler = settler
        self._consumer = BatchConsumer(mesh, spec, batch=batch, wait_s=wait_s)

    async def take(self, batch: Sequence[Delivery]) -> None:
        """Commit a batch, then ack it."""
        raise NotImplementedError

    async def run(self) -> None:
        """Take batches for ever; after `stop`, take those in hand, then return."""
        await self._consumer.start()
        async for batch in self._consumer:
            try:
                async with renewed(self._mesh, batch, lambda: self._consumer.waiting):
                    await self.take(batch)
            except* HeadraceError as e:
                extra = {"what": self.what, "count": len(batch), "reason": str(e.exceptions[0])[:300]}
                log.warning("what was pulled waits for its next delivery", extra=extra)
            finally:
                self._consumer.release(batch)

    async def stop(self) -> None:
        """Pull no more."""
        await self._consumer.stop()
