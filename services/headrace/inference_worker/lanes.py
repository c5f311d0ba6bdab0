"""Which consumers to ask, and for how many: one pure decision, `plan`.

There is one durable consumer for each lane and shape of a function. Those with a known backlog share the
engine by *stride scheduling*: a consumer's pass grows by tokens ÷ weight with each item asked of it, and the
lowest pass is asked next. The weight of a lane (urgent 16 : normal 4 : bulk 1) is divided among its shapes by
their backlog in tokens, so that shapes mix as they stand in the queue, an urgent job passes a bulk backlog,
and nothing starves. No item is asked for that might not fit; one that does not fit is passed by for at most
one filling of the engine (`_Fit`), after which smaller ones leave it the room.

*Probes.* A consumer believed to be empty has one pull of one item left open: it costs the broker nothing, and
it is how a new job, lane or shape is found at once, by an idle worker and by a busy one. A probe counts
nothing in the budget, since counting it would keep a slot empty for work that may never come; what it brings
to a full worker is held (it is the next to start) or given back soon. While anything is held no probe is
opened, which bounds what a full worker can hold by the probes that were open. In the same way only the part
of a pull that has a backlog behind it is counted: if others took that backlog, the rest of the pull is a
probe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from typing import Final

from headrace.contracts.names import Lane
from headrace.inference_worker.ledger import NO_ROOM, Cost, TokenLedger

LANE_WEIGHTS: Final[dict[Lane, float]] = {Lane.URGENT: 16.0, Lane.NORMAL: 4.0, Lane.BULK: 1.0}
LEAST_SHARE: Final = 0.05
"""Of its lane's weight, for a shape with a tiny backlog: five large items among a million small ones."""


@dataclass(slots=True)
class LaneState:
    """One consumer as the planner sees it.

    `upper`: tokens that an item of this shape has at most. `bound` and `width`: tokens and slots that one is
    counted for while it is asked for. `pending`: items known to wait in the broker. `outstanding`: items
    asked for and not yet delivered. `passed`: its place in the stride.
    """

    lane: Lane
    shape: int
    upper: int
    bound: int = 0
    width: int = 1
    outstanding: int = 0
    pending: int = 0
    passed: float = 0.0
    _mean: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        self.bound = self.bound or self.upper
        self._mean = (float(self.bound), float(self.width))

    def wants_to_learn(self, cost: Cost) -> bool:
        """Whether the item is not what the shape promised, or others lately were not."""
        return (
            cost.tokens > self.bound or cost.slots > self.width or self.bound > self.upper or self.width > 1
        )

    def learn(self, cost: Cost, limit: int) -> None:
        """An item came that is not what its shape promised (n > 1, an estimate, rows): from now on items are
        counted as the mean of the latest, so that no more are asked for than fit.
        """
        tokens, slots = self._mean
        tokens += (min(cost.tokens, limit) - tokens) / 8
        slots += (cost.slots - slots) / 8
        self._mean = (tokens, slots)
        self.bound, self.width = max(self.upper, ceil(tokens)), max(1, ceil(slots - 0.05))

    @property
    def counted(self) -> int:
        """Asked items that are sure to come."""
        return min(self.outstanding, self.pending)


@dataclass(slots=True)
class Plan:
    """What to ask (index of the consumer, items), the new passes, and the stride's clock after it."""

    asks: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    passes: dict[int, float] = field(default_factory=dict[int, float])
    clock: float = 0.0


def plan(lanes: list[LaneState], ledger: TokenLedger, *, clock: float = 0.0, probe: bool = True) -> Plan:
    """Decide; changes nothing. `probe` false asks only for what is known to wait."""
    out = Plan(clock=clock)
    if probe and not ledger.held_slots:
        out.asks.extend((i, 1) for i, c in enumerate(lanes) if not c.pending and not c.outstanding)
    wanting = [i for i, c in enumerate(lanes) if c.pending > c.outstanding]
    if not wanting:
        return out
    asked_tokens = asked_slots = 0
    for c in lanes:
        if c.outstanding and c.pending:
            asked_slots += c.counted * c.width
            asked_tokens += c.counted * c.bound
    room = ledger.room(Cost(asked_tokens, asked_slots))
    if room is not NO_ROOM and room.slots > 0 and room.tokens > 0:
        _Fit(lanes, wanting, ledger, out).fill(room.tokens, room.slots)
    return out


class _Fit:
    """Fills a room with the items of the consumers that want to be asked."""

    def __init__(self, lanes: list[LaneState], wanting: list[int], ledger: TokenLedger, out: Plan) -> None:
        self._lanes = lanes
        self._wanting = wanting
        self._out = out
        self._weights = _weights(lanes, wanting)
        # How far the stride may run ahead of an item that does not fit: one filling of the engine.
        largest = max(lanes[i].bound for i in wanting)
        filling = ledger.token_limit if ledger.counts_tokens else ledger.slot_limit * largest
        self._patience = filling / sum(self._weights.values())

    def fill(self, tokens: int, slots: int) -> None:
        lanes, out, weights = self._lanes, self._out, self._weights
        # Being idle earns nothing: who comes back starts where the last in line is now.
        passes = {i: max(lanes[i].passed, out.clock) for i in self._wanting}
        left = {i: lanes[i].pending - lanes[i].outstanding for i in self._wanting}
        asks = dict.fromkeys(self._wanting, 0)
        line = inf
        ready = set(self._wanting)
        while ready and slots > 0:
            i = min(ready, key=passes.__getitem__)
            at, bound, width = passes[i], lanes[i].bound, lanes[i].width
            if at > line:
                break
            if bound > tokens or width > slots:
                ready.discard(i)
                line = min(line, at + self._patience)
                continue
            # A run of items until the next consumer's turn, so that the loop costs a turn and not an item.
            until = min(line, min((passes[j] for j in ready if j != i), default=line))
            run = left[i] if until == inf else 1 + int((until - at) * weights[i] / bound)
            n = max(1, min(run, left[i], slots // width, tokens // bound))
            asks[i] += n
            left[i] -= n
            slots -= n * width
            tokens -= n * bound
            passes[i] = at + n * bound / weights[i]
            if not left[i]:
                ready.discard(i)
        # The clock is the place of the last in line: one that had to wait keeps it, and comes first next.
        out.passes = passes
        out.clock = max(out.clock, min(passes.values()))
        out.asks.extend((i, n) for i, n in asks.items() if n)


def _weights(lanes: list[LaneState], wanting: list[int]) -> dict[int, float]:
    tokens = {i: float(lanes[i].pending * lanes[i].bound) for i in wanting}
    of_lane: dict[Lane, float] = {}
    for i in wanting:
        of_lane[lanes[i].lane] = of_lane.get(lanes[i].lane, 0.0) + tokens[i]
    return {
        i: LANE_WEIGHTS[lanes[i].lane] * max(LEAST_SHARE, tokens[i] / of_lane[lanes[i].lane]) for i in wanting
    }
