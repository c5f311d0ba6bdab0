"""Following a job to its end: the readings, what they say about pace, and what the end means."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from headrace.cli.exit_codes import Exit
from headrace.cli.status import job_status
from headrace.contracts.api import JobStatus
from headrace.contracts.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

R = TypeVar("R")

ENDED: Final = frozenset({"completed", "completed_with_errors", "cancelled"})
APPEARS_WITHIN_S: Final = 3.0
"""A job that was opened a moment ago may not be known to completion yet."""

AWAY_PAUSE_S: Final = 1.0
"""The longest pause between two questions to a service that does not answer, unless readings are further apart."""
_ONE_READING_S: Final = 1.0
"""What a reading may take however little time is left, so that there is one to show."""


class Pace:
    """Items and tokens a second over the last readings, and the time that is left at that pace."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, int, int]] = deque()

    def add(self, status: JobStatus, now: float) -> None:
        """Take one reading in at `now` (seconds of any monotonic clock)."""
        self._readings.append((now, terminal_items(status), status.tokens_out))
        while now - self._readings[0][0] > self._window_s and now - self._readings[1][0] >= self._window_s:
            self._readings.popleft()

    @property
    def items_per_s(self) -> float:
        """Landed items a second; 0 if there is only one reading."""
        return self._rate(1)

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second; 0 if there is only one reading."""
        return self._rate(2)

    def eta_s(self, status: JobStatus) -> float | None:
        """Seconds until the rest has landed at this pace; None if nothing moves."""
        left = status.submitted - terminal_items(status)
        return left / self.items_per_s if self.items_per_s > 0 else None

    def _rate(self, column: int) -> float:
        if not self._readings:
            return 0.0
        first, last = self._readings[0], self._readings[-1]
        seconds = last[0] - first[0]
        return max(0.0, (last[column] - first[column]) / seconds) if seconds > 0 else 0.0


def terminal_items(status: JobStatus) -> int:
    """Items that have their outcome in the data plane."""
    return status.ok + status.failed + status.dead + status.cancelled


def exit_of(status: JobStatus) -> Exit:
    """What the end of a job means for `watch`."""
    if status.state == "cancelled":
        return Exit.CANCELLED
    return Exit.ITEMS_FAILED if status.failed or status.dead else Exit.OK


async def follow(
    mesh: Mesh,
    job: str,
    *,
    show: Callable[[JobStatus], None],
    trouble: Callable[[str], None],
    timeout_s: float | None = None,
    interval_s: float = 0.5,
) -> JobStatus | None:
    """Read the job's status until it has ended, and return the last; None if `timeout_s` is over before."""
    return await follow_readings(
        lambda: job_status(mesh, job),
        lambda status: status.state in ENDED,
        show=show,
        trouble=trouble,
        timeout_s=timeout_s,
        interval_s=interval_s,
    )


async def follow_readings(
    read: Callable[[], Awaitable[R]],
    ended: Callable[[R], bool],
    *,
    show: Callable[[R], None],
    trouble: Callable[[str], None],
    timeout_s: float | None = None,
    interval_s: float = 0.5,
    first_s: float = 0.05,
) -> R | None:
    """Read until what is read has ended, and return the last; None if `timeout_s` is over before.

    While the broker or completion is away it goes on trying, and says so once each time. `NotFound` if the
    job does not appear within seconds. The pauses grow from `first_s` to `interval_s`: short jobs end soon.
    """
    began = time.monotonic()
    deadline = None if timeout_s is None else began + timeout_s
    away, known, misses = False, False, 0
    pause = min(first_s, interval_s)
    while True:
        left_s = None if deadline is None else max(_ONE_READING_S, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                found = await read()
        except TimeoutError:
            return None
        except Unavailable as e:
            if not away:
                trouble(f"{e}; trying again")
            away, misses = True, misses + 1
        except NotFound:
            if known or time.monotonic() >= min(began + APPEARS_WITHIN_S, deadline or math.inf):
                raise
        else:
            if away:
                trouble("answering again")
            away, known, misses = False, True, 0
            show(found)
            if ended(found):
                return found
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return None
        wait = max(pause, min(AWAY_PAUSE_S, 0.05 * 2**misses)) if away else pause
        await asyncio.sleep(wait if deadline is None else min(wait, max(0.0, deadline - now)))
        pause = min(pause * 1.5, interval_s)
