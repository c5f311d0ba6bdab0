"""The bucket of suspects: what workers tell one another of tasks that were in an engine when it died.

Reading asks the leader of the bucket's stream, not any replica: a crash that was recorded a moment ago must be seen.
Only `record` waits for the broker's confirmation, since what it stores must be there before the tasks go back; the
rest are notes, sent as reports are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from headrace.contracts import codec
from headrace.contracts.codec import SCHEMA_HEADER
from headrace.contracts.errors import Unavailable
from headrace.contracts.suspects import Cleared, Suspect, SuspectRecord
from headrace.mesh import wire
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import last_message
from headrace.mesh.publisher import publish_all
from headrace.mesh.wire import OutMessage, header_block

LOOK_UP_S: Final = 2.0
"""How long a delivery waits for its record."""
REST_S: Final = 5.0
"""How long to ask nothing after a time-out: each task would wait for one, where this client may not read at all."""
BATCH: Final = 500
_HEADERS: Final = header_block({SCHEMA_HEADER: codec.SUSPECT.name})


class SuspectBook:
    """Reads and writes the records over one connection."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._bucket = mesh.topology.suspects_bucket
        self._stream = f"KV_{self._bucket}"
        self._not_before = 0.0

    async def look_up(self, sequence: int, stored_us: int) -> Suspect | None:
        """The record of a task, or None; `Unavailable` if it cannot be read (then also for the next `REST_S`).

        A record of another task, that had this sequence before the broker lost it, is none.
        """
        found = await self._read(f"{sequence}")
        return found if isinstance(found, Suspect) and found.stored_us == stored_us else None

    async def is_cleared(self, incident: str) -> bool:
        """Whether the culprit of that incident is known. Raise `Unavailable` as `look_up`."""
        return isinstance(await self._read(f"incident-{incident}"), Cleared)

    async def record(self, suspects: Mapping[int, Suspect], *, timeout_s: float = 5.0) -> None:
        """Store suspects by their sequence and return once they are; raise a `HeadraceError` if that is not sure."""
        messages = [self._message(f"{sequence}", suspect) for sequence, suspect in suspects.items()]
        try:
            async with asyncio.timeout(timeout_s):
                for first in range(0, len(messages), BATCH):
                    await publish_all(self._mesh, self._stream, messages[first : first + BATCH])
        except TimeoutError:
            raise Unavailable(f"{len(messages)} suspects are not stored within {timeout_s:g} s") from None

    def clear(self, cleared: Cleared) -> None:
        """Tell who waits for a trial that the culprit is known. Without it they are tried, and no more is lost."""
        self._send(self._message(f"incident-{cleared.incident}", cleared))

    def note(self, sequence: int, suspect: Suspect) -> None:
        """Keep the error of a task's last try, for whoever ends it."""
        self._send(self._message(f"{sequence}", suspect))

    def _message(self, key: str, record: SuspectRecord) -> OutMessage:
        return OutMessage(f"$KV.{self._bucket}.{key}", codec.SUSPECT.encode(record), _HEADERS)

    def _send(self, message: OutMessage) -> None:
        if self._mesh.connected:
            wire.send_nowait(self._mesh.nc, (wire.frame(message),))

    async def _read(self, key: str) -> SuspectRecord | None:
        if time.monotonic() < self._not_before:
            raise Unavailable("the bucket of suspects did not answer a moment ago")
        try:
            async with asyncio.timeout(LOOK_UP_S):
                stored = await last_message(self._mesh, self._stream, f"$KV.{self._bucket}.{key}")
        except TimeoutError:
            self._not_before = time.monotonic() + REST_S
            raise Unavailable(f"the bucket of suspects did not answer within {LOOK_UP_S:g} s") from None
        return codec.SUSPECT.decode(stored.data, stored.headers) if stored and stored.data else None
