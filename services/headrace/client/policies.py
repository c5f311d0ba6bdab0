"""When a job is ended early, as people write it: `2h`, `2026-12-01T08:00:00Z`, `5%`."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Final

from headrace.contracts.errors import InvalidInput

Deadline = str | float | timedelta | datetime
"""A point in time (`datetime`, ISO 8601 text; UTC without an offset) or a duration from now (seconds, `1h30m`)."""
Share = str | float
"""A part of a whole: `0.05`, or `5%`."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_DURATION = re.compile(rf"(?:{_PART.pattern})+\Z")
_LATEST_US: Final = 253_402_300_799_000_000
"""The end of the year 9999, the last that has a name."""


def deadline_us(given: Deadline, *, now_us: int | None = None) -> int:
    """`given` as microseconds since the epoch; raise `InvalidInput` if it is neither a time nor a duration.

    >>> deadline_us("1h30m", now_us=0)
    5400000000
    >>> deadline_us("2026-12-01T08:00:00Z")
    1796112000000000
    """
    now_us = time.time_ns() // 1_000 if now_us is None else now_us
    if isinstance(given, datetime):
        at = _epoch_us(given)
    elif isinstance(given, timedelta):
        at = now_us + given // timedelta(microseconds=1)
    elif isinstance(given, str):
        at = _of_text(given.strip(), now_us)
    elif given == given and abs(given) < _LATEST_US / 1e6:  # noqa: PLR0124  (not NaN)
        at = now_us + int(given * 1e6)
    else:
        raise _wrong(given)
    if not 0 <= at <= _LATEST_US:
        raise _wrong(given)
    return at


def share(given: Share) -> float:
    """`given` as a number from 0 to 1; raise `InvalidInput` if it is none.

    >>> share("5%")
    0.05
    """
    try:
        if isinstance(given, str):
            text = given.strip()
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        else:
            value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        msg = f"max_failed {str(given)[:80]!r} is no share: write a percentage (5%) or a number from 0 to 1 (0.05)"
        raise InvalidInput(msg, field="max_failed", code="invalid_share")
    return value


def time_text(at_us: int) -> str:
    """A point in time for people, in UTC."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _of_text(text: str, now_us: int) -> int:
    if _DURATION.match(text):
        seconds = sum(float(n) * _UNITS[unit] for n, unit in _PART.findall(text))
        return now_us + int(seconds * 1e6)
    try:
        return _epoch_us(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        raise _wrong(text) from None


def _epoch_us(at: datetime) -> int:
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _wrong(given: object) -> InvalidInput:
    msg = (
        f"deadline {str(given)[:80]!r} is no time: write a duration from now (90s, 2h, 1h30m) or a time "
        "(2026-12-01T08:00:00Z; UTC without an offset)"
    )
    return InvalidInput(msg, field="deadline", code="invalid_deadline")
