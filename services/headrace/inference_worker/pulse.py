"""Ends a process whose event loop stands still.

The token watchdog lives in the loop, and the leases are renewed by a thread that the loop cannot block: a call into
native code that never returns, in the loop's own thread, would hold every lease for ever. A thread watches the loop's
beat; where it has none for too long, the process ends as by a fault (SIGABRT), so that the flight recorder tells what
was in the engine, and whoever supervises the worker starts it again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Final

LEAST_S: Final = 10.0
"""Shorter stalls are no sign of anything: a large model's weights are read, a machine swaps."""
_WORDS: Final = (
    b"the worker's event loop stands still: the process is ended, so that its work can go on elsewhere\n"
)


class Pulse:
    """Watches the loop that it is started in; `timeout_s` of its own time without a beat ends the process."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = max(LEAST_S, timeout_s)
        self._tick_s = min(1.0, self._timeout_s / 4)
        self._beats = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to beat, and to watch."""
        self._beat()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def stop(self) -> None:
        """Watch no more; idempotent."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._beats += 1
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._beat)

    def _watch(self) -> None:
        # Ticks of this thread, not the clock on the wall: a process that is paused, or whose interpreter is held, gets
        # neither beats nor ticks.
        seen, missed = -1, 0
        while not self._stopped.wait(self._tick_s):
            beats = self._beats
            missed = missed + 1 if beats == seen else 0
            seen = beats
            if missed * self._tick_s >= self._timeout_s:
                os.write(2, _WORDS)
                os.abort()
