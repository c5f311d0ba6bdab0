"""Rows that come one by one, as a worker gets them, put together to batches: full ones, or what there is after a while.

A batch starts when there is a place for it and it is full, or when its oldest row has waited `max_wait_s`. While all
places are taken rows gather behind them, so that the next batch is there when one gets free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from headrace.forge.batching import MAX_BYTES, Batching, Order, Sized, fits
from headrace.forge.invoke import RowOutcome

BY_SIZE: Final = 256
"""Waiting rows among which a free packing looks for those of like size: it is done for each batch."""


class _Waiting:
    __slots__ = ("future", "raw", "since", "sized")

    def __init__(self, raw: bytes, tokens: int, since: float, future: asyncio.Future[RowOutcome]) -> None:
        self.raw = raw
        self.since = since
        self.future = future
        self.sized = Sized(self, tokens, len(raw))


class Collector:
    """Makes batches for `run`, `width` at once. `batches` and `rows` count what was started."""

    def __init__(
        self,
        run: Callable[[Sequence[bytes]], Awaitable[list[RowOutcome]]],
        batching: Batching,
        *,
        order: Order,
        width: int,
        max_wait_s: float,
    ) -> None:
        self._run = run
        self._batching = batching
        self._order: Order = order
        self._width = width
        self._max_wait_s = max_wait_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[_Waiting, None] = {}
        self._tokens = 0
        self._bytes = 0
        self._running: dict[asyncio.Task[None], list[_Waiting]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        self._stopped = False
        self.batches = 0
        self.rows = 0

    @property
    def running(self) -> int:
        """Batches that run now."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Rows that wait for a batch."""
        return len(self._waiting)

    async def outcome(self, raw: bytes, tokens: int) -> RowOutcome:
        """The outcome of a row, once its batch has run; raise what `run` raises. Cancelling it takes the row back."""
        row = _Waiting(raw, tokens, self._loop.time(), self._loop.create_future())
        self._waiting[row] = None
        self._tokens += tokens
        self._bytes += len(raw)
        self._look_soon()
        try:
            return await row.future
        finally:
            self._remove(row)

    async def stop(self, error: Exception) -> None:
        """End everything: what waits hears `error`, and so does what runs."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        rows = [*self._waiting, *(row for batch in self._running.values() for row in batch)]
        for row in rows:
            if not row.future.done():
                row.future.set_exception(error)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _remove(self, row: _Waiting) -> None:
        if row in self._waiting:
            del self._waiting[row]
            self._tokens -= row.sized.tokens
            self._bytes -= row.sized.nbytes

    def _look_soon(self) -> None:
        """Once for all rows that come in one turn of the loop."""
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        while self._waiting and len(self._running) < self._width and not self._stopped:
            age = self._loop.time() - next(iter(self._waiting)).since
            if not self._full() and age < self._max_wait_s:
                if self._timer is None:
                    self._timer = self._loop.call_later(self._max_wait_s - age + 0.001, self._wake)
                return
            self._start(self._choose())

    def _wake(self) -> None:
        self._timer = None
        self._look()

    def _full(self) -> bool:
        counted = len(self._waiting) if self._batching.mode == "rows" else self._tokens
        return counted >= self._batching.limit or self._bytes >= MAX_BYTES

    def _choose(self) -> list[_Waiting]:
        """The oldest row, and what fits beside it: those that came next, or those of the likest size."""
        waiting = list(self._waiting)
        first, others = waiting[0], waiting[1:]
        free = self._order == "free" and self._batching.mode == "tokens"
        if free:
            others = others[:BY_SIZE]
            others.sort(key=lambda row: abs(row.sized.tokens - first.sized.tokens))
        batch, tokens, nbytes = [first], first.sized.tokens, first.sized.nbytes
        for row in others:
            if fits(self._batching, len(batch), tokens, nbytes, row.sized):
                batch.append(row)
                tokens += row.sized.tokens
                nbytes += row.sized.nbytes
            elif not free:
                break
        for row in batch:
            self._remove(row)
        return batch

    def _start(self, batch: list[_Waiting]) -> None:
        self.batches += 1
        self.rows += len(batch)
        task = self._loop.create_task(self._run_batch(batch))
        self._running[task] = batch

    async def _run_batch(self, batch: list[_Waiting]) -> None:
        try:
            outcomes = await self._run([row.raw for row in batch])
        except Exception as e:  # noqa: BLE001  (whatever it is, each row of the batch must hear of it)
            for row in batch:
                if not row.future.done():
                    row.future.set_exception(e)
            return
        finally:
            self._ended()
        # After the next batch has begun: what happens to each row here is time in which the function would wait.
        for row, outcome in zip(batch, outcomes, strict=True):
            if not row.future.done():
                row.future.set_result(outcome)

    def _ended(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._running.pop(task, None)
        self._look()
