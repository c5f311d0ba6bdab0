"""The table of the gateway's benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 140
ITSELF, PAID = "the callee itself", "agent, a budget"


class Line(Struct, frozen=True, kw_only=True):
    """What callers saw of one way to call, at one number of callers: times in ms, rates a second, CPU in µs a call.

    `direct_*` are of the callee itself, asked by the same loop in the same run. `cpu` names processes.
    """

    way: str
    durability: str
    callers: int
    p50: float
    p99: float
    direct_p50: float
    direct_p99: float
    rate: float
    cpu: dict[str, float] = {}

    @property
    def added_p50(self) -> float:
        """What the way in between adds to half of the calls, in ms."""
        return self.p50 - self.direct_p50

    @property
    def added_p99(self) -> float:
        """The same of the slowest hundredth."""
        return self.p99 - self.direct_p99

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"added_p50": self.added_p50, "added_p99": self.added_p99}


class Goal(Struct, frozen=True):
    """What was to be reached, what was seen, and whether it was."""

    what: str
    seen: str
    met: bool

    def __str__(self) -> str:
        return f"{'met    ' if self.met else 'NOT met'}  {self.what}: {self.seen}"


def median(lines: Sequence[Line]) -> Line:
    """One line for the repetitions of a measurement: the median of each number."""

    def middle(name: str) -> float:
        return statistics.median(getattr(line, name) for line in lines)

    first = lines[0]
    return Line(
        way=first.way, durability=first.durability, callers=first.callers, rate=middle("rate"),
        p50=middle("p50"), p99=middle("p99"), direct_p50=middle("direct_p50"), direct_p99=middle("direct_p99"),
        cpu={name: statistics.median(line.cpu.get(name, 0.0) for line in lines) for name in first.cpu},
    )  # fmt: skip


def goals(lines: Sequence[Line]) -> list[Goal]:
    """What the gateway should do, by one process."""

    def find(durability: str, callers: int) -> Line | None:
        ours = [x for x in lines if x.way == "agent" and (x.durability, x.callers) == (durability, callers)]
        return ours[0] if ours else None

    found: list[Goal] = []
    for durability, limit in (("relaxed", 5.0), ("safe", 15.0)):
        if (line := find(durability, 16)) is not None:
            what = f"adds at most {limit:g} ms to half of the calls of 16 callers under {durability}"
            found.append(Goal(what, f"{line.added_p50:.1f} ms", line.added_p50 <= limit))
    for way, more in (("agent", ""), (PAID, ", each on a budget")):
        rates = [x.rate for x in lines if x.way == way and x.durability == "relaxed"]
        if rates:
            what = f"at least 2,000 calls/s under relaxed{more}"
            found.append(Goal(what, f"{max(rates):,.0f} calls/s", max(rates) >= 2_000))
    return found


def show(
    console: Console,
    machine: dict[str, str],
    lines: Sequence[Line],
    said: Sequence[str],
    reached: Sequence[Goal],
) -> None:
    """Print the machine, the table, goals and notes."""
    facts = Table.grid(padding=(0, 2))
    for name, value in machine.items():
        facts.add_row(name, value)
    console.print(facts, markup=False)
    console.print()
    if lines:
        console.print(_table(lines))
    for goal in reached:
        console.print(str(goal), markup=False, highlight=False)
    for note in said:
        console.print(note, markup=False, highlight=False)


def _table(lines: Sequence[Line]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way", no_wrap=True, min_width=26)
    names = (
        "callers",
        "direct p50",
        "p50",
        "adds p50",
        "adds p99",
        "calls/s",
        "of direct",
        "CPU µs",
        "broker",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    direct = {(x.durability, x.callers): x.rate for x in lines if x.way == ITSELF}
    last = ""
    for line in lines:
        if last and line.durability != last:
            table.add_section()
        last = line.durability
        by = direct.get((line.durability, line.callers)) or direct.get(("relaxed", line.callers))
        itself = line.way == ITSELF
        table.add_row(
            f"{line.way}{f', {line.durability}' if line.durability else ''}",
            str(line.callers),
            "" if itself else f"{line.direct_p50:.2f}",
            f"{line.p50:.2f}",
            "" if itself else f"{line.added_p50:.2f}",
            "" if itself else f"{line.added_p99:.2f}",
            f"{line.rate:,.0f}",
            "" if itself or not by else f"{line.rate / by:.1%}",
            f"{sum(x for name, x in line.cpu.items() if name != 'broker'):,.0f}" if line.cpu else "",
            f"{line.cpu['broker']:,.0f}" if "broker" in line.cpu else "",
        )
    return table


def write_text(
    path: Path, machine: dict[str, str], lines: Sequence[Line], said: Sequence[str], reached: Sequence[Goal]
) -> None:
    """The same as text, without colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        console = Console(file=out, width=WIDTH, no_color=True, force_terminal=False)
        show(console, machine, lines, said, reached)
