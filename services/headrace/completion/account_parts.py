"""The parts of a reading: the job's row, the producer's word, the broker's counts; and sums of accounts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from headrace.contracts.api import ShapeAccount

UNKNOWN_SHAPE: Final = "?"

Shapes = Mapping[str, int]
"""A count for each shape token, `t6`."""


class JobRow(Struct, frozen=True):
    """A job as the table `jobs` has it; `retry_items` is how many items its latest retry has."""

    job: str
    state: str = "open"
    count: int | None = None
    landed: int = 0
    ok: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    duplicates: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    function: str = ""
    model: str | None = None
    lane: str = "normal"
    opened_us: int = 0
    ended_us: int | None = None
    generation: int = 1
    cause: str | None = None
    reason: str | None = None
    deadline_us: int | None = None
    retry_items: int = 0


class Intake(Struct, frozen=True):
    """The producer's word: how many items are stored, by shape, and whether that is all (`sealed`, `cancelled`).

    Where the progress record is that of a retry, `generation` is the retry's, and `again` how many of its items are
    stored.
    """

    stored: int
    closed: str
    shapes: Shapes = {}
    generation: int = 1
    again: int = 0


class Side(Struct, frozen=True):
    """What the broker had, on the way to the rows or on the way back. `tasks` by shape, waiting and leased."""

    intake: Intake
    tasks: Shapes
    results: int

    @property
    def all_tasks(self) -> int:
        """Tasks of every shape."""
        return sum(self.tasks.values())


def add_to(sums: dict[str, ShapeAccount], accounts: Iterable[ShapeAccount]) -> None:
    """Add each of `accounts` to the sum of its shape."""
    for a in accounts:
        b = sums.get(a.shape)
        sums[a.shape] = a if b is None else _plus(a, b)


def summed(accounts: Iterable[ShapeAccount]) -> ShapeAccount:
    """The account of several shapes together."""
    total = ShapeAccount(shape=UNKNOWN_SHAPE)
    for account in accounts:
        total = _plus(total, account)
    return total


def _plus(a: ShapeAccount, b: ShapeAccount) -> ShapeAccount:
    return ShapeAccount(
        shape=a.shape,
        submitted=a.submitted + b.submitted,
        ok=a.ok + b.ok,
        failed=a.failed + b.failed,
        dead=a.dead + b.dead,
        cancelled=a.cancelled + b.cancelled,
        queued=a.queued + b.queued,
        landing=a.landing + b.landing,
    )


def by_number(shape: str) -> int:
    """Sorts shape tokens: `?`, then t0, t1, …"""
    return -1 if shape == UNKNOWN_SHAPE else number_of(shape)


def number_of(shape: str) -> int:
    """The k of a shape token `t<k>`."""
    return int(shape[1:])
