"""What agents did, from HR_CAPTURE into DuckDB: committed, then acked. What comes again changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.completion import capture_rows
from headrace.completion.follower import Follower
from headrace.completion.patience import write_patiently
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.capture import CaptureMessage, CaptureRecords
from headrace.contracts.errors import InvalidInput, Undecodable
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.settle import Reject, Settler

BATCH = 200
"""Messages of one transaction: each holds up to a thousand records."""

Pair = tuple[Delivery, CaptureMessage]


class Captures(Follower):
    """Lands what agents recorded until it is stopped."""

    what = "records of agents"

    def __init__(self, mesh: Mesh, store: Store, settler: Settler) -> None:
        super().__init__(mesh, store, settler, mesh.topology.capture_consumer(), batch=BATCH, wait_s=0.02)

    async def take(self, batch: Sequence[Delivery]) -> None:
        """Land a batch; what is no message of this kind goes to the dead letters."""
        pairs: list[Pair] = []
        for delivery in batch:
            try:
                pairs.append((delivery, decode(delivery)))
            except Undecodable as e:
                await self._settler.settle(delivery, Reject(str(e)))
        landed = await self._land(pairs)
        if landed:
            crash_point("capture-committed")
            await self._settler.ack_all(landed)

    async def _land(self, pairs: list[Pair]) -> list[Delivery]:
        """Commit; what DuckDB itself refuses is halved until it stands alone, and goes to the dead letters."""
        if not pairs:
            return []
        try:
            messages = [(d.stream_seq, m) for d, m in pairs]
            await write_patiently(self._store, self.what, capture_rows.insert, messages)
        except InvalidInput as e:
            if len(pairs) == 1:
                await self._settler.settle(pairs[0][0], Reject(str(e)))
                return []
            middle = len(pairs) // 2
            return await self._land(pairs[:middle]) + await self._land(pairs[middle:])
        return [d for d, _ in pairs]


def decode(delivery: Delivery) -> CaptureMessage:
    """The message; raise `Undecodable` if it is none, or speaks of another agent or run than its subject."""
    message = codec.CAPTURE.decode(delivery.data, delivery.headers)
    run = message.run if isinstance(message, CaptureRecords) else message.life
    if not delivery.subject.endswith(f".{message.agent}.{run}"):
        msg = "it names another agent or run than its subject"
        raise Undecodable(msg)
    return message
