"""The page of the matrix, from what was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.contracts.ledger import EFFECTS
from tests.gateway.invariants import INVARIANTS
from tests.gateway.matrix_world import BEHAVIOURS, TIMEOUT_S, Point

INTRO = """# What happens when a gateway dies

Written by `python -m tests.gateway.matrix --out docs/gateway-matrix.md`, which makes it again.

Real gateways, brokers and a callee that logs on disk what it is asked and what it does. In each world every effect
class meets every mood of the callee, all at once; the gateway's process kills itself with SIGKILL at the named point,
with as many calls held at that point as come there; it is started, mostly killed there once more, and started for good.
Then the callee's log, the ledger, the heads of budgets and what askers were told are compared. Each point was tried
with one gateway, with two that share the work, and with the broker killed at the same moment.

- A cell says in which states calls ended, and how often the callee **heard** of one and **did** it (it does what it is
  asked once for each idempotency key, as a callee that honours keys would).
- `cost_bearing`, `money` and `destructive` calls are never done twice, whatever dies. `in_doubt` is an answer: the
  callee may have done it and nothing on record says so. Here `money` has a resolver (the callee can be asked by its
  key), so nothing of it stays in doubt; `destructive` has none.
- An attempt's time-out is {timeout_s:g} s, and two attempts at most follow one asking.
"""


@dataclass
class Cell:
    """What became of the calls of one point, effect and mood."""

    states: Counter[str] = field(default_factory=Counter)
    heard: list[int] = field(default_factory=list)
    acted: list[int] = field(default_factory=list)


@dataclass
class Sweep:
    """All that was seen."""

    planned: int
    worlds: int
    calls: int
    died: int
    cells: dict[tuple[str, str, str], Cell]
    counts: Counter[int]
    wrong: list[str]
    took_s: float = 0.0


def page(found: Sweep, machine: Mapping[str, str], points: Sequence[Point]) -> str:
    """The whole page."""
    lines = [INTRO.format(timeout_s=TIMEOUT_S)]
    of = "" if found.worlds == found.planned else f" of {found.planned}"
    died = f"{found.died} times a process killed itself at its point"
    lines += [
        f"{found.worlds}{of} worlds, {found.calls:,} calls, {died}, {found.took_s:,.0f} s.",
        "",
        f"**Violations: {len(found.wrong)}.**",
        "",
        *(f"- {sentence}" for sentence in found.wrong),
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in machine.items() if name != "vllm"),
        "",
        "## Invariants",
        "",
        "M is the callee's own log, L the ledger, and the heads are those of the budgets.",
        "",
        "| # | invariant | looked at | held |",
        "|---|---|---|---|",
    ]
    for number in range(1, 18):
        lines.append(_invariant(number, found))
    lines += ["", "## Point by point", ""]
    for point in points:
        if not any((point.name, effect, mood) in found.cells for effect in EFFECTS for mood in BEHAVIOURS):
            continue
        lines += [f"### `{point.name}`: {point.said}", "", f"| the callee | {' | '.join(EFFECTS)} |"]
        lines.append("|---" * (len(EFFECTS) + 1) + "|")
        for mood in BEHAVIOURS:
            cells = (_cell(found.cells.get((point.name, effect, mood))) for effect in EFFECTS)
            lines.append(f"| {mood} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _invariant(number: int, found: Sweep) -> str:
    if number not in INVARIANTS:
        return (
            f"| {number} | what is beside a call's path costs it nothing | measured, see [bench](bench) | |"
        )
    said = (INVARIANTS[number].__doc__ or "").split(": ", 1)[1].split("\n")[0].rstrip(".")
    wrong = sum(f": {number}: " in sentence for sentence in found.wrong)
    held = f"no: {wrong} times" if wrong else ("yes" if found.counts[number] else "not seen here")
    return f"| {number} | {said} | {found.counts[number]:,} | {held} |"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    states = ", ".join(
        state if len(cell.states) == 1 else f"{n} {state}" for state, n in cell.states.most_common()
    )
    return f"{states}; heard {_range(cell.heard)}, did {_range(cell.acted)}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"
