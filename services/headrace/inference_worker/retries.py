"""When a task is tried again, and what is said of one whose tries all ended without a word."""

from __future__ import annotations

import random
from typing import Final

from msgspec import Struct

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
