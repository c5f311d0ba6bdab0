"""Confirmed acks: many at once, over lost connections, and of deliveries that a broker has forgotten.

Acks of one consumer are handled by the broker in the order in which one connection sent them, so the confirmation of
the last is the confirmation of all before it. One kind is never answered: the ack of a message that lies behind what
the consumer has delivered, as far as the broker knows. A broker that was killed may come back with an older state of
a consumer, so that state is asked for after a lost connection and after a failed try. What it has forgotten comes
again, and to wait for it would hold up everything behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.mesh import wire
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.consumer import Delivery
from headrace.mesh.heads import HeadPurge
from headrace.mesh.jsapi import call
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.mesh.settle")

ACK = b"+ACK"
TRIES = 5
ANSWER_S = 2.0
"""How long one try waits for its confirmation; a sync of a slow disk is within it."""


class Acker:
    """Acks deliveries of one connection, and returns when the broker has confirmed it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._heads = HeadPurge(mesh)

    async def ack(self, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Ack all; return those that the broker has forgotten: it was restarted, and delivers them again.

        Raise `Unavailable` if the others are not confirmed after five tries: they come again as well.
        """
        await self._heads.remove(deliveries)
        known: Sequence[Delivery] = deliveries
        for attempt in range(TRIES):
            if attempt or any(d.losses != self._mesh.losses for d in known):
                known = await self._known(known)
            try:
                await self._ack_once(known)
                break
            except Unavailable as e:
                if attempt == TRIES - 1 or self._mesh.closed.is_set():
                    msg = f"acks of {len(known)} messages are not confirmed: {e}"
                    raise Unavailable(msg) from e
            await asyncio.sleep(backoff_s(attempt))
        if len(known) == len(deliveries):
            return set()
        forgotten = set(deliveries) - set(known)
        log.warning("the broker was restarted and delivers again", extra={"messages": len(forgotten)})
        return forgotten

    async def _ack_once(self, deliveries: Sequence[Delivery]) -> None:
        last = {(d.stream, d.consumer): d for d in deliveries}
        await self._mesh.publish_frames(
            [wire.frame(OutMessage(d.reply, ACK)) for d in deliveries if last[d.stream, d.consumer] is not d]
        )
        try:
            async with asyncio.TaskGroup() as group:
                for d in last.values():
                    group.create_task(self._mesh.ask(OutMessage(d.reply, ACK), timeout_s=ANSWER_S))
        except* Unavailable as e:
            raise Unavailable(str(e.exceptions[0])) from None

    async def _known(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Those of `deliveries` that their consumers have delivered, as far as the broker knows (or cannot say)."""
        delivered: dict[tuple[str, str], int] = {}
        for stream, consumer in {(d.stream, d.consumer) for d in deliveries}:
            try:
                info = await call(self._mesh, f"CONSUMER.INFO.{stream}.{consumer}", timeout_s=ANSWER_S)
            except HeadraceError:  # away again, or this client may not ask
                return deliveries
            delivered[stream, consumer] = int(info["delivered"]["stream_seq"])
        return [d for d in deliveries if d.stream_seq <= delivered[d.stream, d.consumer]]
