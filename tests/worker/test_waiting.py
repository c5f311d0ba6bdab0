"""Held items: who starts next, who goes back, and after how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.contracts.names import Lane
from headrace.inference_worker.lanes import LaneState
from headrace.inference_worker.ledger import Cost, TokenLedger
from headrace.inference_worker.waiting import Waiting

pytestmark = pytest.mark.anyio


class Held:
    """What `Waiting` looks at of an item."""

    def __init__(self, name: str, tokens: int, *, lane: Lane = Lane.NORMAL, delivered: int = 1) -> None:
        self.name = name
        self.cost = Cost(tokens)
        self.lane = LaneState(lane=lane, shape=6, upper=64)
        self.delivery = self
        self.delivered = delivered


class Bench:
    def __init__(self, *, capacity: int = 1_000, hold_s: float = 0.05) -> None:
        self.ledger = TokenLedger(capacity_tokens=capacity, slots=100)
        self.started: list[str] = []
        self.returned: list[str] = []
        self.waiting: Any = Waiting(
            self.ledger,
            start=lambda item: self.started.append(item.name),  # type: ignore[attr-defined]
            give_back=lambda item: self.returned.append(item.name),  # type: ignore[attr-defined]
            hold_s=hold_s,
        )


async def test_urgent_starts_first_then_in_order_of_arrival_and_no_large_one_blocks() -> None:
    bench = Bench()
    full = Cost(900)
    bench.ledger.admit(full)
    for item in (
        Held("bulk", 50, lane=Lane.BULK),
        Held("large", 950),
        Held("normal", 50),
        Held("urgent", 50, lane=Lane.URGENT),
    ):
        bench.waiting.add(item)
    bench.waiting.start_fitting()
    assert bench.started == ["urgent", "normal"]
    bench.ledger.release(full)
    bench.waiting.start_fitting()
    assert bench.started == ["urgent", "normal", "bulk"]
    assert [item.name for item in bench.waiting.items()] == ["large"]
    assert bench.ledger.held_tokens == 950


async def test_what_does_not_start_soon_goes_back_once_and_is_kept_the_second_time() -> None:
    bench = Bench()
    bench.ledger.admit(Cost(1_000))
    bench.waiting.add(Held("first", 10))
    bench.waiting.add(Held("second", 10, delivered=2))
    await asyncio.sleep(0.02)
    assert bench.returned == []
    bench.waiting.add(Held("later", 10))
    await asyncio.sleep(0.04)
    assert bench.returned == ["first"]
    await asyncio.sleep(0.06)
    assert bench.returned == ["first", "later"]
    assert [item.name for item in bench.waiting.items()] == ["second"]
    assert bench.ledger.held_tokens == 10


async def test_a_stop_gives_everything_back_and_a_cancelled_one_is_dropped() -> None:
    bench = Bench()
    bench.ledger.admit(Cost(1_000))
    items = [Held("a", 10), Held("b", 10, delivered=3), Held("c", 10)]
    for item in items:
        bench.waiting.add(item)
    bench.waiting.drop(items[0])
    bench.waiting.drop(items[0])
    bench.waiting.give_back_all()
    assert bench.returned == ["b", "c"]
    assert (len(bench.waiting), bench.ledger.held_tokens, bench.ledger.held_slots) == (0, 0, 0)
