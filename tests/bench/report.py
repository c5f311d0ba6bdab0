"""Measurements and the table that shows them."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 132


class Goal(Struct, frozen=True):
    """What a number must reach: at least `value`, or at most if `most`."""

    value: float
    most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.value if self.most else value >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.most else '≥'} {number(self.value)}"


class Row(Struct, kw_only=True):
    """One line: the values of all repetitions, the raw rate beside them, and what was to be reached."""

    part: str
    what: str
    unit: str = ""
    values: list[float] = []
    raw: float | None = None
    goal: Goal | None = None
    note: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        return self.value / self.raw if self.values and self.raw else None

    @property
    def verdict(self) -> str:
        if self.goal is None or not self.values:
            return ""
        return "met" if self.goal.met(self.value) else "NOT met"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "part": self.part,
            "what": self.what,
            "unit": self.unit,
            "median": self.value if self.values else None,
            "values": self.values,
            "raw": self.raw,
            "ratio": self.ratio,
            "goal": str(self.goal) if self.goal else None,
            "verdict": self.verdict,
            "note": self.note,
        }


def number(value: float) -> str:
    """As many digits as say something: 12,345 and 45.2 and 0.976."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"


def show(console: Console, machine: dict[str, str], rows: list[Row], notes: list[str]) -> None:
    """Print the machine, the table, and the notes."""
    facts = Table.grid(padding=(0, 2))
    for name, value in machine.items():
        facts.add_row(name, value)
    console.print(facts, markup=False)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name in ("median", "range × runs", "raw", "ratio", "goal"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    last = ""
    for row in rows:
        if last and row.part != last:
            table.add_section()
        table.add_row(*_cells(row, "" if row.part == last else row.part))
        last = row.part
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
        console.print()


def _cells(row: Row, part: str) -> list[str]:
    if not row.values:
        return [part, f"{row.what}: {row.note}" if row.note else row.what, "", "", "", "", "", ""]
    low, high, n = min(row.values), max(row.values), len(row.values)
    spread = f"{number(low)}–{number(high)} × {n}" if n > 1 else "× 1"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return [
        part,
        f"{row.what} ({row.note})" if row.note else row.what,
        f"{number(row.value)} {row.unit}".strip(),
        spread,
        "" if row.raw is None else number(row.raw),
        ratio,
        str(row.goal) if row.goal else "",
        row.verdict,
    ]


def write_text(path: Path, machine: dict[str, str], rows: list[Row], notes: list[str]) -> None:
    """The same as text, without colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        show(Console(file=out, width=WIDTH, no_color=True, force_terminal=False), machine, rows, notes)
