"""When a task is tried again, and what is remembered of its last failure."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Final

from msgspec import Struct

REMEMBERED: Final = 10_000
LAPSED: Final = "no worker reported an error: the lease lapsed each time, as when a worker dies or hangs"


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """Delays grow exponentially from `base_s` to `cap_s`, each drawn from the upper half of its size so that
    tasks that failed together do not come back together.
    """

    base_s: float = 0.5
    cap_s: float = 60.0

    def delay_s(self, tries: int) -> float:
        """Seconds until the next try, after `tries` (1, 2, ...) have failed."""
        full = min(self.cap_s, self.base_s * 2.0 ** min(max(0, tries - 1), 30))
        return full * random.uniform(0.5, 1.0)


class LastErrors:
    """The last error of tasks that are to be tried again, by their sequence in the stream.

    Kept in this worker's memory only: a nak carries no text, and writing one more message for each failure
    would double the cost of the case that matters most, a dying engine. The worker that ends the last try
    knows its error at first hand; only a task whose lease lapsed and that comes to a stranger has none, and
    then `LAPSED` is the truth.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._errors: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._errors)

    def remember(self, sequence: int, error: str) -> None:
        """Keep `error`; the oldest of too many is forgotten."""
        self._errors[sequence] = error
        self._errors.move_to_end(sequence)
        if len(self._errors) > self._limit:
            self._errors.popitem(last=False)

    def take(self, sequence: int) -> str | None:
        """The error of that message, forgotten now."""
        return self._errors.pop(sequence, None) if self._errors else None
