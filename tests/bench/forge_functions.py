"""What the forge's benchmark runs: a model that is fed padded batches, as its time shows, without being one."""

from __future__ import annotations

import time

from msgspec import Struct

from headrace.forge import function

STEP_S = 0.004
"""What a call costs whatever is in it."""
TOKEN_S = 6e-6
"""What a token costs, padding included: every row counts as the longest of its batch."""


class Text(Struct):
    """A row of `n` tokens."""

    i: int
    n: int


class Ran(Struct):
    """When and with whom a row ran; times are seconds since the epoch."""

    began: float
    ended: float
    rows: int
    padded: int


@function(size=lambda row: row.n, version="1")
def padded(rows: list[Text]) -> list[Ran]:
    """Takes as long as a padded batch would on an accelerator."""
    began = time.time()
    tokens = len(rows) * max(row.n for row in rows)
    time.sleep(STEP_S + TOKEN_S * tokens)
    ended = time.time()
    return [Ran(began, ended, len(rows), tokens)] * len(rows)
