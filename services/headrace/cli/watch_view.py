"""What `watch` draws on standard error: a live table on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.cli.live_view import LiveView
from headrace.cli.output import clock_text, say
from headrace.cli.watching import ENDED, Pace, terminal_items
from headrace.contracts.api import JobStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY_S = 5.0
SAME_LINE_EVERY_S = 60.0


class WatchView(LiveView):
    """Shows each reading; used as a context so that the terminal is left in order."""

    def __init__(self, *, live: bool | None = None) -> None:
        super().__init__(live=live)
        self._pace = Pace()
        self._next_line = 0.0
        self._last_line = ""
        self._repeat_at = 0.0

    def show(self, status: JobStatus) -> None:
        """One reading."""
        now = time.monotonic()
        self._pace.add(status, now)
        if self._live is not None:
            self._live.update(self._table(status), refresh=True)
        elif now >= self._next_line and status.state not in ENDED:
            line = self.line(status)
            if line == self._last_line and now < self._repeat_at:
                return
            self._last_line = line
            self._next_line, self._repeat_at = now + LINE_EVERY_S, now + SAME_LINE_EVERY_S
            say(line)

    def line(self, status: JobStatus) -> str:
        """A reading in one line."""
        parts = [f"{terminal_items(status):,} of {status.submitted:,} landed", f"ok {status.ok:,}"]
        parts += [f"{name} {n:,}" for name in ("failed", "dead", "cancelled") if (n := getattr(status, name))]
        parts += [f"queued {status.queued:,}", f"running {status.running:,}", f"landing {status.landing:,}"]
        parts += [f"{self._pace.tokens_per_s:,.0f} tokens/s", f"ETA {clock_text(self._pace.eta_s(status))}"]
        straggler = straggler_text(status)
        return f"{status.job} {status.state}: " + ", ".join(parts) + (f", {straggler}" if straggler else "")

    def _table(self, status: JobStatus) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        columns = ("ok", "failed", "dead", "cancelled", "queued", "running", "landing")
        table = Table(show_edge=False, pad_edge=False, header_style="bold")
        for column in (*columns, "items/s", "tokens/s", "ETA"):
            table.add_column(column, justify="right")
        style = "red" if status.failed or status.dead else "green"
        table.add_row(
            *(
                Text(f"{getattr(status, c):,}", style=style if c in {"failed", "dead"} else "")
                for c in columns
            ),
            f"{self._pace.items_per_s:,.1f}",
            f"{self._pace.tokens_per_s:,.1f}",
            clock_text(self._pace.eta_s(status)),
        )
        done = terminal_items(status)
        head = Text(f"{status.job}  {status.state}  {done:,} of {status.submitted:,}")
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(1, status.submitted), completed=done, width=60))
        straggler = straggler_text(status)
        return Group(head, bar, table, *([Text(straggler, style="dim")] if straggler else []))


def straggler_text(status: JobStatus, *, now_us: int | None = None) -> str:
    """The oldest running item, if workers report one."""
    if status.oldest_running_us is None or not status.running:
        return ""
    now_us = int(time.time() * 1e6) if now_us is None else now_us
    return f"oldest running item: {clock_text(max(0.0, (now_us - status.oldest_running_us) / 1e6))}"
