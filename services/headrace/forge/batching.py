"""Which rows make a batch: `rows:N`, `tokens:BUDGET`, or `submit`; in the order of the input, or packed freely."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from headrace.contracts.errors import InvalidInput

T = TypeVar("T")
Mode = Literal["rows", "tokens", "submit"]
Order = Literal["ordered", "free"]

MAX_ROWS: Final = 65_536
"""Rows of one batch, whatever the budget."""
MAX_BYTES: Final = 64 << 20
"""Bytes of the rows of one batch, unless one row alone has more."""
WINDOW: Final = 16
"""Budgets' worth of rows among which a free packing chooses: it bounds what is held, and how late a row may be."""
WINDOW_ROWS: Final = 4_096
_FORM = re.compile(r"(rows|tokens):([1-9][0-9]{0,8})\Z")


class Batching(NamedTuple):
    """How rows become batches. `limit`: rows, or tokens, of one batch."""

    mode: Mode
    limit: int = 0

    def __str__(self) -> str:
        return self.mode if self.mode == "submit" else f"{self.mode}:{self.limit}"


SUBMIT: Final = Batching("submit")
DEFAULT: Final = Batching("rows", 64)


def parse_batching(text: str, *, field: str = "batching") -> Batching:
    """`rows:64`, `tokens:8192` or `submit`; raise `InvalidInput` for anything else.

    >>> parse_batching("tokens:8192")
    Batching(mode='tokens', limit=8192)
    """
    if text == "submit":
        return SUBMIT
    match = _FORM.match(text)
    if match is None or (match[1] == "rows" and int(match[2]) > MAX_ROWS):
        msg = f"batching {text[:80]!r} is unknown: use rows:N (N up to {MAX_ROWS:,}), tokens:BUDGET or submit"
        raise InvalidInput(msg, field=field, code="invalid_batching")
    return Batching("tokens" if match[1] == "tokens" else "rows", int(match[2]))


class Sized(NamedTuple, Generic[T]):
    """A row with what it counts: `tokens` against a budget of tokens, `nbytes` against `MAX_BYTES`."""

    item: T
    tokens: int
    nbytes: int


def fits(batching: Batching, rows: int, tokens: int, nbytes: int, more: Sized[T]) -> bool:
    """Whether `more` may join a batch of so many rows, tokens and bytes. The first row always may."""
    if rows == 0:
        return True
    if rows >= (batching.limit if batching.mode == "rows" else MAX_ROWS) or nbytes + more.nbytes > MAX_BYTES:
        return False
    return batching.mode == "rows" or tokens + more.tokens <= batching.limit


def pack(rows: Iterable[Sized[T]], batching: Batching, order: Order) -> Iterator[list[Sized[T]]]:
    """Batches of all `rows`. A row that is larger than the budget stands alone.

    `ordered`: neighbours stay together, a batch ends before the row that does not fit. `free`: among the rows of a
    window those of like size are put together, so that a batch is full, and little of it is padding.
    """
    if batching.mode == "tokens" and order == "free":
        for window in _windows(rows, batching):
            yield from _in_order(sorted(window, key=lambda row: row.tokens, reverse=True), batching)
    else:
        yield from _in_order(rows, batching)


def _in_order(rows: Iterable[Sized[T]], batching: Batching) -> Iterator[list[Sized[T]]]:
    batch: list[Sized[T]] = []
    tokens = nbytes = 0
    for row in rows:
        if not fits(batching, len(batch), tokens, nbytes, row):
            yield batch
            batch, tokens, nbytes = [], 0, 0
        batch.append(row)
        tokens += row.tokens
        nbytes += row.nbytes
    if batch:
        yield batch


def _windows(rows: Iterable[Sized[T]], batching: Batching) -> Iterator[list[Sized[T]]]:
    window: list[Sized[T]] = []
    tokens = nbytes = 0
    for row in rows:
        window.append(row)
        tokens += row.tokens
        nbytes += row.nbytes
        if tokens >= WINDOW * batching.limit or len(window) >= WINDOW_ROWS or nbytes >= MAX_BYTES:
            yield window
            window, tokens, nbytes = [], 0, 0
    if window:
        yield window
