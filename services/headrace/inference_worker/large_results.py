"""Results that are too large for a message: stored as objects before the message that names them is settled."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from headrace.contracts.errors import HeadraceError, Refused
from headrace.contracts.messages import Blob
from headrace.contracts.objects import blob_of
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point

log = logging.getLogger("headrace.worker")

RESULT_BYTES: Final = 128 << 20
"""Large results that wait to be stored, at which pulling stops."""
AT_ONCE: Final = 4


class LargeResults:
    """Stores results as objects. `bytes` are those that wait for it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._store = BlobStore(mesh)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing more should be pulled."""
        return self.bytes >= RESULT_BYTES

    async def store(self, key: str, data: bytes) -> Blob:
        """Store the result of the item `key`; it is tried again for as long as the bucket is full or the broker away.

        Raise `Refused` for more than an object may have, `Unavailable` once the connection is closed for good.
        """
        self.bytes += len(data)
        try:
            blob = await asyncio.to_thread(blob_of, key, "result", data)
            async with self._slots:
                await self._patiently(blob, data)
        finally:
            self.bytes -= len(data)
        crash_point("result-object-stored")
        return blob

    async def _patiently(self, blob: Blob, data: bytes) -> None:
        attempt = 0
        while True:
            try:
                await self._store.put(blob, data)
            except Refused:
                raise
            except HeadraceError as e:
                if self._mesh.closed.is_set():
                    raise
                delay = backoff_s(attempt)
                attempt += 1
                extra = {"object": blob.name, "reason": str(e)[:300], "retry_in_s": round(delay, 2)}
                log.warning("a large result is not stored yet", extra=extra)
                await asyncio.sleep(delay)
            else:
                return
