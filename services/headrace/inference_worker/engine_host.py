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
STOP_S: Final = 10.0
"""How long a dead engine may take to stop. A hung one may never; the next is started beside what is left of it."""


class EngineHost:
    """Owns the engine of a worker.

    `up` says whether items may run. `died` may be called by every item that saw `EngineDied`; the first one
    begins the restart: stop (pending items then end with `EngineDied` too), wait with back-off, a *new*
    engine from the factory, since a dead one cannot be mended. `on_died` is called at once, while the items are
    still in it, and `on_up` when the next one runs.
    """

    def __init__(self, factory: Callable[[], Engine]) -> None:
        self._factory = factory
        self.engine = factory()
        self.up = False
        self.deaths = 0
        self.on_up: Callable[[], None] = lambda: None
        self.on_died: Callable[[str], None] = lambda _: None
        self._death = asyncio.Event()
        self._why = ""
        self._attempt = 0
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
        await self._stop_engine()

    def died(self, why: str) -> None:
        """The engine cannot go on. Only the first call for each death counts."""
        if self.up:
            self.up = False
            self.deaths += 1
            self._why = why
            self._death.set()
            self.on_died(why)

    def cause_found(self) -> None:
        """What the engine died of will not come again: the back-off begins anew."""
        self._attempt = 0

    async def keep_alive(self) -> None:
        """Side task: restart the engine after each death; raise `Unavailable` when it will not start."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            await self._death.wait()
            self._death.clear()
            if loop.time() - started > STEADY_S:
                self._attempt = 0
            await self._restart(self._attempt)
            if self._stopped:
                return
            self._attempt += 1
            started = loop.time()
            self.up = True
            log.info("engine is back", extra={"deaths": self.deaths})
            self.on_up()

    async def _restart(self, attempt: int) -> None:
        failed = 0
        while not self._stopped:
            delay = backoff_s(attempt + failed, base=0.2, cap=30.0)
            log.error("engine died", extra={"reason": self._why[:300], "restart_in_s": round(delay, 2)})
            await self._stop_engine()
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

    async def _stop_engine(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self.engine.stop()
        except TimeoutError:
            log.error("the engine does not stop, and is left behind", extra={"waited_s": STOP_S})  # noqa: TRY400
        except Exception:
            log.exception("the engine could not be stopped")

    async def watch_tokens(self, timeout_s: float, running: Callable[[], int]) -> None:
        """Side task, the watchdog: items run and no token came for `timeout_s` means that the engine is dead.

        It counts tokens and not heartbeats, since a hung engine answers those. Time in which this process did not
        run either (it was stopped, the machine slept) is no time that the engine had.
        """
        loop = asyncio.get_running_loop()
        tick_s = min(1.0, timeout_s / 4)
        seen, engine, stalled_s, looked = -1, self.engine, 0.0, loop.time()
        while True:
            await asyncio.sleep(tick_s)
            now = loop.time()
            passed_s, looked = min(now - looked, 2 * tick_s), now
            made = self.engine.tokens_generated()
            if made != seen or engine is not self.engine or not running() or not self.up:
                seen, engine, stalled_s = made, self.engine, 0.0
                continue
            stalled_s += passed_s
            if stalled_s > timeout_s:
                self.died(f"no token for {timeout_s:g} s with {running()} items running")
