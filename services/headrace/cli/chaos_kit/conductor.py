"""When each fault is done: by the clock, or by the job's own progress where that is faster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

from headrace.cli.chaos_kit.faults import Faults
from headrace.cli.chaos_kit.plan import Fault
from headrace.cli.chaos_kit.sampler import Sampler

LOOK_S: Final = 0.05


class Conductor:
    """Carries a plan out over `seconds`. A job of `items` that is faster than that takes the plan with it."""

    def __init__(self, faults: Faults, sampler: Sampler, *, seconds: float, items: int) -> None:
        self._faults = faults
        self._sampler = sampler
        self._seconds = seconds
        self._items = items
        self._began = time.monotonic()

    @property
    def position(self) -> float:
        """Share of the run that is over: of its time or of its items, whichever is more."""
        by_time = (time.monotonic() - self._began) / self._seconds
        return max(by_time, self._sampler.landed / max(1, self._items))

    async def run(self, plan: Sequence[Fault]) -> None:
        """Do every fault of `plan` when it is due; return when all are over, or at once when the job has ended."""
        self._began = time.monotonic()
        ended = asyncio.ensure_future(self._sampler.ended.wait())
        running: set[asyncio.Task[None]] = set()
        try:
            for fault in plan:
                while not ended.done() and self.position < fault.at:
                    await asyncio.wait({ended}, timeout=LOOK_S)
                if ended.done():
                    break
                running.add(asyncio.create_task(self._faults.inject(fault), name=fault.kind))
            pending: set[asyncio.Future[bool] | asyncio.Task[None]] = set(running)
            while pending and not ended.done():
                await asyncio.wait({ended, *pending}, return_when=asyncio.FIRST_COMPLETED)
                pending = {task for task in pending if not task.done()}
        finally:
            for task in (ended, *running):
                task.cancel()
            for task in (ended, *running):
                with contextlib.suppress(asyncio.CancelledError):
                    await task
