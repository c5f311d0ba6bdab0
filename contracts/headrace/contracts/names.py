"""Bounded scalar types of the wire: one place where every limit of a field is stated."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from headrace.contracts.errors import InvalidInput

END = r"$(?!\n)"
"""End of a pattern: Python's `$` alone would let a line feed follow."""
TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,128}" + END
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")

Token = Annotated[str, Meta(pattern=TOKEN_PATTERN)]
"""One token of a subject: job, function, tenant, worker. No dots, spaces or wildcards."""

Index = Annotated[int, Meta(ge=0, lt=2**53)]
"""Position of an item in its job, dense from 0 (exact in JSON readers that use doubles)."""

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Generation = Annotated[int, Meta(ge=1, le=10_000)]
ShapeNumber = Annotated[int, Meta(ge=0, le=24)]
Attempt = Annotated[int, Meta(ge=0, le=1_000_000)]
Micros = Annotated[int, Meta(ge=0, le=2**62)]
"""Microseconds since the Unix epoch, or a duration in microseconds where the name says so."""

CustomId = Annotated[str, Meta(min_length=1, max_length=512)]
ShortText = Annotated[str, Meta(max_length=2048)]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{16,64}" + END)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class Lane(StrEnum):
    """Priority class of a task; workers take lanes by weight, so a late urgent job passes a backlog."""

    URGENT = "urgent"
    NORMAL = "normal"
    BULK = "bulk"


def check_token(kind: str, value: str) -> str:
    """Return `value` if it may stand in a subject, else raise `InvalidInput` naming `kind` and value.

    >>> check_token("job", "nightly-2026")
    'nightly-2026'
    """
    if not isinstance(value, str) or not _TOKEN.match(value):
        shown = repr(value)[:160]
        msg = f"{kind} {shown} is not a valid name: use 1 to 128 of the characters A-Z a-z 0-9 _ -"
        raise InvalidInput(msg, field=kind, code="invalid_name")
    return value
