"""Leases of running work, renewed by a thread that compute cannot block.

The thread has its own event loop and its own connection, and shares one dictionary with the service:
a handler that keeps the service's loop busy for longer than ack_wait still keeps its leases.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from headrace.contracts.errors import HeadraceError
from headrace.mesh import wire
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery
from headrace.mesh.settings import Settings
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.mesh.leases")
IN_PROGRESS = b"+WPI"


class LeaseKeeper:
    """Renews each held lease when a third of its `ack_wait` is over.

    `failed` is set if the thread ends by itself; the service stops then, since its leases lapse.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = f"{name}-leases"
        self._held: dict[str, tuple[float, float]] = {}  # reply subject -> (renewed at, ack_wait_s)
        self._stop = threading.Event()
        self._started = threading.Event()
        self.failed = threading.Event()
        self.renewed = 0
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Start the thread and wait until it is connected; raise if it cannot."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        await asyncio.to_thread(self._started.wait)
        if self.failed.is_set():
            msg = "the thread that renews leases could not connect to the broker"
            raise HeadraceError(msg, code="unavailable")

    async def watch(self) -> None:
        """Raise once the thread has ended by itself; run it as a side task of the service."""
        while not self.failed.is_set():  # noqa: ASYNC110  (set by a thread, seldom: a poll is enough)
            await asyncio.sleep(1.0)
        msg = "the thread that renews leases ended"
        raise HeadraceError(msg)

    async def stop(self) -> None:
        """End the thread; leases that are still held lapse after their ack_wait."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10.0)

    def add(self, delivery: Delivery) -> None:
        """Hold the lease of `delivery` from now on."""
        self._held[delivery.reply] = (time.monotonic(), delivery.ack_wait_s)

    def discard(self, delivery: Delivery) -> None:
        """Renew `delivery` no more."""
        self._held.pop(delivery.reply, None)

    def __len__(self) -> int:
        return len(self._held)

    # --- the thread --------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except Exception:
            log.exception("lease renewal ended")
            self.failed.set()
        finally:
            self._started.set()

    async def _keep(self) -> None:
        async with await Mesh.connect(self._settings, name=self._name) as mesh:
            self._started.set()
            tick = max(0.05, self._settings.ack_wait_s / 12)
            while not self._stop.is_set():
                await asyncio.sleep(tick)
                if mesh.closed.is_set():
                    msg = "the connection of the lease keeper was closed"
                    raise HeadraceError(msg)
                await self._renew_due(mesh)

    async def _renew_due(self, mesh: Mesh) -> None:
        now = time.monotonic()
        due = [r for r, (at, ack_wait_s) in list(self._held.items()) if now - at >= ack_wait_s / 3]
        for i in range(0, len(due), 1_000):
            await mesh.publish_frames(
                [wire.frame(OutMessage(reply, IN_PROGRESS)) for reply in due[i : i + 1_000]]
            )
        for reply in due:
            held = self._held.get(reply)
            if held is not None:  # settled meanwhile: renewing a settled message changes nothing
                self._held[reply] = (now, held[1])
                self.renewed += 1
