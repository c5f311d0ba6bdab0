"""What a run shows on standard error while it goes on: a live line on a terminal, else a line for each event."""

from __future__ import annotations

import time
from typing import Final

from headrace.cli.chaos_kit.faults import Done
from headrace.cli.live_view import LiveView
from headrace.cli.output import clock_text, say
from headrace.contracts.api import JobAudit

LINE_EVERY_S: Final = 5.0


class ChaosView(LiveView):
    """Shows samples and faults; used as a context so that the terminal is left in order."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self._items = items
        self._faults = 0
        self._began = time.monotonic()
        self._next_line = 0.0

    def begin(self) -> None:
        """The run begins now: times are counted from here."""
        self._began = time.monotonic()

    def fault(self, done: Done) -> None:
        """A fault that was just done."""
        self._faults += 1
        self.note(fault_line(done))

    def sample(self, audit: JobAudit) -> None:
        """An audit that was just answered."""
        line = self._line(audit)
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(line, style="" if audit.balanced else "red"), refresh=True)
        elif time.monotonic() >= self._next_line or not audit.balanced:
            self._next_line = time.monotonic() + LINE_EVERY_S
            say(line)

    def _line(self, a: JobAudit) -> str:
        landed = a.ok + a.failed + a.dead + a.cancelled
        parts = [f"{landed:,} of {self._items:,} landed", f"queued {a.queued:,}", f"landing {a.landing:,}"]
        parts += [f"duplicates {a.duplicates:,}", f"{self._faults} faults"]
        parts += ["balanced" if a.balanced else "NOT balanced"]
        return f"{clock_text(time.monotonic() - self._began):>8}  {a.state}: " + ", ".join(parts)


def fault_line(done: Done) -> str:
    """A fault in one line: time, kind, victim, pid, and what more there is to say."""
    more = [f"pid {done.pid}"] if done.pid else []
    more += [f"for {done.seconds:g} s"] if done.seconds else []
    more += [f"{done.count} messages"] if done.count else []
    more += [done.note] if done.note else []
    return f"{done.at_s:>7.2f} s  {done.fault:<10}  {done.victim:<10}  {', '.join(more)}"
