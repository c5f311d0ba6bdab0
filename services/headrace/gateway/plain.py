"""Reading JSON that somebody else wrote: every step may find something else than expected, and then nothing."""

from __future__ import annotations

from typing import Any, cast

import msgspec


def json_or_none(data: bytes | str) -> Any:
    """The value, or None if it is no JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def fields(value: Any) -> dict[str, Any]:
    """An object's fields; none for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """A list's items; none for anything else."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def text(value: Any, limit: int = 256) -> str | None:
    """A text, cut to `limit`; None for anything else."""
    return value[:limit] if isinstance(value, str) else None


def count(value: Any) -> int | None:
    """A number of things; None for anything else, negative ones and booleans too."""
    ok = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if ok else None
