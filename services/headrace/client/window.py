"""Batches that are prepared and not yet confirmed: what has to be sent again after any doubt."""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.client.feed import BATCH_ITEMS, Batch, Feed


class Window:
    """Batches in order: `take` the next to send, `confirm` the first, `rewind` to send the unconfirmed again.

    It holds no more than its user has in flight. With `in_thread` a batch is prepared in a thread, for where
    that takes long (tokenising).
    """

    def __init__(self, feed: Feed, *, in_thread: bool = False) -> None:
        self._feed = feed
        self._in_thread = in_thread
        self._ready: deque[Batch] = deque()
        self._taken = 0
        self._limit = BATCH_ITEMS
        self._making: asyncio.Future[Batch | None] | None = None

    def rewind(self) -> None:
        """Nothing of what was taken and not confirmed is stored, as far as is known: it will be taken again."""
        self._taken = 0

    def confirm(self) -> None:
        """The first batch that was taken is stored."""
        self._ready.popleft()
        self._taken -= 1
        self._limit = min(BATCH_ITEMS, self._limit * 2)

    def shrink(self) -> None:
        """Give out smaller batches, which may still fit into a queue that is nearly full."""
        last = len(self._ready[0].messages) if self._ready else BATCH_ITEMS
        self._limit = max(1, min(self._limit, last) // 2)

    async def take(self, stored: int) -> Batch | None:
        """The next batch, without the items below index `stored`; None at the end of the input."""
        while True:
            if self._taken == 0:
                self._drop(stored)
            if self._taken < len(self._ready):
                break
            made = await self._make()
            if made is None:
                return None
            self._ready.append(made)
        batch = self._ready[self._taken]
        if len(batch.messages) > self._limit:
            self._ready[self._taken] = batch.until(self._limit)
            self._ready.insert(self._taken + 1, batch.after(batch.first + self._limit))
            batch = self._ready[self._taken]
        self._taken += 1
        return batch

    async def close(self) -> None:
        """Wait for the thread, which reads a file that is about to be closed."""
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)

    def _drop(self, stored: int) -> None:
        """Cut off what is stored, whoever stored it."""
        while self._ready and self._ready[0].first < stored:
            first = self._ready.popleft()
            if first.end > stored:
                self._ready.appendleft(first.after(stored))

    async def _make(self) -> Batch | None:
        """Prepare the next batch. One who gives up waiting must not lose what the thread is preparing."""
        if not self._in_thread:
            return self._feed.next()
        if self._making is None:
            self._making = asyncio.ensure_future(asyncio.to_thread(self._feed.next))
        made = await asyncio.shield(self._making)
        self._making = None
        return made
