"""Places at each callee: how many calls of one gateway are there at once, and how fast they begin.

A call that finds no place waits in a short line, so that a place that becomes free is taken at once. What does not fit
into the line goes back to the queue for about as long as those before it will take: it holds no place of the gateway
meanwhile, so a callee at its limit is in nobody's way but its own callers'. A line is first come, first served; those
that went back come before new ones.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable

from headrace.gateway.callees import Callee
from headrace.gateway.way import Later, NotYet

LINE = 32
"""Calls that wait for one callee here; the others wait in the queue."""
SHORTEST_S, LONGEST_S = 0.1, 15.0
"""How soon, and how late, a call that went back is looked at again."""
LOST_S = 5.0
"""A call that does not come back so long after its time was taken by another gateway."""

Name = tuple[str, str]
"""Tenant and call."""


class Turns:
    """The lines of one gateway. `begun` is called when a call has got its place."""

    def __init__(self, *, most_waiting: int, begun: Callable[[], None] = lambda: None) -> None:
        self._lines: dict[str, _Line] = {}
        self._most_waiting = most_waiting
        self._closed = False
        self.begun = begun

    @property
    def at_callees(self) -> int:
        """Calls that are at a callee now."""
        return sum(line.taken for line in self._lines.values())

    @property
    def waiting(self) -> int:
        """Calls that wait in a line."""
        return sum(len(line.waiting) for line in self._lines.values())

    async def take(self, callee: Callee, name: Name) -> Callable[[], None]:
        """Wait for a place; call what is returned when it is free again. Raise `NotYet` if the line is full."""
        line = self._lines.get(callee.name)
        if line is None:
            line = self._lines[callee.name] = _Line(
                callee.settings.concurrency, callee.settings.rate_per_s, self._has_begun
            )
        if self._closed or not line.takes(name, room=self.waiting < self._most_waiting):
            raise NotYet(Later(line.park(name)))
        return await line.take(name)

    def _has_begun(self) -> None:
        self.begun()

    def close(self) -> None:
        """Send back all who wait, and whoever comes."""
        self._closed = True
        for line in self._lines.values():
            line.close()


class _Line:
    def __init__(self, places: int, rate_per_s: float | None, begun: Callable[[], None]) -> None:
        self.taken = 0
        self.waiting: deque[asyncio.Future[None]] = deque()
        self._places = places
        self._spacing_s = 0.0 if rate_per_s is None else 1.0 / rate_per_s
        self._longest = min(LINE, places, LINE if rate_per_s is None else max(1, int(rate_per_s)))
        self._begun = begun
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._parked: dict[Name, float] = {}
        self._swept_at = 0.0
        self._stay_s = 0.0
        """How long a call is at the callee, as the last ones were."""

    # --- coming in ---------------------------------------------------------------------------------
    def takes(self, name: Name, *, room: bool) -> bool:
        """Whether the call may wait here. A new one may not pass by those that were sent back."""
        if self._is_free():
            return True
        if not room or len(self.waiting) >= self._longest:
            return False
        self._sweep()
        return not self.waiting or not self._parked or name in self._parked

    def park(self, name: Name) -> float:
        """The call goes back to the queue; for how long, in seconds."""
        pace_s = max(self._spacing_s, self._stay_s / self._places)
        ahead = len(self.waiting) + len(self._parked) + 1
        delay = min(LONGEST_S, max(SHORTEST_S, ahead * pace_s)) * random.uniform(0.9, 1.1)
        self._parked[name] = time.monotonic() + delay
        return delay

    async def take(self, name: Name) -> Callable[[], None]:
        """A place, once there is one."""
        self._parked.pop(name, None)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        self._serve()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._free()
            raise
        began, freed = time.monotonic(), False
        self._begun()

        def free() -> None:
            nonlocal freed
            if not freed:
                freed = True
                stay_s = time.monotonic() - began
                self._stay_s = 0.8 * self._stay_s + 0.2 * stay_s if self._stay_s else stay_s
                self._free()

        return free

    # --- serving -----------------------------------------------------------------------------------
    def _is_free(self) -> bool:
        return self.taken < self._places and not self.waiting and self._next_at <= time.monotonic()

    def _free(self) -> None:
        self.taken -= 1
        self._serve()

    def _serve(self) -> None:
        while self.waiting and self.taken < self._places:
            now = time.monotonic()
            if self._next_at > now:
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(self._next_at - now, self._on_time)
                return
            future = self.waiting.popleft()
            if not future.done():
                # From when it was due, if that is only just over: timers are late, and the rate would suffer.
                self._next_at = max(self._next_at, now - self._spacing_s) + self._spacing_s
                self.taken += 1
                future.set_result(None)

    def _on_time(self) -> None:
        self._timer = None
        self._serve()

    def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept_at > 1.0:
            self._swept_at = now
            self._parked = {name: due for name, due in self._parked.items() if due > now - LOST_S}

    def close(self) -> None:
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                future.set_exception(NotYet(Later(SHORTEST_S)))
