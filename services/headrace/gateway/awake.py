"""A time-out that counts the time in which this process ran.

A process that was stopped (SIGSTOP, a paused virtual machine) finds its time over when it wakes, and the answer that
came meanwhile in its socket. What came is read first: it is the only word of the callee that there will ever be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

TICK_S = 0.25
"""A wait that takes twice as long as this was none: the process did not run."""

T = TypeVar("T")


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of `work`; raise `TimeoutError` after `seconds` of running, `work` cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    left = seconds
    try:
        while not task.done():
            if left <= 0:
                raise TimeoutError
            planned, began = min(left, TICK_S), time.monotonic()
            await asyncio.wait({task}, timeout=planned)
            left -= min(time.monotonic() - began, 2 * planned)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
