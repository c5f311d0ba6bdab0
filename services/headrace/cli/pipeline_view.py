"""What `headrace pipeline` shows: a row for each stage, live on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from headrace.cli.live_view import LiveView
from headrace.cli.output import print_line, print_table, say, when_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headrace.contracts.pipeline import PipelineAudit, PipelineStatus, StageStatus

COLUMNS: Final = (
    "submitted", "ok", "failed", "dead", "cancelled", "queued", "landing", "waiting", "lost", "unfit",
)  # fmt: skip
LINE_EVERY_S: Final = 2.0


class PipelineView(LiveView):
    """Shows a pipeline on standard error as it runs; used as a context so that the terminal is left in order."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""
        self._next_line = 0.0

    def show(self, found: PipelineStatus) -> None:
        """One reading."""
        if self._live is not None:
            self._live.update(_table(found), refresh=True)
            return
        text = line(found)
        if text != self._last and time.monotonic() >= self._next_line:
            self._last, self._next_line = text, time.monotonic() + LINE_EVERY_S
            say(text)


def line(found: PipelineStatus) -> str:
    """A reading in one line: what has an outcome of what each stage has."""
    parts = [f"{s.stage} {_ended(s):,}/{s.submitted:,}" for s in found.stages]
    return f"{found.pipeline} {found.state}: {', '.join(parts)}"


def print_pipeline(found: PipelineStatus) -> None:
    """Every stage as a table on standard output."""
    more = f", deadline {when_text(found.deadline_us)}" if found.deadline_us else ""
    why = f", {found.reason}" if found.reason else ""
    print_line(f"pipeline {found.pipeline}: {found.state}{why}{more}")
    print_table(("stage", "function", "state", *COLUMNS), [_row(s) for s in found.stages])


def print_proof(found: PipelineAudit) -> None:
    """Every stage with its proof on standard output."""
    verdict = "balanced" if found.balanced else "NOT balanced"
    print_line(f"pipeline {found.pipeline}: {found.state}, {verdict}")
    print_table(("stage", "function", "state", *COLUMNS), [_row(s) for s in found.stages])
    print_table(
        ("stage", "arrived", "fed", "assigned", "expected", "balanced"),
        [(s.stage, s.arrived, s.fed, s.assigned, s.expected, s.balanced) for s in found.stages],
    )
    for stage in found.stages:
        for problem in stage.problems:
            print_line(f"stage {stage.stage}: {problem}")


def _table(found: PipelineStatus) -> RenderableType:
    from rich.table import Table

    table = Table(
        title=f"{found.pipeline} {found.state}", show_edge=False, pad_edge=False, header_style="bold"
    )
    table.add_column("stage")
    table.add_column("state")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for stage in found.stages:
        table.add_row(stage.stage, stage.state, *(f"{getattr(stage, name):,}" for name in COLUMNS))
    return table


def _row(stage: StageStatus) -> tuple[object, ...]:
    return stage.stage, stage.function, stage.state, *(getattr(stage, name) for name in COLUMNS)


def _ended(stage: StageStatus) -> int:
    return stage.ok + stage.failed + stage.dead + stage.cancelled
