"""A function whose name another one has, for the test that refuses both."""

from __future__ import annotations

from headrace.forge import function


@function
def embed(rows: list[str]) -> list[int]:
    """Not the built-in one."""
    return [len(row) for row in rows]
