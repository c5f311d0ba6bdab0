"""One lane of a mailbox, pulled for as long as it is open. That work is leased one by one is the broker's care."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer


class LanePull:
    """Keeps up to `window` messages asked for, and gives out what comes."""

    def __init__(
        self, mesh: Mesh, agent: str, lane: str, receive: Callable[[Delivery], None], *, window: int
    ) -> None:
        self._window = window
        self._receive = receive
        self._open = False
        self._in_turn = asyncio.Lock()
        self._consumer = PullConsumer(
            mesh, mesh.topology.mail_consumer(agent, lane), self._on_delivery, on_demand_lost=self._ask
        )

    @property
    def open(self) -> bool:
        """Whether it is pulling."""
        return self._open

    async def start(self) -> None:
        """Begin to pull; nothing if it does already."""
        async with self._in_turn:
            if self._open:
                return
            self._open = True
            await self._consumer.start()
            self._ask()

    async def stop(self) -> None:
        """Pull no more; what is on its way still comes before this returns."""
        async with self._in_turn:
            if self._open:
                self._open = False
                await self._consumer.stop()

    def _on_delivery(self, delivery: Delivery) -> None:
        self._receive(delivery)
        self._ask()

    def _ask(self) -> None:
        missing = self._window - self._consumer.outstanding
        # Many at once, so that requests are few: how many are leased at once is the consumer's own bound.
        if self._open and missing > self._window // 2:
            self._consumer.ask(missing)
