"""The engine's life inside a worker: start, watch, and start again after a death."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.inference_worker.engines.protocol import Engine, EngineInfo
from headrace.mesh.connection import backoff_s

log = logging.getLogger("headrace.worker")

MAX_FAILED_STARTS: Final = 6
"""Starts in a row that may fail before the worker ends; whoever supervises it starts it from nothing."""
STEADY_S: Final = 60.0
"""An engine that lived this long died of something new: its back-off begins again."""


class EngineHost:
    """Owns the engine of a worker.

    `up` says whether items may run. `died` may be called by every item that saw `EngineDied`; the first one
    begins the restart: stop (pending items then end with `EngineDied` too), wait with back-off, a *new*
    engine from the factory, since a dead one cannot be mended. `on_up` is called when it runs again.
    """

    def __init__(self, factory: Callable[[], Engine]) -> None:
        self._factory = factory
        self.engine = factory()
        self.up = False
        self.deaths = 0
        self.on_up: Callable[[], None] = lambda: None
        self._death = asyncio.Event()
        self._why = ""
        self._stopped = False

    @property
    def info(self) -> EngineInfo:
        """Capacity and identity of the running engine."""
        return self.engine.info

    async def start(self) -> None:
        """Load the model for the first time; raises what the engine raises."""
        await self.engine.start()
        self.up = True

    async def stop(self) -> None:
        """Free the engine for good; idempotent."""
        self._stopped = True
        self.up = False
        await self.engine.stop()

    def died(self, why: str) -> None:
        """The engine cannot go on. Only the first call for each death counts."""
        if self.up:
            self.up = False
            self.deaths += 1
            self._why = why
            self._death.set()

    async def keep_alive(self) -> None:
        """Side task: restart the engine after each death; raise `Unavailable` when it will not start."""
        loop = asyncio.get_running_loop()
        attempt, started = 0, loop.time()
        while True:
            await self._death.wait()
            self._death.clear()
            if loop.time() - started > STEADY_S:
                attempt = 0
            await self._restart(attempt)
            if self._stopped:
                return
            attempt += 1
            started = loop.time()
            self.up = True
            log.info("engine is back", extra={"deaths": self.deaths})
            self.on_up()

    async def _restart(self, attempt: int) -> None:
        failed = 0
        while not self._stopped:
            delay = backoff_s(attempt + failed, base=0.2, cap=30.0)
            log.error("engine died", extra={"reason": self._why[:300], "restart_in_s": round(delay, 2)})
            try:
                await self.engine.stop()
            except Exception:
                log.exception("the dead engine could not be stopped")
            await asyncio.sleep(delay)
            if self._stopped:
                return
            try:
                self.engine = self._factory()
                await self.engine.start()
            except HeadraceError as e:
                self._why, failed = str(e), failed + 1
                if failed >= MAX_FAILED_STARTS:
                    raise Unavailable(f"the engine did not start again in {failed} tries: {e}") from e
            else:
                return

    async def watch_tokens(self, timeout_s: float, running: Callable[[], int]) -> None:
        """Side task, the watchdog: items run and no token came for `timeout_s` means that the engine is dead.

        It counts tokens and not heartbeats, since a hung engine answers those.
        """
        loop = asyncio.get_running_loop()
        seen, since = -1, loop.time()
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            made = self.engine.tokens_generated()
            if made != seen or not running() or not self.up:
                seen, since = made, loop.time()
            elif loop.time() - since > timeout_s:
                self.died(f"no token for {timeout_s:g} s with {running()} items running")
