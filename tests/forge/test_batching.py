"""Which rows make a batch: budgets kept, no row lost, order as promised, waiting bounded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contracts.errors import InvalidInput
from headrace.forge.batching import MAX_BYTES, Batching, Order, Sized, pack, parse_batching
from headrace.forge.collector import Collector
from headrace.forge.invoke import RowOutcome
from headrace.forge.sizes import ESTIMATE, LENGTH, SizeFunction, named_size, size_of

pytestmark = pytest.mark.anyio
sizes = st.lists(st.integers(1, 300), max_size=200)


@pytest.mark.parametrize("text", ["rows:1", "rows:64", "rows:65536", "tokens:8192", "submit"])
def test_what_can_be_asked_is_told_as_it_was_asked(text: str) -> None:
    assert str(parse_batching(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rows",
        "rows:",
        "rows:0",
        "rows:-1",
        "rows:65537",
        "rows:1.5",
        "tokens:0",
        "tokens:1e3",
        "ROWS:1",
        "submit:1",
        "rows:1\n",
    ],
)
def test_what_cannot(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"use rows:N .*, tokens:BUDGET or submit"):
        parse_batching(text)


@given(sizes=sizes, n=st.integers(1, 70))
def test_rows_make_full_batches_in_order(sizes: list[int], n: int) -> None:
    rows = [Sized(i, size, 1) for i, size in enumerate(sizes)]
    batches = list(pack(rows, Batching("rows", n), "free"))
    assert [row for batch in batches for row in batch] == rows
    assert all(len(batch) == n for batch in batches[:-1])
    assert all(0 < len(batch) <= n for batch in batches)


@given(sizes=sizes, budget=st.integers(1, 400), order=st.sampled_from(["ordered", "free"]))
@settings(max_examples=200)
def test_a_budget_is_kept_and_no_row_is_lost(sizes: list[int], budget: int, order: Order) -> None:
    rows = [Sized(i, size, 1) for i, size in enumerate(sizes)]
    batches = list(pack(rows, Batching("tokens", budget), order))
    assert sorted(row.item for batch in batches for row in batch) == list(range(len(sizes)))
    for batch in batches:
        assert sum(row.tokens for row in batch) <= budget or len(batch) == 1
    if order == "ordered":
        assert [row for batch in batches for row in batch] == rows


def test_a_batch_is_bounded_in_bytes_whatever_its_rows_count() -> None:
    rows = [Sized(i, 1, MAX_BYTES // 3) for i in range(10)]
    assert [len(b) for b in pack(rows, Batching("rows", 64), "ordered")] == [3, 3, 3, 1]


def test_free_packing_wastes_less_of_what_is_padded_than_rows_do() -> None:
    rng = random.Random(7)
    rows = [Sized(i, int(rng.lognormvariate(4, 1)) + 1, 1) for i in range(2_000)]

    def padding(batches: list[list[Sized[int]]]) -> float:
        padded = sum(len(b) * max(r.tokens for r in b) for b in batches)
        return 1 - sum(r.tokens for r in rows) / padded

    free = padding(list(pack(rows, Batching("tokens", 4_096), "free")))
    assert free < 0.2 < 0.5 < padding(list(pack(rows, Batching("rows", 64), "ordered")))


def test_sizes() -> None:
    assert size_of(ESTIMATE, b"x" * 35) == 10
    assert size_of(LENGTH, b"x" * 35) == 35
    assert size_of(SizeFunction("given", lambda row: row["n"]), b'{"n": 12}') == 12
    # What cannot be measured counts by the estimate, and at least 1.
    assert size_of(SizeFunction("given", lambda row: row["n"]), b'{"m": 12}') == 3
    assert size_of(SizeFunction("given", lambda _: -5), b"1") == 1
    with pytest.raises(InvalidInput, match="cannot be read"):
        named_size("tokenizer:/nowhere/tokenizer.json")


class Sink:
    """Takes batches, and lets them end when it is told."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None

    async def run(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        self.batches.append(list(rows))
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [RowOutcome(value=row) for row in rows]


def collector(
    sink: Sink, text: str, *, width: int = 1, max_wait_s: float = 60.0, order: Order = "free"
) -> Collector:
    return Collector(sink.run, parse_batching(text), order=order, width=width, max_wait_s=max_wait_s)


async def test_a_full_batch_starts_at_once_and_what_is_over_waits() -> None:
    sink = Sink()
    made = collector(sink, "rows:3")
    tasks = [asyncio.create_task(made.outcome(b"%d" % i, 1)) for i in range(7)]
    async with asyncio.timeout(20):
        assert [(await task).value for task in tasks[:6]] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert sink.batches == [[b"0", b"1", b"2"], [b"3", b"4", b"5"]]
    assert made.waiting == 1
    await made.stop(RuntimeError("over"))
    with pytest.raises(RuntimeError, match="over"):
        await tasks[6]


async def test_a_batch_that_does_not_fill_starts_after_the_wait() -> None:
    sink = Sink()
    made = collector(sink, "rows:64", max_wait_s=0.05)
    async with asyncio.timeout(20):
        found = await asyncio.gather(*(made.outcome(b"%d" % i, 1) for i in range(3)))
    assert [o.value for o in found] == [b"0", b"1", b"2"]
    assert sink.batches == [[b"0", b"1", b"2"]]


async def test_rows_gather_while_all_places_are_taken_and_go_in_the_next_batch() -> None:
    sink = Sink()
    sink.open.clear()
    made = collector(sink, "rows:4", max_wait_s=0.0)
    first = asyncio.create_task(made.outcome(b"0", 1))
    while not sink.batches:
        await asyncio.sleep(0)
    rest = [asyncio.create_task(made.outcome(b"%d" % i, 1)) for i in range(1, 6)]
    await asyncio.sleep(0)
    assert made.running == 1
    sink.open.set()
    async with asyncio.timeout(20):
        await asyncio.gather(first, *rest)
    assert sink.batches == [[b"0"], [b"1", b"2", b"3", b"4"], [b"5"]]


async def test_budgets_of_tokens_in_the_collector() -> None:
    sink = Sink()
    made = collector(sink, "tokens:10", max_wait_s=0.05)
    async with asyncio.timeout(20):
        await asyncio.gather(*(made.outcome(b"%d" % size, size) for size in (6, 2, 5, 4, 12, 3, 1)))
    totals = [sum(int(row) for row in batch) for batch in sink.batches]
    assert sum(totals) == 33
    assert all(total <= 10 or len(batch) == 1 for total, batch in zip(totals, sink.batches, strict=True))
    assert sink.batches[0][0] == b"6"  # the oldest is in the first, whatever fits beside it


async def test_a_row_that_is_taken_back_is_not_run() -> None:
    sink = Sink()
    made = collector(sink, "rows:2")
    gone = asyncio.create_task(made.outcome(b"gone", 1))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async with asyncio.timeout(20):
        await asyncio.gather(made.outcome(b"a", 1), made.outcome(b"b", 1))
    assert sink.batches == [[b"a", b"b"]]


async def test_what_a_batch_raises_each_row_of_it_hears_and_the_next_runs() -> None:
    sink = Sink()
    sink.error = ValueError("no process")
    made = collector(sink, "rows:2")
    found = await asyncio.gather(made.outcome(b"a", 1), made.outcome(b"b", 1), return_exceptions=True)
    assert [str(e) for e in found] == ["no process", "no process"]
    sink.error = None
    async with asyncio.timeout(20):
        await asyncio.gather(made.outcome(b"c", 1), made.outcome(b"d", 1))
