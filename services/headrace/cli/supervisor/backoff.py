"""How long to wait before a process that died is started again."""

from __future__ import annotations

import random


class Backoff:
    """Exponential with jitter: half to all of `first_s × 2^n`, at most `longest_s`.

    A life of `stable_s` or more starts the count again. The jitter keeps workers that died together from
    coming back together.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.2,
        longest_s: float = 15.0,
        stable_s: float = 20.0,
        seed: int | None = None,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._stable_s = stable_s
        self._random = random.Random(seed)
        self._deaths = 0

    def after_death(self, lived_s: float) -> float:
        """Seconds to wait, for a process that lived `lived_s` seconds."""
        if lived_s >= self._stable_s:
            self._deaths = 0
        ceiling = min(self._longest_s, self._first_s * 2 ** min(self._deaths, 30))
        self._deaths += 1
        return self._random.uniform(ceiling / 2, ceiling)
