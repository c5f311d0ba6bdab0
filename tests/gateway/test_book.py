"""Group commit of records and budgets: exactly what fits is admitted, by any number of gateways, whatever gets lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.contracts.account import AttemptView, CallView, Fold, advance, settle, view_of
from headrace.contracts.errors import Refused, Unavailable
from headrace.contracts.ledger import (
    BudgetHead,
    CallError,
    CallOutcome,
    CallRequest,
    Completed,
    Failed,
    Intent,
    Reservation,
)
from headrace.gateway import book as book_module
from headrace.gateway.book import Book, OverBudget, period_name
from headrace.gateway.ledger import Entry, Ledger, Overtaken, StreamLedger
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.gateway.memory_ledger import MemoryLedger

pytestmark = pytest.mark.anyio

REQUEST = CallRequest(callee="llm", effect="cost_bearing", principal="agent", fingerprint="0" * 64)


def intent(call: str, *reservations: Reservation, owner: str = "g1", attempt: int = 1) -> Intent:
    return Intent(
        call=call,
        tenant="t",
        attempt=attempt,
        owner=owner,
        epoch=1,
        at_us=1,
        lease_until_us=2,
        request=REQUEST,
        reservations=list(reservations),
    )


def completed(i: Intent, **amounts: Any) -> Completed:
    return Completed(
        call=i.call, tenant=i.tenant, attempt=i.attempt, owner=i.owner, epoch=i.epoch, at_us=2,
        outcome=CallOutcome(status=200), postings=settle(AttemptView(i), amounts),
    )  # fmt: skip


def head(budget: str = "b", limit: int = 100, unit: str = "calls") -> BudgetHead:
    return BudgetHead(tenant="t", budget=budget, unit=unit, limit=limit)  # type: ignore[arg-type]


def one(budget: str = "b", amount: int = 1) -> Reservation:
    return Reservation(budget=budget, unit="calls", amount=amount)


@pytest.fixture
async def stream_ledger(mesh: Mesh) -> StreamLedger:
    return StreamLedger(mesh)


async def fold_of(mesh: Mesh) -> Fold:
    """The whole ledger, read from the stream."""
    from headrace.contracts import codec

    fold = Fold()
    seq = 0
    while (found := await jsapi.next_message(mesh, mesh.topology.ledger, "hr.ledger.>", seq + 1)) is not None:
        seq = found.sequence
        schema = codec.BUDGET_HEAD if ".budget." in found.subject else codec.CALL_RECORD
        fold.take(schema.decode(found.data, found.headers))
    return fold


async def admitted(book: Book, calls: list[str], owner: str, *reservations: Reservation) -> list[str]:
    """The calls that got their intent."""

    async def ask(call: str) -> str | None:
        try:
            await book.write(intent(call, *reservations, owner=owner), None, 0)
        except OverBudget:
            return None
        return call

    return [call for call in await asyncio.gather(*map(ask, calls)) if call]


async def test_a_call_from_intent_to_completion_moves_its_budget(stream_ledger: StreamLedger) -> None:
    await stream_ledger.append([Entry(head(limit=10, unit="micro"), 0)])
    book = Book(stream_ledger)
    i = intent("c", Reservation(budget="b", unit="micro", amount=7))
    seq = await book.write(i, None, 0)
    stored = await stream_ledger.call("t", "c")
    assert (stored.records, stored.seq) == ([i], seq)
    found = await stream_ledger.head("t", "b")
    assert found is not None
    assert (found.head.periods[""].held, found.head.periods[""].posted) == (7, 0)
    await book.write(completed(i, micro=9), view_of(stored.records), seq)
    found = await stream_ledger.head("t", "b")
    assert found is not None
    account = found.head.periods[""]
    assert (account.held, account.posted, account.overrun) == (0, 9, 2)
    with pytest.raises(OverBudget, match="1 micro left"):
        await book.write(intent("d", Reservation(budget="b", unit="micro", amount=2)), None, 0)


async def test_a_hundred_of_a_thousand_over_three_gateways(mesh: Mesh, stream_ledger: StreamLedger) -> None:
    """G6: exactly as many as the limit, and the heads say what the records say."""
    await stream_ledger.append([Entry(head(limit=100), 0), Entry(head("tokens", 10**9), 0)])
    books = [Book(stream_ledger) for _ in range(3)]
    calls = [f"c{i}" for i in range(1_000)]
    parts = await asyncio.gather(
        *(admitted(book, calls[n::3], f"g{n}", one(), one("tokens", 1_000)) for n, book in enumerate(books))
    )
    assert sum(map(len, parts)) == 100
    fold = await fold_of(mesh)
    assert fold.differences() == []
    assert len(fold.calls) == 100
    assert fold.accounts["t", "b"][""].held == 100
    assert fold.accounts["t", "tokens"][""].held == 100_000


async def test_of_many_writers_of_one_call_one_wins(stream_ledger: StreamLedger) -> None:
    """G13, at the ledger: one intent, and everybody else hears that they were overtaken."""
    await stream_ledger.append([Entry(head(limit=100), 0)])
    books = [Book(stream_ledger) for _ in range(3)]
    answers = await asyncio.gather(
        *(books[n % 3].write(intent("same", one(), owner=f"g{n}"), None, 0) for n in range(50)),
        return_exceptions=True,
    )
    assert sum(isinstance(a, int) for a in answers) == 1
    assert sum(isinstance(a, Overtaken) for a in answers) == 49
    found = await stream_ledger.head("t", "b")
    assert found is not None
    assert found.head.periods[""].held == 1


async def test_an_overtaken_call_spares_its_neighbours_in_the_batch(stream_ledger: StreamLedger) -> None:
    await stream_ledger.append([Entry(head(limit=100), 0)])
    await Book(stream_ledger).write(intent("taken", one(), owner="other"), None, 0)
    book = Book(stream_ledger)
    answers = await asyncio.gather(
        *(book.write(intent(c, one()), None, 0) for c in ("a", "taken", "b", "c")), return_exceptions=True
    )
    assert [isinstance(a, int) for a in answers] == [True, False, True, True]
    assert isinstance(answers[1], Overtaken)
    found = await stream_ledger.head("t", "b")
    assert found is not None
    assert found.head.periods[""].held == 4


async def test_an_end_that_came_too_late_takes_nothing_from_its_neighbour(
    stream_ledger: StreamLedger,
) -> None:
    """Both would release what one budget holds; only one of them still may, and that one is written."""
    await stream_ledger.append([Entry(head(limit=100), 0)])
    book, other = Book(stream_ledger), Book(stream_ledger)
    late, own = intent("late", one()), intent("own", one())
    late_seq, own_seq = await book.write(late, None, 0), await book.write(own, None, 0)
    await other.write(replace(completed(late, calls=1), owner="other"), view_of([late]), late_seq)
    answers = await asyncio.gather(
        book.write(completed(late), view_of([late]), late_seq),
        book.write(completed(own), view_of([own]), own_seq),
        return_exceptions=True,
    )
    assert isinstance(answers[0], Overtaken)
    assert isinstance(answers[1], int)
    found = await stream_ledger.head("t", "b")
    assert found is not None
    assert (found.head.periods[""].held, found.head.periods[""].posted) == (0, 1)


async def test_an_intent_that_came_too_late_takes_no_room(stream_ledger: StreamLedger) -> None:
    """The last place is its neighbour's."""
    await stream_ledger.append([Entry(head(limit=2), 0)])
    await Book(stream_ledger).write(intent("taken", one(), owner="other"), None, 0)
    book = Book(stream_ledger)
    answers = await asyncio.gather(
        *(book.write(intent(call, one()), None, 0) for call in ("taken", "b", "c")), return_exceptions=True
    )
    assert isinstance(answers[0], Overtaken)
    assert isinstance(answers[1], int)
    assert isinstance(answers[2], OverBudget)


