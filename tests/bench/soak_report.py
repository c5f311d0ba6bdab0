"""The tables of the soak: what an item costs at each size, where the knee is, and what twenty kills left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.cli.chaos_kit.plan import BROKER, COMPLETION, SUBMIT, WORKER
from headrace.cli.chaos_kit.report import Report
from headrace.cli.chaos_kit.verdict import Verdict

WIDTH: Final = 170
MEASURED: Final = {"submit": SUBMIT, "worker-1": WORKER, "completion": COMPLETION, "nats-server": BROKER}
"""Processes that are measured, with the names of their components."""
STEADY: Final = 0.15
"""Values this close to each other count as the same."""


class Flat(Struct, kw_only=True):
    """One undisturbed run."""

    items: int
    wall_s: float
    cpu_s: dict[str, float]
    peak_mb: dict[str, float]
    verdict: Verdict


def problems(one: Flat) -> list[str]:
    """What is wrong with an undisturbed run."""
    v = one.verdict
    wrong = {"lost": v.lost, "doubled": v.doubled, "mismatched": v.mismatched, "not ok": v.items - v.ok}
    return [f"{count:,} of {one.items:,} items {name}" for name, count in wrong.items() if count]


def print_soak(
    console: Console,
    machine: dict[str, str],
    flats: Sequence[Flat],
    report: Report,
    peak_mb: dict[str, float],
) -> None:
    """The machine, the undisturbed runs with the knee of each curve, and the soak."""
    facts = Table.grid(padding=(0, 2))
    for name, value in machine.items():
        facts.add_row(name, value)
    console.print(facts, markup=False)
    console.print()
    if flats:
        _print_flats(console, flats)
    _print_soak(console, report, peak_mb)


def _print_flats(console: Console, flats: Sequence[Flat]) -> None:
    console.print("Undisturbed: echo, one worker, the whole job queued")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("items", "wall", "items/s", "µs an item", "of each more", "CPU µs an item")
    for column in (*columns, *(f"{name} MB" for name in MEASURED.values()), "lost", "doubled"):
        table.add_column(column, justify="right", no_wrap=True)
    for before, one in zip([None, *flats], flats, strict=False):
        peaks = [f"{one.peak_mb.get(name, 0.0):,.0f}" for name in MEASURED]
        table.add_row(
            f"{one.items:,}",
            f"{one.wall_s:,.1f} s",
            f"{one.items / one.wall_s:,.0f}",
            f"{_wall_us(one):,.0f}",
            "" if before is None else f"{_more_us(before, one):,.0f}",
            f"{_cpu_us(one):,.0f}",
            *peaks,
            f"{one.verdict.lost}",
            f"{one.verdict.doubled}",
        )
    console.print(table)
    for what, value in (("time of an item", _wall_us), ("CPU time of an item", _cpu_us)):
        console.print(f"{what}: {knee(flats, value, 'µs')}", highlight=False)
    for name, service in MEASURED.items():
        console.print(
            f"memory of {service}: {knee(flats, lambda one, n=name: one.peak_mb.get(n, 0.0), 'MB')}",
            highlight=False,
        )
    console.print()


def _wall_us(one: Flat) -> float:
    return one.wall_s / one.items * 1e6


def _more_us(before: Flat, one: Flat) -> float:
    """Wall time of each item that this run has more than the one before: what the start costs is not in it."""
    return (one.wall_s - before.wall_s) / max(1, one.items - before.items) * 1e6


def _cpu_us(one: Flat) -> float:
    return sum(one.cpu_s.values()) / one.items * 1e6


def knee(flats: Sequence[Flat], value: Callable[[Flat], float], unit: str) -> str:
    """From which size on a value stays the same, within `STEADY`; or that it still grows at the largest."""
    values = [value(one) for one in flats]
    for at, one in enumerate(flats[:-1]):
        if all(abs(later - values[at]) <= STEADY * values[at] for later in values[at + 1 :]):
            return (
                f"flat from {one.items:,} items on ({values[at]:,.0f} {unit}, then {values[-1]:,.0f} {unit})"
            )
    shown = " → ".join(f"{v:,.0f}" for v in values)
    way = "falls" if values[-1] < values[0] else "grows"
    return f"{way} up to {flats[-1].items:,} items ({shown} {unit})"


def _print_soak(console: Console, report: Report, peak_mb: dict[str, float]) -> None:
    summary = report.summary()
    killed = {name: n for name, n in summary["kills"].items() if n}
    console.print(f"Soak: echo, one worker, {sum(killed.values())} SIGKILLs, seed {report.seed}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    rows = [
        ("items", f"{report.verdict.items:,}"),
        ("wall time", f"{report.seconds:,.1f} s"),
        ("items/s", f"{report.verdict.items / report.seconds:,.0f}"),
        ("kills", ", ".join(f"{name} {n}" for name, n in killed.items()) or "none"),
        *((name, f"{summary[name]:,}") for name in ("ok", "failed", "dead", "lost", "doubled", "mismatched")),
        ("repeats that changed nothing", f"{summary['duplicates']:,}"),
        (
            "balanced samples",
            f"{report.balanced_samples} of {report.balanced_samples + report.unbalanced_samples}",
        ),
        *((f"peak memory of {MEASURED[name]}", f"{peak:,.0f} MB") for name, peak in peak_mb.items()),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for done in report.faults:
        console.print(f"{done.at_s:>9.2f} s  {done.fault} {done.victim}, pid {done.pid}", highlight=False)
