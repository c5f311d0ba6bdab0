"""Items that are here and do not fit yet.

A full worker gets them through a probe (see `lanes`), or when an item's exact tokens exceed what its shape
promised. Such an item is the next to start. If that is not within `HOLD_S`, it goes back for another worker
to take, but only on its first delivery: giving back costs a try, and an item that full workers pass around
would die of it. On a later delivery it is held, its lease renewed and its place kept in the budget, until it
starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from headrace.contracts.names import Lane
from headrace.inference_worker.intake import Item
from headrace.inference_worker.ledger import TokenLedger

HOLD_S: Final = 0.5
"""How soon "soon" is: a busy engine ends several items in that time, and nobody minds it on top of a queue.
"""
_ORDER: Final = {Lane.URGENT: 0, Lane.NORMAL: 1, Lane.BULK: 2}


class Waiting:
    """The held items of a worker, each counted in the ledger while it is here."""

    def __init__(
        self,
        ledger: TokenLedger,
        *,
        start: Callable[[Item], None],
        give_back: Callable[[Item], None],
        hold_s: float = HOLD_S,
    ) -> None:
        self._ledger = ledger
        self._start = start
        self._give_back = give_back
        self._hold_s = hold_s
        self._items: dict[Item, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return item in self._items

    def items(self) -> list[Item]:
        """What is held now."""
        return list(self._items)

    def add(self, item: Item) -> None:
        """Hold an item that was not admitted."""
        self._ledger.hold(item.cost)
        loop = asyncio.get_running_loop()
        self._items[item] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._hold_s, self._expire)

    def start_fitting(self) -> None:
        """Start what fits now, urgent first, then in the order of arrival; a large one blocks no small one."""
        if not self._items:
            return
        for item in sorted(self._items, key=_rank):
            if self._ledger.admit(item.cost):
                self._remove(item)
                self._start(item)

    def drop(self, item: Item) -> None:
        """Hold it no longer, and do nothing with it."""
        if item in self._items:
            self._remove(item)

    def give_back_all(self) -> None:
        """Nothing will start any more."""
        for item in self.items():
            self._remove(item)
            self._give_back(item)

    def _remove(self, item: Item) -> None:
        del self._items[item]
        self._ledger.unhold(item.cost)

    def _expire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        line = loop.time() - self._hold_s
        for item, since in list(self._items.items()):
            if item.delivery.delivered == 1 and since <= line:
                self._remove(item)
                self._give_back(item)
        movable = [since for item, since in self._items.items() if item.delivery.delivered == 1]
        if movable:
            self._timer = loop.call_later(max(0.01, min(movable) + self._hold_s - loop.time()), self._expire)


def _rank(item: Item) -> int:
    return _ORDER[item.lane.lane]
