"""Prompts that lie in the object store: fetched while the lease is held, before the item is admitted.

They are bounded in bytes, since an engine's slots and tokens say nothing of them. While an item waits here it counts in
the ledger by what its shape says, so that no more is pulled than could start.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from headrace.contracts.codec import PROMPT
from headrace.contracts.errors import Conflict, NotFound, Unavailable, Undecodable
from headrace.contracts.messages import Blob, BlobPrompt, ItemError
from headrace.inference_worker.finishing import Finisher
from headrace.inference_worker.intake import Item
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point

log = logging.getLogger("headrace.worker")

PROMPT_BYTES: Final = 128 << 20
"""Fetched prompts in one worker, from the asking on until their items have left; one that is larger comes alone."""
AT_ONCE: Final = 4
TRIES: Final = 5
"""Silences of a broker that is connected, after which the item is given up for now."""


class Prompts:
    """Fetches the prompts of items. `stop` ends the waiting: what has no prompt by then is not fetched any more."""

    def __init__(self, mesh: Mesh, finisher: Finisher, *, limit_bytes: int = PROMPT_BYTES) -> None:
        self._mesh = mesh
        self._store = BlobStore(mesh)
        self._finisher = finisher
        self._most = mesh.settings.max_item_bytes
        self._limit = limit_bytes
        self._held: dict[Item, int] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()
        finisher.on_left = self._left

    @property
    def bytes(self) -> int:
        """Bytes of the prompts that are here or on their way."""
        return sum(self._held.values())

    def stop(self) -> None:
        """Wait for nothing more."""
        self._stopped.set()
        self._changed.set()

    async def fetch(self, item: Item) -> bool:
        """Put the item's prompt in its place; true if it may go on, false if it has left the worker.

        A prompt that is not there, or not what was stored, is the item's end; a broker that is away is waited for.
        """
        prompt = item.task.prompt
        if not isinstance(prompt, BlobPrompt):
            return True
        blob = prompt.blob
        if blob.size > self._most:
            message = (
                f"the prompt has {blob.size:,} bytes; max_item_bytes of this worker allows {self._most:,}"
            )
            self._finisher.failed(item, ItemError(type="input_too_large", message=message, field="prompt"))
            return False
        try:
            async with self._slots:
                await self._room(item, blob.size)
                data = await self._get(blob)
            if data is None:
                self._finisher.give_back(item)
                return False
            item.prompt = PROMPT.decode(data)
        except (NotFound, Conflict, Undecodable) as e:
            kind = "input_missing" if isinstance(e, NotFound) else "input_damaged"
            extra = {"job": item.task.job, "index": item.task.index, "reason": str(e)[:300]}
            log.warning("a prompt is lost", extra=extra)
            self._finisher.failed(item, ItemError(type=kind, message=str(e), field="prompt"))
            return False
        except asyncio.CancelledError:
            self._left(item)
            raise
        except Exception as e:  # noqa: BLE001  (whatever it is, the item must not stay here)
            self._finisher.try_again(item, f"its prompt could not be fetched: {type(e).__name__}: {e}")
            return False
        return True

    async def _room(self, item: Item, size: int) -> None:
        while self._held and self.bytes + size > self._limit and not self._stopped.is_set():
            self._changed.clear()
            await self._changed.wait()
        self._held[item] = size

    async def _get(self, blob: Blob) -> bytes | None:
        """The bytes; None once this is stopped. Raise `Unavailable` if a broker that is there keeps silent."""
        silences, attempt = 0, 0
        while not self._stopped.is_set():
            crash_point("prompt-fetching")
            try:
                return await self._store.get(blob)
            except Unavailable as e:
                silences = silences + 1 if self._mesh.connected else 0
                if silences >= TRIES or self._mesh.closed.is_set():
                    raise
                log.warning(
                    "a prompt is not fetched yet", extra={"object": blob.name, "reason": str(e)[:300]}
                )
            try:
                async with asyncio.timeout(backoff_s(attempt)):
                    await self._stopped.wait()
            except TimeoutError:
                attempt += 1
        return None

    def _left(self, item: Item) -> None:
        """The item is settled or gone: its bytes are free."""
        if self._held.pop(item, None) is not None:
            item.prompt = item.work = None
            self._changed.set()
