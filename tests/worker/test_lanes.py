"""The planner's decisions, one by one."""

from __future__ import annotations

from headrace.contracts.names import Lane
from headrace.inference_worker.lanes import LaneState, plan
from headrace.inference_worker.ledger import Cost, TokenLedger


def lane(lane: Lane = Lane.NORMAL, shape: int = 6, *, pending: int = 0, outstanding: int = 0) -> LaneState:
    return LaneState(lane=lane, shape=shape, upper=1 << shape, pending=pending, outstanding=outstanding)


def ledger(tokens: int = 4_096, slots: int = 64, **more: float) -> TokenLedger:
    return TokenLedger(capacity_tokens=tokens, slots=slots, **more)


def asks(lanes: list[LaneState], of: TokenLedger) -> dict[int, int]:
    return dict(plan(lanes, of).asks)


def test_an_idle_worker_asks_every_consumer_for_one() -> None:
    assert asks([lane(Lane.URGENT), lane(), lane(Lane.BULK)], ledger()) == {0: 1, 1: 1, 2: 1}


def test_an_open_probe_is_not_asked_again() -> None:
    assert asks([lane(outstanding=1), lane(outstanding=1)], ledger()) == {}


def test_the_first_item_tells_of_the_backlog_and_more_are_asked() -> None:
    # 4,096 tokens hold 64 of 64 tokens; one runs.
    of = ledger()
    of.admit(Cost(64))
    assert asks([lane(pending=1_000), lane(shape=7, outstanding=1)], of) == {0: 63}


def test_no_more_than_wait_and_no_more_than_fit() -> None:
    assert asks([lane(pending=5)], ledger()) == {0: 5}
    assert asks([lane(shape=10, pending=100)], ledger()) == {0: 4}
    assert asks([lane(pending=100)], ledger(slots=10)) == {0: 10}


def test_what_is_asked_counts_against_the_budget() -> None:
    of = ledger(slots=1_000)
    assert asks([lane(shape=10, pending=100, outstanding=4)], of) == {}
    assert asks([lane(shape=10, pending=100, outstanding=3)], of) == {0: 1}
    # Of a pull larger than the backlog only the backlog is sure to come.
    assert asks([lane(shape=10, pending=1, outstanding=4), lane(pending=100)], of) == {
        1: (4_096 - 1_024) // 64
    }


def test_between_the_marks_nothing_is_asked() -> None:
    of = ledger(low_water=0.85)
    of.admit(Cost(3_482))
    assert asks([lane(pending=100)], of) == {}
    of.release(Cost(3_482))
    of.admit(Cost(3_480))
    assert asks([lane(pending=100)], of) == {0: (4_096 - 3_480) // 64}


def test_an_engine_that_queues_gets_an_eighth_more_and_never_less_than_its_slots() -> None:
    of = TokenLedger(capacity_tokens=0, slots=64, queues=True)
    assert asks([lane(pending=1_000)], of) == {0: 72}
    for _ in range(69):
        of.admit(Cost(1))
    assert asks([lane(pending=1_000)], of) == {}
    of.release(Cost(1))
    assert asks([lane(pending=1_000)], of) == {0: 4}


def test_a_free_slot_of_an_engine_without_a_queue_is_filled_at_once() -> None:
    of = TokenLedger(capacity_tokens=0, slots=8)
    for _ in range(7):
        of.admit(Cost(1))
    assert asks([lane(pending=1_000)], of) == {0: 1}


def test_lanes_share_by_weight() -> None:
    lanes = [lane(x, pending=10_000) for x in Lane]
    got = asks(lanes, TokenLedger(capacity_tokens=0, slots=2_100))
    total = sum(got.values())
    assert total == 2_100
    assert abs(got[0] / total - 16 / 21) < 0.01
    assert abs(got[1] / total - 4 / 21) < 0.01
    assert abs(got[2] / total - 1 / 21) < 0.01


def test_shapes_mix_as_they_stand_in_the_queue() -> None:
    # 1,000 small ones and 100 that are eight times as long: each plan takes of both.
    got = asks(
        [lane(shape=6, pending=1_000), lane(shape=9, pending=100)], ledger(tokens=1 << 14, slots=10_000)
    )
    assert got[0] * 64 + got[1] * 512 <= 1 << 14
    assert 0.8 < (got[0] / 1_000) / (got[1] / 100) < 1.25


def test_a_large_item_that_does_not_fit_lets_small_ones_pass_and_then_gets_its_room() -> None:
    of = ledger(tokens=1_024, slots=1_000, low_water=0.95)
    lanes = [lane(shape=5, pending=100_000), lane(shape=9, pending=10)]
    running = Cost(600)
    of.admit(running)
    small = 0
    clock = 0.0
    for turn in range(100):
        decided = plan(lanes, of, clock=clock, probe=False)
        clock = decided.clock
        for i, passed in decided.passes.items():
            lanes[i].passed = passed
        if any(i == 1 for i, _ in decided.asks):
            break
        small += sum(n for i, n in decided.asks)
        of.release(running)
        running = Cost(max(64, 600 - 10 * turn))  # the short ones end as fast as they come, the rest slowly
        of.admit(running)
    else:
        raise AssertionError("the large item starved")
    assert 0 < small <= 2 * 1_024 // 32  # about one filling of the engine


def test_whoever_was_idle_has_saved_nothing_up() -> None:
    of = TokenLedger(capacity_tokens=0, slots=1)
    busy, late = lane(Lane.BULK, pending=10_000), lane(Lane.NORMAL, pending=0, outstanding=1)
    clock = 0.0
    for _ in range(500):
        decided = plan([busy, late], of, clock=clock)
        clock, busy.passed = decided.clock, decided.passes[0]
    late.pending, late.outstanding = 10_000, 0
    got = [0, 0]
    for _ in range(100):
        decided = plan([busy, late], of, clock=clock)
        clock = decided.clock
        for i, passed in decided.passes.items():
            (busy, late)[i].passed = passed
        for i, n in decided.asks:
            got[i] += n
    assert 15 <= got[0] <= 25  # 1 : 4, and not 500 in a row for the newcomer


def test_while_something_is_held_no_probe_is_opened() -> None:
    of = ledger()
    of.hold(Cost(100))
    assert asks([lane(), lane(Lane.BULK)], of) == {}


def test_held_work_keeps_others_from_its_place() -> None:
    of = ledger(slots=1_000)
    of.hold(Cost(2_048))
    assert asks([lane(pending=1_000)], of) == {0: 2_048 // 64}


def test_more_tokens_than_the_shape_promised_are_learned_and_forgotten() -> None:
    c = lane(shape=6)
    for _ in range(60):
        c.learn(Cost(1_000, 8), 4_096)
    assert 990 <= c.bound <= 1_000
    assert c.width == 8
    # 16 slots hold two of eight sequences each.
    c.pending = 100
    assert asks([c], TokenLedger(capacity_tokens=100_000, slots=16)) == {0: 2}
    for _ in range(100):
        c.learn(Cost(50), 4_096)
    assert (c.bound, c.width) == (64, 1)
    assert not c.wants_to_learn(Cost(64))
    c.learn(Cost(1 << 20), 4_096)
    assert c.bound <= 4_096
