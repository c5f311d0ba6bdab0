"""Trouble inside the broker: a full queue, deliveries that lapse, results that arrive twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Final

from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.specs import ConsumerSpec
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer
from headrace.mesh.jsapi import StoredMessage, call, next_message, stream_info
from headrace.mesh.publisher import publish

LOOK_S: Final = 3.0
"""How long to wait for a message that can be taken or copied."""
KEPT: Final = 20
"""Results that are remembered, to be published again long after they landed."""
_BROKERS_OWN: Final = "Nats-"
"""Headers of the broker's protocol, which a copy must not bear."""


class Streams:
    """Faults of the streams of one job. Names are `tasks` and `results`."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self._mesh = mesh
        self._job = job
        self._names = {"tasks": mesh.topology.tasks, "results": mesh.topology.results}
        self._seen: deque[StoredMessage] = deque(maxlen=KEPT)
        self._lowered: set[str] = set()

    # --- full --------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def full(self, stream: str) -> AsyncGenerator[int]:
        """While the block lasts the stream takes nothing more; its bound in bytes.

        Nothing stored goes by that: a stream that discards new messages keeps what it has when its bound is lowered.
        """
        state = (await stream_info(self._mesh, self._names[stream]))["state"]
        bound = max(1, int(state["bytes"]))
        self._lowered.add(stream)  # before it is done: whether it was may never be known
        try:
            await self._bound(stream, bound)
            yield bound
        finally:
            await self.restore()

    async def restore(self) -> None:
        """Give every stream its own bound again; goes on trying while the broker is away."""
        while self._lowered:
            stream = next(iter(self._lowered))
            try:
                await self._bound(stream, self._mesh.settings.max_bytes)
            except Unavailable:
                await asyncio.sleep(0.1)
            else:
                self._lowered.discard(stream)

    async def _bound(self, stream: str, max_bytes: int) -> None:
        name = self._names[stream]
        config: dict[str, Any] = (await stream_info(self._mesh, name))["config"]
        await call(self._mesh, f"STREAM.UPDATE.{name}", config | {"max_bytes": max_bytes})

    # --- late --------------------------------------------------------------------------------------
    async def take(self, stream: str, count: int) -> int:
        """Pull up to `count` messages as a worker or completion would, and never ack; how many they were.

        They come to those that work again when their leases have lapsed.
        """
        spec = self._mesh.topology.results_consumer() if stream == "results" else await self._backlog()
        taken: list[Delivery] = []
        thief = PullConsumer(self._mesh, spec, taken.append)
        await thief.start()
        try:
            thief.ask(count)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    while len(taken) < count:  # noqa: ASYNC110  (called back from another task)
                        await asyncio.sleep(0.02)
        finally:
            await thief.stop()
        return len(taken)

    async def _backlog(self) -> ConsumerSpec:
        """The consumer of the tasks of which the job has most."""
        subjects = self._mesh.subjects
        info = await stream_info(
            self._mesh, self._mesh.topology.tasks, subjects_filter=subjects.tasks_of_job(self._job)
        )
        waiting: dict[str, int] = info["state"]["subjects"]
        if not waiting:
            msg = "no task is waiting"
            raise Unavailable(msg)
        address = subjects.parse_task(max(waiting, key=lambda subject: waiting[subject]))
        return self._mesh.topology.task_consumer(address.function, address.lane, address.shape)

    # --- twice -------------------------------------------------------------------------------------
    async def duplicate(self, copies: int) -> int:
        """Publish a stored result of the job, and older ones, once more each; how many were stored again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                while (found := await self._stored_result()) is None:  # noqa: ASYNC110  (a stream has no event)
                    await asyncio.sleep(0.01)
                self._seen.append(found)
        stored = 0
        for message in list(self._seen)[-copies:]:
            with contextlib.suppress(HeadraceError):
                await self._again(message)
                stored += 1
        return stored

    async def _stored_result(self) -> StoredMessage | None:
        subject = self._mesh.subjects.results_of_job(self._job)
        return await next_message(self._mesh, self._mesh.topology.results, subject, 1)

    async def _again(self, message: StoredMessage) -> None:
        headers = {k: v for k, v in message.headers.items() if not k.startswith(_BROKERS_OWN)}
        await publish(self._mesh, self._mesh.topology.results, message.subject, message.data, headers=headers)
