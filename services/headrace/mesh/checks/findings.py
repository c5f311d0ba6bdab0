"""Short ways to make a finding, and what may go wrong while one is being looked for."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

from msgspec import Struct

from headrace.contracts.api import Finding
from headrace.contracts.errors import Unavailable
from headrace.mesh.jsapi import JetStreamError

T = TypeVar("T")

DENIED: Final = "denied"
"""Code of an `Unavailable` whose request this user may not publish."""


def ok(check: str, found: str) -> Finding:
    """As it should be."""
    return Finding(check=check, state="ok", found=found)


def warn(check: str, found: str, mend: str) -> Finding:
    """Works, with a risk."""
    return Finding(check=check, state="warn", found=found, mend=mend)


def fail(check: str, found: str, mend: str) -> Finding:
    """Does not work, or may lose what was acknowledged."""
    return Finding(check=check, state="fail", found=found, mend=mend)


NO_LEADER: Final = 10008
"""JetStream's error of a cluster that has lost its majority."""


class Unread(Struct, frozen=True):
    """Something that this user may not read, or that did not answer in time."""

    error: Unavailable

    def finding(self, check: str) -> Finding:
        """The finding in place of the one that could not be made."""
        mend = (
            "look again as a user who may"
            if self.error.code == DENIED
            else "look again, or see the broker's log"
        )
        return warn(check, f"cannot be read: {self.error}", mend)


async def attempt(reading: Awaitable[T]) -> T | Unread:
    """What `reading` gives, or `Unread`: one thing that cannot be read keeps no other from being looked at."""
    try:
        return await reading
    except Unavailable as e:
        return Unread(e)
    except JetStreamError as e:
        if e.err_code != NO_LEADER:
            raise
        return Unread(Unavailable(f"no leader answers: {e}"))


def some(lines: list[str], limit: int = 5) -> str:
    """The first of `lines`, and how many more there are."""
    more = f" and {len(lines) - limit:,} more" if len(lines) > limit else ""
    return "; ".join(lines[:limit]) + more
