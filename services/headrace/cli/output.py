"""What goes to the terminal: answers to standard output, everything else to standard error.

Standard output stays parseable: with `--json` it carries JSON only. Progress, warnings and errors are
for people and go to standard error, so that a pipe never meets them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

_MINUTE: Final = 60
PIPED_WIDTH: Final = 10_000
PIPED_CELL: Final = 200
"""A longer text is folded, also where it is piped."""


def print_json(value: Any) -> None:
    """One compact JSON document and a newline on standard output."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """One line on standard output, at once even into a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """One line for people on standard error; nobody there to read it is no error."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        return


def console(*, stderr: bool = False) -> Console:
    """A rich console; what is piped is as wide as it needs, so that no row is cut or broken."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPED_WIDTH)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """A table on standard output; None shows as nothing, numbers stand right."""
    from rich.markup import escape
    from rich.table import Table

    if title:
        console().print(escape(title), style="bold")
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    cells = [list(row) for row in rows]
    widest = None if sys.stdout.isatty() else PIPED_CELL
    for i, column in enumerate(columns):
        numeric = all(isinstance(row[i], int | float) or row[i] is None for row in cells)
        table.add_column(
            escape(column),
            justify="right" if numeric and cells else "left",
            overflow="fold",
            max_width=widest,
        )
    for row in cells:
        table.add_row(*(escape(shown(cell)) for cell in row))
    console().print(table)


def shown(value: object) -> str:
    """`value` as a table's cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()


def when_text(micros: int) -> str:
    """A point in time, in microseconds since the epoch, for people; empty for 0."""
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if micros else ""


def clock_text(seconds: float | None) -> str:
    """A duration for people: `-`, `3.2 s`, `4 m 07 s`, `2 h 05 m`."""
    if seconds is None or seconds < 0:
        return "-"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), _MINUTE)
    if minutes < _MINUTE:
        return f"{minutes} m {rest:02d} s"
    return f"{minutes // _MINUTE} h {minutes % _MINUTE:02d} m"
