"""Admission as arithmetic: whatever is asked of the ledger and the planner, in whatever order.

A small model of a broker and an engine runs the real ledger, planner and rules of holding against each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contracts.names import Lane
from headrace.contracts.subjects import shape_of
from headrace.inference_worker.lanes import LaneState, plan
from headrace.inference_worker.ledger import NO_ROOM, Cost, TokenLedger

capacities = st.integers(64, 5_000)
marks = st.tuples(st.floats(0.3, 1.5), st.floats(0.0, 1.5)).map(sorted)


@st.composite
def ledgers(draw: st.DrawFn) -> TokenLedger:
    low, high = draw(marks)
    return TokenLedger(
        capacity_tokens=draw(st.one_of(st.just(0), capacities)),
        slots=draw(st.integers(0, 100)),
        queues=draw(st.booleans()),
        high_water=high,
        low_water=low,
    )


@given(ledgers(), st.lists(st.tuples(st.integers(0, 6_000), st.integers(1, 64)), max_size=200), st.randoms())
def test_what_is_in_flight_never_exceeds_the_limits(
    ledger: TokenLedger, wants: list[tuple[int, int]], random
) -> None:
    inside: list[Cost] = []
    for tokens, n in wants:
        cost = ledger.cost(tokens, n)
        alone = not inside
        if ledger.admit(cost):
            assert not ledger.too_large(cost)
            inside.append(cost)
            within = ledger.tokens <= ledger.token_limit and ledger.slots <= ledger.slot_limit
            assert within or (alone and ledger.tokens <= ledger.capacity)
        if inside and random.random() < 0.3:
            ledger.release(inside.pop(random.randrange(len(inside))))
        assert ledger.tokens == sum(c.tokens for c in inside)
        assert ledger.slots == sum(c.slots for c in inside)
        assert ledger.items == len(inside)


@given(ledgers(), st.integers(1, 10_000), st.integers(1, 64))
def test_an_empty_engine_takes_every_item_that_is_not_too_large(
    ledger: TokenLedger, tokens: int, n: int
) -> None:
    cost = ledger.cost(tokens, n)
    assert ledger.fits(cost) != ledger.too_large(cost)


@given(ledgers(), st.integers(0, 10_000), st.integers(0, 200))
def test_room_and_what_is_asked_stay_under_the_high_marks(
    ledger: TokenLedger, tokens: int, slots: int
) -> None:
    room = ledger.room(Cost(tokens, slots))
    if room is not NO_ROOM:
        assert tokens + room.tokens <= ledger.token_limit
        assert slots + room.slots <= ledger.slot_limit
        assert room.slots > 0
        assert room.tokens > 0


@given(ledgers())
def test_an_empty_ledger_has_room(ledger: TokenLedger) -> None:
    assert ledger.room() is not NO_ROOM


def test_release_without_an_item_is_a_bug_that_shows() -> None:
    with pytest.raises(ValueError, match="without an item"):
        TokenLedger(capacity_tokens=100, slots=1).release(Cost(1))


# --- the model --------------------------------------------------------------------------------------


@dataclass
class Broker:
    """Items wait in one queue for each consumer; a pull is answered in order while there are any."""

    queues: list[deque[int]]
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.asked = [0] * len(self.queues)

    def deliver(self, i: int) -> int | None:
        if self.asked[i] and self.queues[i]:
            self.asked[i] -= 1
            return self.queues[i].popleft()
        return None


@dataclass
class Model:
    ledger: TokenLedger
    lanes: list[LaneState]
    broker: Broker
    running: list[Cost] = field(default_factory=list)
    held: list[Cost] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)
    failed: int = 0
    clock: float = 0.0

    def step(self, random) -> bool:
        """Plan, deliver everything that was asked for, finish some; False if nothing could happen at all."""
        for i, lane in enumerate(self.lanes):
            lane.outstanding = self.broker.asked[i]
        decided = plan(self.lanes, self.ledger, clock=self.clock)
        self.clock = decided.clock
        for i, passed in decided.passes.items():
            self.lanes[i].passed = passed
        asked_tokens = sum(n * self.lanes[i].bound for i, n in decided.asks if self.lanes[i].pending)
        assert self.ledger.tokens + asked_tokens <= self.ledger.token_limit or not asked_tokens
        for i, n in decided.asks:
            self.broker.asked[i] += n
        moved = False
        for i in range(len(self.lanes)):
            while (tokens := self.broker.deliver(i)) is not None:
                moved = True
                self._receive(i, tokens)
        for _ in range(random.randint(1, 3)):
            if self.running:
                moved = True
                self.ledger.release(self.running.pop(random.randrange(len(self.running))))
                self._start_held()
        return moved

    def _receive(self, i: int, tokens: int) -> None:
        self.lanes[i].pending = len(self.broker.queues[i])
        cost = self.ledger.cost(tokens)
        self.order.append((i, tokens))
        if self.ledger.too_large(cost):
            self.failed += 1
        elif self.ledger.admit(cost):
            self.running.append(cost)
        else:
            assert not self.ledger.fits(cost)
            self.ledger.hold(cost)
            self.held.append(cost)

    def _start_held(self) -> None:
        for cost in list(self.held):
            if self.ledger.admit(cost):
                self.ledger.unhold(cost)
                self.held.remove(cost)
                self.running.append(cost)


def model(ledger: TokenLedger, items: dict[tuple[Lane, int], list[int]]) -> Model:
    keys = sorted(items, key=lambda k: (list(Lane).index(k[0]), k[1]))
    lanes = [
        LaneState(lane=lane, shape=shape, upper=min(1 << shape, ledger.token_limit)) for lane, shape in keys
    ]
    return Model(ledger, lanes, Broker([deque(items[key]) for key in keys]))


workload = st.lists(st.tuples(st.sampled_from(list(Lane)), st.integers(1, 2_000)), min_size=1, max_size=150)


@settings(max_examples=150, deadline=None)
@given(ledgers(), workload, st.randoms())
def test_every_item_runs_or_fails_and_nothing_deadlocks(ledger: TokenLedger, work, random) -> None:
    items: dict[tuple[Lane, int], list[int]] = {}
    for lane, tokens in work:
        items.setdefault((lane, shape_of(tokens)), []).append(tokens)
    m = model(ledger, items)
    for _ in range(20 * len(work) + 50):
        if not m.step(random) and not m.running:
            break
    assert not any(m.broker.queues)
    assert not m.running
    assert not m.held
    assert len(m.order) == len(work)
    assert m.failed == sum(ledger.too_large(ledger.cost(tokens)) for _, tokens in work)
    assert (ledger.tokens, ledger.slots, ledger.held_tokens, ledger.held_slots) == (0, 0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(100, 400), st.randoms())
def test_large_items_neither_block_small_ones_nor_starve(large: int, small: int, random) -> None:
    # B5: items of 25 % of the cache each among many short ones.
    ledger = TokenLedger(capacity_tokens=4_096, slots=1_000)
    m = model(ledger, {(Lane.NORMAL, 10): [1_000] * large, (Lane.NORMAL, 5): [30] * small})
    small_beside_large = 0
    while any(m.broker.queues) or m.running:
        before = len(m.order)
        large_waits = bool(m.broker.queues[1])
        assert m.step(random) or m.running
        assert len(m.held) <= len(m.lanes), "held: never more than the open probes brought"
        if large_waits:
            small_beside_large += sum(lane == 0 for lane, _ in m.order[before:])
    assert len(m.order) == large + small
    if large > 4:  # they do not all fit at once, and short ones came while some waited
        assert small_beside_large > 0
    first_large = next(i for i, (lane, _) in enumerate(m.order) if lane == 1)
    assert first_large <= 2 * 4_096 // 32, "passed by for longer than two fillings of the engine"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.randoms())
def test_urgent_work_passes_a_bulk_backlog_and_bulk_does_not_starve(slots: int, random) -> None:
    m = model(TokenLedger(capacity_tokens=0, slots=slots), {(Lane.BULK, 6): [50] * 600, (Lane.URGENT, 6): []})
    urgent, bulk = 0, 1
    for _ in range(20):
        m.step(random)
    m.broker.queues[urgent].extend([50] * 300)
    at = len(m.order)
    while m.broker.queues[urgent]:
        assert m.step(random) or m.running
    came = [lane for lane, _ in m.order[at:]]
    assert came.count(urgent) == 300
    # 16 : 1 by weight. On top: what was asked for before the urgent job came, and one refill before it was known.
    assert came.count(bulk) <= 300 / 16 + slots + 4
    if slots < 16:
        assert came.count(bulk) >= 300 / 16 - slots - 2


@given(st.integers(1, 300), st.lists(st.integers(0, 2_000), max_size=30))
def test_the_queue_is_as_deep_as_the_pace_needs_and_no_deeper(slots: int, finished: list[int]) -> None:
    ledger = TokenLedger(capacity_tokens=0, slots=slots, queues=True)
    least = ledger.slot_limit
    for count in finished:
        for _ in range(count):
            ledger.admit(Cost(1))
            ledger.release(Cost(1))
        ledger.pace(1.0)
        assert least <= ledger.slot_limit <= max(least, 2 * slots)
    for _ in range(20):
        ledger.pace(1.0)  # nothing finishes any more
    assert ledger.slot_limit <= least + 1


def test_a_fast_engine_gets_a_tenth_of_a_second_of_work_and_a_slow_one_an_eighth_of_its_slots() -> None:
    fast, slow = (TokenLedger(capacity_tokens=0, slots=64, queues=True) for _ in range(2))
    for ledger, per_second in ((fast, 320), (slow, 2)):
        for _ in range(40):
            for _ in range(per_second):
                ledger.admit(Cost(1))
                ledger.release(Cost(1))
            ledger.pace(1.0)
    assert (fast.slot_limit, slow.slot_limit) == (96, 72)


def test_an_engine_without_a_queue_gets_none() -> None:
    ledger = TokenLedger(capacity_tokens=0, slots=8)
    for _ in range(1_000):
        ledger.admit(Cost(1))
        ledger.release(Cost(1))
    ledger.pace(0.1)
    assert ledger.slot_limit == 8
