"""SIGSTOP that ends by itself: whoever stopped a process may be killed before it wakes it again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator

_WAKE = 'sleep "$1"; kill -CONT "$2"'


@contextlib.asynccontextmanager
async def stopped(pid: int, *, seconds: float) -> AsyncGenerator[None]:
    """SIGSTOP the process while the block lasts, at most a little over `seconds` even if we are killed meanwhile."""
    watcher = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", _WAKE, "wake", f"{seconds + 1.0:.2f}", str(pid), start_new_session=True
    )
    try:
        _send(pid, signal.SIGSTOP)
        yield
    finally:
        _send(pid, signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(watcher.pid, signal.SIGKILL)
        await watcher.wait()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
