"""Removing a run of settled messages by one write instead of one for each.

Under `sync_interval: always` the broker writes and syncs for each ack of a work queue (measured: 5,000 a second), and
only once for a purge of the same messages (over 100,000). A purge removes whatever it matches, leased to others or not,
so it is used only where it can match nothing but the messages of the run: those of one consumer, each delivered once,
whose delivery numbers follow one another and the consumer's ack floor without a gap. All earlier messages of its filter
are acked then, and later ones are behind the purge's bound. The acks follow all the same: they end the leases.

Delivery numbers are compared only as one run of one broker gave them: a broker that was killed may come back with an
older state of a consumer and give a number anew, so what was delivered before the connection was lost is acked only. So
is everything of a replicated consumer, whose leader may change behind a connection that lasts; its acks cost no sync.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery
from headrace.mesh.jsapi import call

log = logging.getLogger("headrace.mesh.settle")

LEAST_RUN = 16
"""Shorter runs are acked only: a purge costs two requests."""
REST_S = 60.0
"""How long to do without after a failure: the broker was away, or this client may not purge."""


def head_run(deliveries: Iterable[Delivery], floor: int) -> list[Delivery]:
    """The longest run of first deliveries that begins right after `floor`, a consumer's delivery number."""
    run: list[Delivery] = []
    for delivery in sorted((d for d in deliveries if d.consumer_seq > floor), key=lambda d: d.consumer_seq):
        if delivery.consumer_seq != floor + 1 or delivery.delivered != 1:
            break
        run.append(delivery)
        floor += 1
    return run


class HeadPurge:
    """Removes runs at the head of their consumers; never more than what it is given."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._queues = (mesh.topology.tasks, mesh.topology.results)
        self._not_before = 0.0 if mesh.settings.durability == "safe" else float("inf")

    async def remove(self, deliveries: Sequence[Delivery]) -> int:
        """Remove what can be removed safely of these settled messages; return how many. Never raises."""
        if len(deliveries) < LEAST_RUN or time.monotonic() < self._not_before:
            return 0
        groups: defaultdict[tuple[str, str], list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            if delivery.losses == self._mesh.losses:
                groups[delivery.stream, delivery.consumer].append(delivery)
        removed = 0
        for (stream, consumer), group in groups.items():
            if stream in self._queues and len(group) >= LEAST_RUN:
                try:
                    removed += await self._remove(stream, consumer, group)
                except HeadraceError as e:
                    self._not_before = time.monotonic() + REST_S
                    log.info(
                        "settled messages are not purged", extra={"reason": str(e)[:200], "rest_s": REST_S}
                    )
                    break
        return removed

    async def _remove(self, stream: str, consumer: str, group: list[Delivery]) -> int:
        info = await call(self._mesh, f"CONSUMER.INFO.{stream}.{consumer}", timeout_s=2.0)
        run = head_run(group, int(info["ack_floor"]["consumer_seq"]))
        filter_ = info["config"].get("filter_subject")
        if len(run) < LEAST_RUN or not filter_ or info.get("cluster", {}).get("replicas"):
            return 0
        bound = {"filter": filter_, "seq": run[-1].stream_seq + 1}
        await call(self._mesh, f"STREAM.PURGE.{stream}", bound, timeout_s=5.0)
        return len(run)
