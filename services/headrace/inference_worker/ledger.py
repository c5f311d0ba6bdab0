"""The token ledger: what is inside the engine, counted whole, against what the engine can hold.

An item is admitted only if everything that it may come to need fits beside what already runs, so nothing
is ever evicted or thrashed. The ledger is plain arithmetic: it waits for nothing and calls nobody.
"""

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

from headrace.inference_worker.engines.protocol import EngineInfo

UNLIMITED: Final = 1 << 62
"""Stands for a capacity that an engine does not have."""
QUEUE_DEPTH: Final = 1.125
"""Items sent to an engine that queues, for each of its slots. Measured on vLLM with 64 slots: a window of 48
gives 0.80 of the preloaded batch, 64 and 72 give 1.00; the eighth more covers the way to the broker and back.
"""
WAY_S: Final = 0.1
"""Seconds of work that a fast engine has in its queue: the way to the broker and back on a busy machine."""
DEEPEST: Final = 2.0
"""Bound of all that is sent to an engine that queues, for each of its slots."""
SLOTLESS: Final = 1_024
"""Items at once for an engine that names no number of slots."""


class Cost(NamedTuple):
    """What an item takes of the engine: KV-cache tokens, and one slot for each of its `n` sequences."""

    tokens: int
    slots: int = 1


class Room(NamedTuple):
    """How much may still be asked for."""

    tokens: int
    slots: int


NO_ROOM: Final = Room(0, 0)


class TokenLedger:
    """Tokens and slots in flight, held and asked for.

    *In flight* is inside the engine and never exceeds `token_limit` and `slot_limit` (an item that is larger
    than the limit, but not than the engine, runs alone). *Held* has arrived and does not fit yet. *Asked* is
    given by the caller: outstanding pulls times the shape's upper bound. Below both low marks `room` tells
    what is missing to the high marks, less all three; at or above either it is `NO_ROOM`, so that pulls
    come in bundles. Held work counts in `room` and not in `fits`: what is here and fits starts at once, and
    the large item that does not fit keeps others from being pulled into the place that it waits for.
    """

    def __init__(
        self,
        *,
        capacity_tokens: int,
        slots: int,
        queues: bool = False,
        high_water: float = 1.0,
        low_water: float = 0.85,
    ) -> None:
        self.capacity = capacity_tokens or UNLIMITED
        self.counts_tokens = capacity_tokens > 0
        self._queues = queues
        self._engine_slots = slots or SLOTLESS
        self._low_water = low_water
        self._rate = 0.0
        self._released = 0
        self.token_limit = max(1, int(self.capacity * high_water)) if self.counts_tokens else UNLIMITED
        self._low_tokens = min(self.token_limit, max(1, int(self.capacity * low_water)))
        self.slot_limit = self._low_slots = 0
        self._deepen(0.0)
        self.tokens = 0
        self.slots = 0
        self.items = 0
        self.held_tokens = 0
        self.held_slots = 0

    @classmethod
    def of_engine(cls, info: EngineInfo, *, high_water: float, low_water: float) -> TokenLedger:
        """The ledger of an engine's capacity."""
        return cls(
            capacity_tokens=info.capacity_tokens,
            slots=info.slots,
            queues=info.queues,
            high_water=high_water,
            low_water=low_water,
        )

    def cost(self, tokens: int, sequences: int = 1) -> Cost:
        """The cost of an item; one with more sequences than slots takes all of them and is scheduled inside."""
        return Cost(max(1, tokens), min(max(1, sequences), self.slot_limit))

    def too_large(self, cost: Cost) -> bool:
        """Whether the engine could not hold the item even alone: it must fail, since waiting helps nothing."""
        return cost.tokens > self.capacity

    def fits(self, cost: Cost) -> bool:
        """Whether the item may start now."""
        if cost.tokens > self.capacity:
            return False
        if self.tokens + cost.tokens <= self.token_limit and self.slots + cost.slots <= self.slot_limit:
            return True
        # With a high mark under the capacity, an item between the two would wait for ever: alone it may run.
        return not self.items

    def admit(self, cost: Cost) -> bool:
        """Take the item in if it fits; `release` gives its place back."""
        if not self.fits(cost):
            return False
        self.tokens += cost.tokens
        self.slots += cost.slots
        self.items += 1
        return True

    def release(self, cost: Cost) -> None:
        """Give back what `admit` took."""
        if not self.items:
            raise ValueError("release without an item in flight")
        self.tokens -= cost.tokens
        self.slots -= cost.slots
        self.items -= 1
        self._released += 1

    def pace(self, seconds: float) -> None:
        """Fit the depth of the engine's queue to the items that it finished in the last `seconds`.

        An eighth of the slots lasts a slow engine for minutes and a fast one for a few milliseconds, less than the way
        to the broker and back. So the queue has a tenth of a second of work, but never fewer items than that eighth.
        """
        self._rate += (self._released / seconds - self._rate) * 0.5
        self._released = 0
        if self._queues:
            self._deepen(self._rate * WAY_S)

    def _deepen(self, items: float) -> None:
        slots = self._engine_slots
        if self._queues:
            depth = max(slots * QUEUE_DEPTH, min(slots + items, slots * DEEPEST))
            self.slot_limit = ceil(depth)
        else:
            self.slot_limit = slots
        self._low_slots = _low_slots(slots, self.slot_limit, self._low_water, queues=self._queues)

    def hold(self, cost: Cost) -> None:
        """Count an item that is here and does not fit yet."""
        self.held_tokens += cost.tokens
        self.held_slots += cost.slots

    def unhold(self, cost: Cost) -> None:
        """The item is held no longer: it starts, or goes back."""
        self.held_tokens -= cost.tokens
        self.held_slots -= cost.slots

    def room(self, asked: Cost = Cost(0, 0)) -> Room:  # noqa: B008  (a constant tuple)
        """What may be asked for beyond `asked`."""
        tokens = self.tokens + self.held_tokens + asked.tokens
        slots = self.slots + self.held_slots + asked.slots
        if tokens >= self._low_tokens or slots > self._low_slots:
            return NO_ROOM
        return Room(self.token_limit - tokens, self.slot_limit - slots)


def _low_slots(slots: int, limit: int, low_water: float, *, queues: bool) -> int:
    """Used slots up to which more is asked for.

    A queue may shrink, but never to where a slot could run empty before the next item is there. Without a
    queue each free slot is lost time: with few of them every one is refilled at once, with many in bundles of
    a sixteenth, which cost a pull each.
    """
    if queues:
        return min(limit - 1, max(slots + (limit - slots) // 2, int(limit * low_water)))
    return limit - max(1, min(int(limit * (1 - low_water)), limit // 16))
