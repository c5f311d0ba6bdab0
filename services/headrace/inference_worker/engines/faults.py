"""Faults on purpose, for tests of what surrounds an engine: delay, refusal, death of engine or process."""

from __future__ import annotations

import asyncio
import os

from headrace.inference_worker.engines.options import Extras
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed

EXIT_STATUS = 70


class Faults:
    """`delay_ms` for each item; `fail_on`, `die_on`, `exit_on`: an item whose text contains it is refused,
    kills the engine, or ends the process at once with status 70 as a crash would.

    After `die_on` strikes, the engine is dead for all, as a real one is, until it is started again.
    """

    def __init__(self, extras: Extras) -> None:
        self.delay_s = extras.number("delay_ms", 0.0, maximum=3_600_000.0) / 1000
        self._fail_on = extras.text("fail_on")
        self._die_on = extras.text("die_on")
        self._exit_on = extras.text("exit_on")
        self._sleeping: set[asyncio.Future[None]] = set()

    @property
    def any(self) -> bool:
        """Whether there is anything to do for each item."""
        return bool(self.delay_s or self._fail_on or self._die_on or self._exit_on)

    async def strike(self, text: str) -> None:
        """Wait and fail as configured; a cancelled wait ends at once."""
        if self.delay_s:
            await self._sleep()
        if self._exit_on and self._exit_on in text:
            os._exit(EXIT_STATUS)
        if self._die_on and self._die_on in text:
            self.kill("the engine died of a poison item, as die_on asked")
            raise EngineDied("the engine died of a poison item, as die_on asked")
        if self._fail_on and self._fail_on in text:
            raise ItemFailed("poisoned", "the item was refused, as fail_on asked", field="prompt")

    def kill(self, why: str) -> None:
        """End every wait with `EngineDied`."""
        for waiter in self._sleeping:
            if not waiter.done():
                waiter.set_exception(EngineDied(why))
        self._sleeping.clear()

    async def _sleep(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(self.delay_s, _wake, waiter)
        self._sleeping.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._sleeping.discard(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