async def test_two_ends_of_one_call_at_once_are_one(stream_ledger: StreamLedger) -> None:
    """A resolver and an operator in one gateway: the first is written, the second hears that it was not."""
    await stream_ledger.append([Entry(head(limit=5), 0)])
    book, i = Book(stream_ledger), intent("c", one())
    seq = await book.write(i, None, 0)
    failed = Failed(
        call="c", tenant="t", attempt=1, owner="g1", epoch=1, at_us=2,
        error=CallError(type="refused"), postings=settle(AttemptView(i)),
    )  # fmt: skip
    answers = await asyncio.gather(
        book.write(completed(i, calls=1), view_of([i]), seq),
        book.write(failed, view_of([i]), seq),
        return_exceptions=True,
    )
    assert isinstance(answers[0], int)
    assert isinstance(answers[1], Overtaken)


async def test_a_budget_that_does_not_exist_refuses_its_calls_only(stream_ledger: StreamLedger) -> None:
    await stream_ledger.append([Entry(head(limit=100), 0)])
    book = Book(stream_ledger)
    answers = await asyncio.gather(
        book.write(intent("a", one("nowhere")), None, 0),
        book.write(intent("b", one()), None, 0),
        return_exceptions=True,
    )
    assert isinstance(answers[0], Refused)
    assert "nowhere" in str(answers[0])
    assert isinstance(answers[1], int)


async def test_more_budgets_than_a_batch_takes(stream_ledger: StreamLedger) -> None:
    names = [f"b{i}" for i in range(30)]
    await stream_ledger.append([Entry(head(name, 10), 0) for name in names])
    book = Book(stream_ledger)
    await asyncio.gather(
        *(
            book.write(intent(f"c{i}", *(one(name) for name in names[: 1 + i % 30])), None, 0)
            for i in range(300)
            if i < 10
        )
    )
    found = await stream_ledger.head("t", "b0")
    assert found is not None
    assert found.head.periods[""].held == 10


