"""The life of jobs: applies `opened`, `sealed`, `retried`, `cancelled`, `completed` to the data plane, in batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headrace.completion import job_rows, retry_rows
from headrace.completion.announce import Announcer
from headrace.completion.follower import Follower
from headrace.completion.patience import write_patiently
from headrace.completion.store import Connection, Store
from headrace.contracts import codec
from headrace.contracts.errors import Undecodable
from headrace.contracts.messages import (
    Cause,
    JobCancelled,
    JobCompleted,
    JobEvent,
    JobOpened,
    JobRetried,
    JobSealed,
)
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.settle import Reject, Settler

log = logging.getLogger("headrace.completion")

BATCH = 200


class Jobs(Follower):
    """Keeps the states of jobs until it is stopped; `cancel` is called with each job that is to be cancelled.

    `on_ended` is called after jobs have ended.
    """

    what = "job events"

    def __init__(
        self,
        mesh: Mesh,
        store: Store,
        settler: Settler,
        announcer: Announcer,
        cancel: Callable[[str, str, Cause], None],
        *,
        on_ended: Callable[[], None],
    ) -> None:
        super().__init__(mesh, store, settler, mesh.topology.jobs_consumer(), batch=BATCH)
        self._announcer = announcer
        self._cancel = cancel
        self._on_ended = on_ended

    async def take(self, batch: Sequence[Delivery]) -> None:
        """Apply events; what follows from them is begun before they are acked."""
        events: list[JobEvent] = []
        taken: list[Delivery] = []
        for delivery in batch:
            try:
                events.append(_decode(delivery))
                taken.append(delivery)
            except Undecodable as e:
                await self._settler.settle(delivery, Reject(str(e)))
        if not taken:
            return
        endings, cancelling = await write_patiently(self._store, "job events", apply, events)
        crash_point("job-events-committed")
        await self._announcer.announce(endings)
        for job, reason, cause in cancelling:
            self._cancel(job, reason, cause)
        for event in events:
            if isinstance(event, JobCompleted):
                await self._announcer.clear(event.job, event.generation)
                self._on_ended()
        await self._settler.ack_all(taken)


def apply(
    connection: Connection, events: Sequence[JobEvent]
) -> tuple[list[JobCompleted], list[tuple[str, str, Cause]]]:
    """Apply `events`; return the last events of jobs that are complete now, and the jobs to cancel, with why."""
    check: list[str] = []
    cancelling: list[tuple[str, str, Cause]] = []
    for event in events:
        match event:
            case JobOpened():
                job_rows.opened(connection, event)
            case JobSealed():
                job_rows.sealed(connection, event)
                check.append(event.job)
            case JobCancelled():
                if job_rows.cancelled_event(connection, event) == "cancelling":
                    cancelling.append((event.job, event.reason, event.cause))
            case JobRetried():
                retry_rows.retried(connection, event)
            case JobCompleted():
                job_rows.completed(connection, event)
    return job_rows.finish_full(connection, check), cancelling


def _decode(delivery: Delivery) -> JobEvent:
    event: JobEvent = codec.JOB_EVENT.decode(delivery.data, delivery.headers)
    if f".{event.job}." not in delivery.subject:
        msg = "the event names another job than its subject"
        raise Undecodable(msg)
    return event
