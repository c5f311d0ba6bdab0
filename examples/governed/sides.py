"""What each side did, in calls: the table, and whether it shows what it should."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

SHOWN = 20
"""Calls that are named of a kind of trouble."""


@dataclass
class Side:
    """One side. A call is *done* when the callee's own log has it, whatever anybody was told."""

    name: str
    calls: int
    kills: dict[str, int] = field(default_factory=dict)
    done: int = 0
    """Times that the callee did something, and charged it."""
    doubled: list[str] = field(default_factory=list)
    """Calls that it did more than once."""
    answered: int = 0
    in_doubt: int = 0
    """Calls of which the side says itself that they may or may not have been done."""
    in_doubt_done: int = 0
    failed: int = 0
    """Calls whose caller was told that they failed."""
    failed_done: int = 0
    """Those of them that were done."""
    unrecorded: int = 0
    """Times that the callee did something of which the side has neither an answer nor a record."""
    seconds: float = 0.0
    posted_micro: int = 0
    held_micro: int = 0
    wrong: list[str] = field(default_factory=list)
    """Where the ledger and the callee's log disagree."""


ROWS = (
    ("calls asked", "calls"),
    ("done by the callee, by its own log", "done"),
    ("the caller has its answer", "answered"),
    ("in doubt, known by name", "in_doubt"),
    ("…of these, done by the callee", "in_doubt_done"),
    ("the caller was told: failed", "failed"),
    ("…of these, done by the callee", "failed_done"),
)


def table(sides: list[Side]) -> Table:
    """The sides, row by row."""
    shown = Table("", *(side.name for side in sides), title="the same calls, the same callee, SIGKILL")
    shown.columns[0].no_wrap = True
    for column in shown.columns[1:]:
        column.justify = "right"
    shown.add_row("killed", *("\n".join(f"{n} × {what}" for what, n in s.kills.items()) for s in sides))
    for title, name in ROWS:
        shown.add_row(title, *(f"{getattr(s, name):,}" for s in sides))
    shown.add_row("DONE TWICE OR MORE", *(_bad(len(s.doubled)) for s in sides))
    shown.add_row("DONE, AND RECORDED NOWHERE", *(_bad(s.unrecorded) for s in sides))
    return shown


def _bad(count: int) -> str:
    return f"[bold {'red' if count else 'green'}]{count:,}[/]"


def verdict(ours: Side) -> tuple[int, list[str]]:
    """The exit code, and what is to be said beside the table."""
    said = [f"Headrace: {wrong}" for wrong in ours.wrong[:SHOWN]]
    if ours.doubled:
        said.append(f"Headrace did {len(ours.doubled)} calls twice: {ours.doubled[:SHOWN]}")
    if ours.unrecorded:
        said.append(f"{ours.unrecorded} calls were done and stand nowhere in the ledger")
    ended = ours.answered + ours.in_doubt + ours.failed
    if ended != ours.calls:
        said.append(f"{ours.calls - ended} of {ours.calls} calls have no end")
    return (1 if said else 0), said