async def test_what_was_remembered_of_a_budget_is_no_reason_to_refuse(stream_ledger: StreamLedger) -> None:
    await stream_ledger.append([Entry(head(limit=1), 0)])
    one_book, other = Book(stream_ledger), Book(stream_ledger)
    i = intent("a", one())
    seq = await one_book.write(i, None, 0)
    with pytest.raises(OverBudget):
        await one_book.write(intent("b", one()), None, 0)
    failed = Failed(
        call="a", tenant="t", attempt=1, owner="g1", epoch=1, at_us=2,
        error=CallError(type="refused"), postings=settle(AttemptView(i)),
    )  # fmt: skip
    await other.write(failed, view_of([i]), seq)
    await one_book.write(intent("b", one()), None, 0)


async def test_a_ledger_that_is_away_admits_nothing(
    stream_ledger: StreamLedger, nats_server: NatsServer
) -> None:
    """G7: no admission; and once it is back the same intent is written once."""
    await stream_ledger.append([Entry(head(limit=5), 0)])
    book = Book(stream_ledger)
    nats_server.kill()
    with pytest.raises(Unavailable, match="the ledger is away"):
        await book.write(intent("a", one()), None, 0, patience_s=0.2)
    await asyncio.to_thread(nats_server.restart)
    await book.write(intent("b", one()), None, 0, patience_s=20)
    found = await stream_ledger.head("t", "b")
    assert found is not None
    assert found.head.periods[""].held == 1


async def test_the_broker_killed_again_and_again_under_load(
    settings: Settings, mesh: Mesh, stream_ledger: StreamLedger, nats_server: NatsServer
) -> None:
    await stream_ledger.append([Entry(head(limit=200), 0)])
    async with await Mesh.connect(settings, name="g2") as other:
        books = [Book(stream_ledger), Book(StreamLedger(other))]

        async def run(n: int, book: Book) -> int:
            done = 0
            for i in range(150):
                try:
                    await book.write(intent(f"c{n}-{i}", one(), owner=f"g{n}"), None, 0, patience_s=30)
                    done += 1
                except OverBudget:
                    pass
            return done

        tasks = [asyncio.create_task(run(n, book)) for n, book in enumerate(books)]
        for _ in range(3):
            before = await _held(stream_ledger)
            nats_server.kill()
            await asyncio.to_thread(nats_server.restart)
            async with asyncio.timeout(20):
                while await _held(stream_ledger) == before and not all(t.done() for t in tasks):
                    await asyncio.sleep(0.01)
        assert sum(await asyncio.gather(*tasks)) == 200
    fold = await fold_of(mesh)
    assert fold.differences() == []
    assert fold.accounts["t", "b"][""].held == 200


async def _held(ledger: Ledger) -> int:
    while True:
        try:
            found = await ledger.head("t", "b")
        except Unavailable:
            await asyncio.sleep(0.01)
            continue
        account = found and found.head.periods.get("")
        return account.held if account else 0


@pytest.mark.parametrize("seed", range(5))
async def test_lost_answers_double_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of writes with every third answer lost or nothing sent: each record once, heads as the records say."""
    monkeypatch.setattr(book_module, "backoff_s", lambda attempt: 0.0)
    rng = random.Random(seed)
    ledger = MemoryLedger()
    await ledger.append([Entry(head(limit=50), 0)])
    ledger.trouble = lambda: rng.choice(("", "", "away", "ack lost"))
    books = [Book(ledger) for _ in range(3)]

    async def life(n: int) -> bool:
        book = books[n % 3]
        i = intent(f"c{n}", one(), owner=f"g{n % 3}")
        try:
            seq = await book.write(i, None, 0, patience_s=30)
        except OverBudget:
            return False
        view: CallView = advance(None, i)
        end = completed(i, calls=1) if n % 2 else completed(i)
        await book.write(end, view, seq, patience_s=30)
        return True

    done = await asyncio.gather(*map(life, range(120)))
    fold = Fold()
    for record in ledger.log:
        fold.take(record)
        account = fold.accounts.get(("t", "b"), {}).get("")
        assert account is None or account.posted + account.held <= 50
    assert fold.differences() == []
    assert len(fold.calls) == sum(done)
    assert all(view.state == "completed" for view in fold.calls.values())
    account = fold.accounts["t", "b"][""]
    assert account.held == 0
    assert account.posted == sum(1 for n, ok in enumerate(done) if ok and n % 2)


def test_names_of_periods() -> None:
    at_us = 1_764_547_199_999_999  # a microsecond before December 2025, UTC
    assert period_name("day", at_us) == "2025-11-30"
    assert period_name("month", at_us) == "2025-11"
    assert period_name("day", at_us + 1) == "2025-12-01"
    assert period_name("none", at_us) == ""
