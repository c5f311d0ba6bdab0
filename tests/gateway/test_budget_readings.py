"""When a tenant's list of budgets is read: shared by calls, and never before a call was taken up."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.contracts.errors import Unavailable
from headrace.gateway import budgets as budgets_module
from headrace.gateway.budgets import Budgets
from headrace.gateway.ledger import Named
from tests.gateway.memory_ledger import MemoryLedger

pytestmark = pytest.mark.anyio


class Counting(MemoryLedger):
    """Counts readings; each waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = 0
        self.go = asyncio.Event()
        self.away = False

    async def roster(self, tenant: str) -> Named | None:
        self.readings += 1
        found = await super().roster(tenant)  # what it says is of when it was asked
        await self.go.wait()
        if self.away:
            raise Unavailable("the ledger is away")
        return found


async def started(ledger: Counting, count: int) -> None:
    async with asyncio.timeout(5):
        while ledger.readings < count:
            await asyncio.sleep(0)


async def test_one_reading_serves_all_that_were_taken_up_before_it() -> None:
    ledger = Counting()
    budgets = Budgets(ledger)
    taken = [time.monotonic() for _ in range(20)]
    for moment in taken:
        budgets.ahead("t", moment)
    await started(ledger, 1)
    ledger.go.set()
    await asyncio.gather(*(budgets.of("t", "a", since_s=moment) for moment in taken))
    assert ledger.readings == 1


async def test_a_budget_set_while_it_is_read_binds_a_call_that_is_taken_up_after_it() -> None:
    ledger = Counting()
    budgets = Budgets(ledger)
    first = asyncio.create_task(budgets.of("t", "a", since_s=time.monotonic()))
    await started(ledger, 1)
    ledger.go.set()
    await Budgets(ledger).set("t", "b", unit="calls", limit=1)
    found = await asyncio.gather(first, budgets.of("t", "a", since_s=time.monotonic()))
    assert [[b.budget for b in names] for names in found] == [[], ["b"]]


async def test_a_call_that_waited_is_bound_by_what_was_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "FRESH_S", 0.0)
    ledger = Counting()
    ledger.go.set()
    budgets = Budgets(ledger)
    taken = time.monotonic()
    assert await budgets.of("t", "a", since_s=taken) == []
    await Budgets(ledger).set("t", "b", unit="calls", limit=1)
    assert [b.budget for b in await budgets.of("t", "a", since_s=taken)] == ["b"]


async def test_a_reading_that_failed_serves_nobody_else() -> None:
    ledger = Counting()
    ledger.go.set()
    ledger.away = True
    budgets = Budgets(ledger)
    taken = time.monotonic()
    with pytest.raises(Unavailable):
        await budgets.of("t", "a", since_s=taken)
    ledger.away = False
    assert await budgets.of("t", "a", since_s=taken) == []
    assert ledger.readings == 2
