"""A batch that fails is split until the guilty row stands alone, and how often a row may run meanwhile."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.forge import Function, Retry, function
from headrace.forge.children import Died
from headrace.forge.invoke import RowOutcome, invoke
from headrace.forge.isolation import Isolation
from tests.forge import probes


class Processes:
    """Stands for processes that die at a row: rows in `deadly` end the batch's process, `slow` ones its time."""

    width = 1
    busy_s = 0.0

    def __init__(
        self, f: Function[..., Any], *, deadly: set[int] = frozenset(), slow: set[int] = frozenset()
    ) -> None:  # type: ignore[assignment]
        self.f, self.deadly, self.slow = f, deadly, slow
        self.batches: list[tuple[bool, list[Any]]] = []

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def run(self, rows: Sequence[bytes], *, apart: bool = False) -> list[RowOutcome]:
        await asyncio.sleep(0)
        decoded = [json.loads(raw) for raw in rows]
        self.batches.append((apart, decoded))
        for row in decoded:
            if isinstance(row, int) and row in self.deadly:
                raise Died("died of SIGKILL")
            if isinstance(row, int) and row in self.slow:
                raise Died("took longer", timeout=True)
        return invoke(self.f, rows)

    async def run_apart(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        return await self.run(rows, apart=True)


def run(f: Function[..., Any], rows: Sequence[Any], **faults: set[int]) -> tuple[list[Any], Processes]:
    pool = Processes(f, **faults)
    found = asyncio.run(Isolation(f, pool).run([json.dumps(row).encode() for row in rows]))
    return [o.error.type if o.error else json.loads(o.value or b"") for o in found], pool


def doubles(guilty: set[int], *, generator: bool = False) -> Function[..., Any]:
    def checked(row: int) -> int:
        if row in guilty:
            raise ValueError(row)
        return 2 * row

    def each(rows: list[int]):
        for row in rows:
            yield checked(row)

    def whole(rows: list[int]) -> list[int]:
        return [checked(row) for row in rows]

    return function(each if generator else whole)


@given(n=st.integers(1, 70), data=st.data())
@settings(max_examples=60, deadline=None)
def test_each_row_gets_its_own_end_and_runs_a_bounded_number_of_times(n: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, n - 1), max_size=n))
    found, pool = run(doubles(guilty), range(n))
    assert found == ["raised" if i in guilty else 2 * i for i in range(n)]
    runs = Counter(row for _, batch in pool.batches for row in batch)
    assert max(runs.values()) <= 1 + math.ceil(math.log2(n)) if n > 1 else runs == {0: 1}


@given(n=st.integers(1, 40), data=st.data())
@settings(max_examples=40, deadline=None)
def test_processes_that_die_convict_only_who_they_died_of(n: int, data: st.DataObject) -> None:
    deadly = data.draw(st.sets(st.integers(0, n - 1), max_size=4))
    slow = data.draw(st.sets(st.integers(0, n - 1), max_size=2)) - deadly
    found, pool = run(doubles(set()), range(n), deadly=deadly, slow=slow)
    assert found == ["crashed" if i in deadly else "timeout" if i in slow else 2 * i for i in range(n)]
    runs = Counter(row for _, batch in pool.batches for row in batch)
    # One run more: a row is convicted by two deaths, of which at least one is its own.
    assert max(runs.values()) <= 2 + math.ceil(math.log2(max(2, n)))


def test_a_row_that_is_innocent_runs_once_where_nothing_fails() -> None:
    found, pool = run(doubles(set()), range(50))
    assert found == [2 * i for i in range(50)]
    assert [len(batch) for _, batch in pool.batches] == [50]


def test_a_generator_s_rows_before_the_guilty_one_run_once() -> None:
    found, pool = run(doubles({30}, generator=True), range(50))
    assert found == ["raised" if i == 30 else 2 * i for i in range(50)]
    assert [batch for _, batch in pool.batches] == [list(range(50)), [30], list(range(31, 50))]


def test_fifty_rows_one_fails() -> None:
    for generator in (False, True):
        found, _ = run(doubles({17}, generator=generator), range(50))
        assert Counter(map(str, found))["raised"] == 1
        assert len([v for v in found if v != "raised"]) == 49


def test_suspects_of_a_crash_run_apart() -> None:
    _, pool = run(doubles(set()), range(8), deadly={5})
    assert [apart for apart, _ in pool.batches] == [False] + [True] * (len(pool.batches) - 1)
    assert pool.batches[-2:] == [(True, [5]), (True, [6, 7])] or (True, [5]) in pool.batches


def test_one_row_is_not_convicted_by_one_death() -> None:
    died: list[int] = []

    class Once(Processes):
        async def run(self, rows: Sequence[bytes], *, apart: bool = False) -> list[RowOutcome]:
            if not died:
                died.append(1)
                raise Died("died of SIGKILL")  # the machine was short of memory
            return await super().run(rows, apart=apart)

    f = doubles(set())
    (only,) = asyncio.run(Isolation(f, Once(f)).run([b"4"]))
    assert only.value == b"8"


def test_a_row_that_only_drops_itself_is_the_one_with_the_error() -> None:
    found, _ = run(probes.drops_some, [{"text": t} for t in ("a", "drop", "c")])
    assert [f if isinstance(f, str) else f["upper"] for f in found] == ["A", "wrong_count", "C"]


def test_a_function_that_never_returns_answers_fails_every_row() -> None:
    found, pool = run(probes.returns_nothing, [{"text": t} for t in "abcd"])
    assert found == ["wrong_count"] * 4
    assert len(pool.batches) == 7


def test_an_error_that_passes_is_tried_again_as_it_is() -> None:
    calls: list[int] = []

    @function(retry=Retry(on=(ConnectionError,), tries=3, delay_s=0.0))
    def f(rows: list[int]) -> list[int]:
        calls.append(len(rows))
        if len(calls) < 3:
            raise ConnectionError("not yet")
        return rows

    assert run(f, range(8))[0] == list(range(8))
    assert calls == [8, 8, 8]


def test_an_error_that_does_not_pass_is_split_in_the_end() -> None:
    calls: list[list[int]] = []

    @function(retry=Retry(on=(ConnectionError,), tries=2, delay_s=0.0))
    def f(rows: list[int]) -> list[int]:
        calls.append(list(rows))
        if 2 in rows:
            raise ConnectionError("the service knows no 2")
        return rows

    assert run(f, range(4))[0] == [0, 1, "raised", 3]
    # Tries for the whole batch only: a service that is away must not hold up every half.
    assert calls == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]


def test_a_pool_that_was_stopped_convicts_nobody() -> None:
    class Stopped(Processes):
        async def run(self, rows: Sequence[bytes], *, apart: bool = False) -> list[RowOutcome]:
            raise Died("was stopped", stopped=True)

    f = doubles(set())
    with pytest.raises(Died):
        asyncio.run(Isolation(f, Stopped(f)).run([b"1", b"2"]))
