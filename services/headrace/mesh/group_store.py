"""Storing for many at once: what is asked for while a store is under way goes into the next one, as one atomic batch.

Each asker's messages are stored all or none, and so is each batch. One that is refused says nothing of whose fault that
is, so its parts are stored singly then, and each asker hears of its own. What the broker syncs, it syncs once a batch.

Where it syncs nothing (`relaxed`), single messages go by themselves: the broker makes files for each batch, which costs
it more than a few messages do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from headrace.contracts.errors import HeadraceError, Refused
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import JetStreamError
from headrace.mesh.publisher import store_expecting
from headrace.mesh.wire import OutMessage

GROUP: Final = 500
GROUP_BYTES: Final = 4 << 20
"""Messages and bytes of one batch at most, but for what one asker alone brings."""

Member = tuple[OutMessage, int | None]
"""A message, and the sequence that its subject's last one has to have; None if that does not matter."""


class _Ask(Struct, frozen=True):
    members: Sequence[Member]
    size: int
    done: asyncio.Future[int]


class GroupStore:
    """Stores into one stream, for all who share a connection.

    `together`: single messages of several askers are stored as one batch; by default where the broker syncs each store.
    """

    def __init__(
        self, mesh: Mesh, stream: str, *, timeout_s: float = 10.0, together: bool | None = None
    ) -> None:
        self._mesh = mesh
        self._together = mesh.settings.durability == "safe" if together is None else together
        self._stream = stream
        self._timeout_s = timeout_s
        self._waiting: list[_Ask] = []
        self._flusher: asyncio.Task[None] | None = None

    async def store(self, members: Sequence[Member]) -> int:
        """Store all of 1..1000 members or none, a subject once if with an expectation; return the last's sequence.

        Raise `Refused` (too large), `JetStreamError` (nothing is stored; 10071: an expectation was wrong), or
        `Unavailable` (not known whether it is stored).
        """
        if not self._together and len(members) == 1:
            return await self._store(members)
        loop = asyncio.get_running_loop()
        size = sum(len(m.data) for m, _ in members)
        ask = _Ask(members, size, loop.create_future())
        self._waiting.append(ask)
        if self._flusher is None or self._flusher.done():
            self._flusher = loop.create_task(self._flush())
        return await ask.done

    async def _flush(self) -> None:
        await asyncio.sleep(0)  # one turn of the loop: what is asked together is stored together
        while self._waiting:
            group = self._take()
            try:
                last = await self._store([m for ask in group for m in ask.members])
            except (JetStreamError, Refused) as e:
                if len(group) == 1:
                    _fail(group[0], e)
                else:
                    await asyncio.gather(*(self._alone(ask) for ask in group))
            except Exception as e:  # noqa: BLE001  (whatever it is, those who wait must hear of it)
                for ask in group:
                    _fail(ask, e)
            else:
                for ask in reversed(group):
                    if not ask.done.done():
                        ask.done.set_result(last)
                    last -= len(ask.members)

    def _take(self) -> list[_Ask]:
        taken = count = size = 0
        for ask in self._waiting:
            if taken and (count + len(ask.members) > GROUP or size + ask.size > GROUP_BYTES):
                break
            taken, count, size = taken + 1, count + len(ask.members), size + ask.size
        group, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return group

    async def _alone(self, ask: _Ask) -> None:
        try:
            last = await self._store(ask.members)
        except HeadraceError as e:
            _fail(ask, e)
        else:
            if not ask.done.done():
                ask.done.set_result(last)

    async def _store(self, members: Sequence[Member]) -> int:
        return (await store_expecting(self._mesh, self._stream, members, timeout_s=self._timeout_s)).seq


def _fail(ask: _Ask, error: Exception) -> None:
    if not ask.done.done():
        ask.done.set_exception(error)
