"""The table of the agents' benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 140
GOAL_MS = 1_000.0
SHOWN = 20


@dataclass(frozen=True)
class Phase:
    """One lane: so many messages in so many seconds, and others `beside` them that it takes."""

    lane: str
    messages: int
    seconds: float
    beside: int = 0
    cpu_us: dict[str, float] = field(default_factory=dict)
    """CPU time of hosts and broker, in microseconds."""

    @property
    def rate(self) -> float:
        """Messages of this lane a second."""
        return self.messages / self.seconds


@dataclass
class Run:
    """One durability."""

    durability: str
    agents: int
    hosts: int
    phases: list[Phase] = field(default_factory=list)
    backlog: tuple[int, int] = (0, 0)
    """Messages that waited at the first and at the last stop."""
    stop_ms: list[float] = field(default_factory=list)
    memory_mib: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """Of all phases."""
        return sum(phase.messages + phase.beside for phase in self.phases)

    @property
    def rate(self) -> float:
        """Messages a second over all phases."""
        return self.messages / sum(phase.seconds for phase in self.phases)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"messages": self.messages, "rate": self.rate}


def show(console: Console, machine: dict[str, str], runs: Sequence[Run]) -> None:
    """Print machine, rates, stops and memory, and what is wrong."""
    facts = Table.grid(padding=(0, 2))
    for what, value in machine.items():
        facts.add_row(what, value)
    console.print(facts, markup=False)
    for run in runs:
        console.print()
        console.print(_rates(run))
        p50, most = statistics.median(run.stop_ms), max(run.stop_ms)
        first, last = run.backlog
        stops = (
            f"stop under a backlog of {first:,} messages at the first and {last:,} at the last of {len(run.stop_ms)}: "
            f"p50 {p50:.0f} ms, max {most:.0f} ms (goal: max < {GOAL_MS:.0f} ms: "
            f"{'met' if most < GOAL_MS else 'NOT met'})"
        )
        lines = [
            stops,
            "peak memory: " + ", ".join(f"{what} {mib:.0f} MiB" for what, mib in run.memory_mib.items()),
            *(f"WRONG: {what}" for what in run.wrong[:SHOWN]),
        ]
        if not run.wrong:
            lines.append("each message was delivered once, and in order for each sender")
        for line in lines:
            console.print(line, markup=False, highlight=False)


def _rates(run: Run) -> Table:
    title = f"{run.agents} agents in {run.hosts} hosts, {run.durability}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("lane", no_wrap=True)
    for column in ("messages", "seconds", "messages/s", "with others", "hosts CPU µs", "broker CPU µs"):
        table.add_column(column, justify="right", no_wrap=True)
    for phase in run.phases:
        together = (phase.messages + phase.beside) / phase.seconds
        table.add_row(
            phase.lane,
            f"{phase.messages:,}",
            f"{phase.seconds:.1f}",
            f"{phase.rate:,.0f}",
            f"{together:,.0f}" if phase.beside else "",
            *(f"{us / (phase.messages + phase.beside):,.0f}" for us in phase.cpu_us.values()),
        )
    seconds = sum(phase.seconds for phase in run.phases)
    table.add_row("all", f"{run.messages:,}", f"{seconds:.1f}", f"{run.rate:,.0f}", "")
    return table
