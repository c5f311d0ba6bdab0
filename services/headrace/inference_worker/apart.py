"""Items that must run apart: one at a time, with nothing beside them in the engine.

While there is one nothing else is pulled, and what is here already runs first: what would still wait when a trial ends
the process would lose a try for nothing. Then they run, who was started last first, since an engine most often dies of
the item that it took in last. Their leases are renewed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from headrace.inference_worker.intake import Item


class Apart:
    """The queue of such items.

    `must`: whether an item has to run apart, as far as is known here; `is_cleared` asks others too, right before its
    turn; `release` takes one that need not. `is_free`: the engine is up and empty, and nothing else waits for it.
    `run` starts an item and returns when it has ended. `resume` is called after each, and when the queue is empty
    again: what came meanwhile may start.
    """

    def __init__(
        self,
        *,
        must: Callable[[Item], bool],
        is_free: Callable[[], bool],
        is_cleared: Callable[[Item], Awaitable[bool]],
        release: Callable[[Item], None],
        run: Callable[[Item], Awaitable[None]],
        resume: Callable[[], None],
    ) -> None:
        self._must = must
        self._is_free = is_free
        self._is_cleared = is_cleared
        self._release = release
        self._run = run
        self._resume = resume
        self._items: dict[Item, None] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.on_trial = False
        """Whether one runs now, so that nothing may be started."""

    @property
    def busy(self) -> bool:
        """Whether some are here, so that nothing may be pulled."""
        return self._task is not None

    def __contains__(self, item: Item) -> bool:
        return item in self._items

    def items(self) -> list[Item]:
        """Those whose turn has not come."""
        return list(self._items)

    def add(self, item: Item) -> None:
        """Run `item` apart when its turn comes."""
        self._items[item] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._take_turns(), name="apart")

    def drop(self, item: Item) -> None:
        """Hold it no longer, and do nothing with it."""
        self._items.pop(item, None)
        self.look()

    def take_all(self) -> list[Item]:
        """Hold nothing any more; return what was held."""
        items = self.items()
        self._items.clear()
        self.look()
        return items

    def look(self) -> None:
        """Something has changed: an item ended, the engine is back."""
        self._changed.set()

    async def _take_turns(self) -> None:
        try:
            while self._items:
                for item in self.items():
                    if not self._must(item):
                        del self._items[item]
                        self._release(item)
                if not self._items:
                    break
                if not self._is_free():
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                item = newest(self._items)
                cleared = await self._is_cleared(item)
                if item not in self._items or not (cleared or self._is_free()):
                    continue
                del self._items[item]
                if cleared:
                    self._release(item)
                else:
                    self.on_trial = True
                    await self._run(item)
                    self.on_trial = False
                    self._resume()
        finally:
            self._task, self.on_trial = None, False
            self._resume()


def newest(items: Iterable[Item]) -> Item:
    """Who went into an engine last."""
    return max(items, key=lambda item: item.order_us)
