"""Faults of the `sim` engine, on purpose: for tests, for `headrace chaos`, and for whoever wants to see what happens.

| setting | what it does |
|---|---|
| `poison` | an item whose prompt contains this text kills the engine when it is prefilled |
| `hang` | … makes the engine stand still when it is prefilled: no token comes any more, and no error |
| `freeze` | … blocks the whole event loop when it is prefilled, as native code that never returns does |
| `segfault` | … ends the whole process by SIGSEGV when it is prefilled, as a fault in native code does |
| `oom_tokens` | an item of more tokens than this (prompt and new ones; 0: none) finds no memory beside others |
| `oom_always` | … nor alone |
| `fail_share` | this share of items (0..1, chosen by seed and item) raises on its first try, as a passing fault does |

Token ids are compared as text, joined by spaces. All are off unless set, and cost nothing then.
"""

from __future__ import annotations

import random
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.inference_worker.engines.protocol import Work
    from headrace.inference_worker.engines.sim_model import SimSettings


class Fault(Enum):
    """What an item brings about."""

    POISON = auto()
    HANG = auto()
    FREEZE = auto()
    SEGFAULT = auto()
    NO_MEMORY = auto()


class SimFaults:
    """The faults that the settings ask for."""

    def __init__(self, settings: SimSettings) -> None:
        s = self._settings = settings
        markers = (
            (s.poison, Fault.POISON),
            (s.hang, Fault.HANG),
            (s.freeze, Fault.FREEZE),
            (s.segfault, Fault.SEGFAULT),
        )
        self._markers = [(text, fault) for text, fault in markers if text]
        self.any = bool(self._markers or s.oom_tokens or s.fail_share)

    def of(self, work: Work, text: str | list[int]) -> Fault | None:
        """What this item brings about once it is prefilled; raise `RuntimeError` if it is one of `fail_share`."""
        s = self._settings
        if (
            s.fail_share
            and work.attempt == 1
            and random.Random(f"{s.seed}/{work.id}").random() < s.fail_share
        ):
            raise RuntimeError("the first try failed, as fail_share asked")
        if self._markers:
            shown = text if isinstance(text, str) else " ".join(map(str, text))
            for marker, fault in self._markers:
                if marker in shown:
                    return fault
        if s.oom_tokens and work.prompt_tokens + work.params.n * work.max_tokens > s.oom_tokens:
            return Fault.NO_MEMORY
        return None
