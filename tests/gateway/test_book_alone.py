"""Records that move no budget are written by themselves: at once, whatever becomes of the others."""

from __future__ import annotations

import asyncio

import pytest

from headrace.contracts.account import view_of
from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.ledger import BudgetHead, CallOutcome, CallRequest, Completed, Intent, Reservation
from headrace.gateway.book import Book
from headrace.gateway.ledger import Entry, Overtaken
from tests.gateway.memory_ledger import MemoryLedger

pytestmark = pytest.mark.anyio

REQUEST = CallRequest(callee="llm", effect="cost_bearing", principal="agent", fingerprint="0" * 64)


def intent(call: str, *reservations: Reservation, owner: str = "g1") -> Intent:
    return Intent(
        call=call, tenant="t", attempt=1, owner=owner, epoch=1, at_us=1, lease_until_us=2, request=REQUEST,
        reservations=list(reservations),
    )  # fmt: skip


async def test_each_is_an_append_of_its_own_and_one_that_comes_too_late_is_the_only_one(
    ledger: MemoryLedger,
) -> None:
    await ledger.append([Entry(intent("c3", owner="other"), 0)])
    book = Book(ledger)
    got = await asyncio.gather(
        *(book.write(intent(f"c{n}"), None, 0) for n in range(6)), return_exceptions=True
    )
    assert [type(x) for x in got] == [int, int, int, Overtaken, int, int]
    assert len(ledger.batches) == len(ledger.log) == 6
    assert [r.call for r in ledger.log if isinstance(r, Intent) and r.owner == "g1"] == [
        "c0",
        "c1",
        "c2",
        "c4",
        "c5",
    ]


async def test_together_they_share_a_batch_and_one_that_comes_too_late_is_the_only_one(
    ledger: MemoryLedger,
) -> None:
    book = Book(ledger, together=True)
    assert await asyncio.gather(*(book.write(intent(f"a{n}"), None, 0) for n in range(6))) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert ledger.batches == [6]
    await ledger.append([Entry(intent("c3", owner="other"), 0)])
    got = await asyncio.gather(
        *(book.write(intent(f"c{n}"), None, 0) for n in range(6)), return_exceptions=True
    )
    assert [type(x) for x in got] == [int, int, int, Overtaken, int, int]


async def test_a_batch_that_is_held_up_holds_up_nobody_else(ledger: MemoryLedger) -> None:
    """A budget's batch finds the ledger away for a while; a record without a budget is written meanwhile."""
    await ledger.append([Entry(BudgetHead(tenant="t", budget="b", unit="calls", limit=9), 0)])
    appends = 0

    def trouble() -> str:
        nonlocal appends
        appends += 1
        return "away" if appends == 1 else ""

    ledger.trouble = trouble
    book = Book(ledger)
    reserved = Reservation(budget="b", unit="calls", amount=1)
    slow = asyncio.create_task(book.write(intent("paid", reserved), None, 0))
    while not appends:
        await asyncio.sleep(0)
    seq = await book.write(intent("free"), None, 0)
    assert not slow.done()
    assert await slow > seq


@pytest.mark.parametrize("how", ["away", "ack lost"])
async def test_a_lost_answer_doubles_nothing_and_patience_ends(ledger: MemoryLedger, how: str) -> None:
    book = Book(ledger)
    ledger.trouble = lambda: how
    if how == "away":
        with pytest.raises(Unavailable) as caught:
            await book.write(intent("c"), None, 0, patience_s=0.01)
        assert caught.value.code == "ledger_away"
        assert ledger.log == []
        return
    seq = await book.write(intent("c"), None, 0)
    assert (seq, len(ledger.log)) == (1, 1)
    end = Completed(
        call="c", tenant="t", attempt=1, owner="g1", epoch=1, at_us=2, outcome=CallOutcome(status=200)
    )
    assert await book.write(end, view_of([intent("c")]), seq) == 2
    assert len(ledger.log) == 2


async def test_what_breaks_is_heard_of(ledger: MemoryLedger) -> None:
    async def broken(_entries: object) -> list[int]:
        raise HeadraceError("the ledger went back", code="ledger_went_back")

    ledger.append = broken  # type: ignore[method-assign]
    with pytest.raises(HeadraceError, match="went back"):
        await Book(ledger).write(intent("c"), None, 0)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()
