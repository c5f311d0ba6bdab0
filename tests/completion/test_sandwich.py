"""The law over every order of events: no movement looks like loss, and loss at rest always shows.

A small world of items that move through their stages, read step by step as a sandwich is. Every interleaving of the two
is tried for one item, and random ones for more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headrace.completion.account_parts import Intake, JobRow, Side, summed
from headrace.completion.counting import Landed
from headrace.completion.sandwich import Reading

STAGES = ("unsubmitted", "waiting", "queued", "leased", "result", "landed", "acked")
"""`result`: its result is stored and the task is still leased. `landed`: the row is committed too."""
SHAPES = ("t6", "t7")
LAW = ("ok", "failed", "dead", "cancelled", "queued", "landing")


@dataclass(frozen=True)
class World:
    """Where each item is, of a job (`retry` False) or of a retry of all its items."""

    stages: tuple[str, ...]
    retry: bool = False
    lost: frozenset[int] = field(default_factory=frozenset)

    def shape(self, item: int) -> str:
        return SHAPES[item % 2]

    def shapes_of(self, *stages: str) -> dict[str, int]:
        return dict(
            Counter(self.shape(i) for i, s in enumerate(self.stages) if s in stages and i not in self.lost)
        )

    def moved(self, item: int) -> World | None:
        """The world once `item` has gone one step further; None if it is at its end or may not go yet."""
        at = STAGES.index(self.stages[item])
        first = STAGES[0] if not self.retry else STAGES[1]
        if at == len(STAGES) - 1 or item in self.lost:
            return None
        if self.stages[item] in ("unsubmitted", "waiting"):
            if any(s == first for s in self.stages[:item]):
                return None  # stored in the order of their indices
            at = STAGES.index("waiting")
        return replace(self, stages=(*self.stages[:item], STAGES[at + 1], *self.stages[item + 1 :]))

    # --- what is read --------------------------------------------------------------------------------
    def intake(self) -> Intake | None:
        stored = sum(s not in ("unsubmitted", "waiting") for s in self.stages)
        whole = dict(Counter(self.shape(i) for i in range(len(self.stages))))
        if not self.retry:
            shapes = Counter(self.shape(i) for i in range(stored))
            return Intake(stored, "sealed" if stored == len(self.stages) else "", dict(shapes))
        if all(s in ("landed", "acked") for s in self.stages) or not stored:
            return Intake(len(self.stages), "sealed", whole)  # the record is not there yet, or not any more
        return Intake(len(self.stages), "sealed", whole, generation=2, again=stored)

    def tasks(self) -> dict[str, int]:
        return self.shapes_of("queued", "leased", "result", "landed")

    def leased(self) -> dict[str, int]:
        return self.shapes_of("leased", "result", "landed")

    def results(self) -> int:
        return sum(s == "result" and i not in self.lost for i, s in enumerate(self.stages))

    def rows(self) -> tuple[JobRow, Landed]:
        found = Counter(
            (int(self.shape(i)[1:]), "ok") for i, s in enumerate(self.stages) if s in ("landed", "acked")
        )
        n = sum(found.values())
        ended = n == len(self.stages)
        row = JobRow(
            job="j", state="completed" if ended else "sealed", count=len(self.stages), landed=n, ok=n,
            generation=2 if self.retry else 1, retry_items=len(self.stages) if self.retry else 0,
        )  # fmt: skip
        return row, Landed(n, dict(found))


READS = 8
"""Manifest, tasks, results, rows, results, leases, tasks, manifest."""


class Reader:
    """Reads one step after the other, whatever happens in between."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def read(self, world: World) -> None:
        w = world
        steps = (w.intake, w.tasks, w.results, w.rows, w.results, w.leased, w.tasks, w.intake)
        self.seen.append(steps[len(self.seen)]())

    def reading(self) -> Reading:
        first, tasks, results, (row, landed), results_last, leased, tasks_last, last = self.seen  # type: ignore[misc]
        return Reading(row, landed, Side(first, tasks, results), Side(last, tasks_last, results_last), leased)


def settled(world: World) -> Reading:
    reader = Reader()
    for _ in range(READS):
        reader.read(world)
    return reader.reading()


def interleavings(world: World, seen: tuple[object, ...] = ()) -> Iterator[Reading]:
    """Every reading that may come of every order in which items move while it is taken."""
    reader = Reader()
    reader.seen = list(seen)
    if len(seen) == READS:
        yield reader.reading()
        return
    reader.read(world)
    yield from interleavings(world, tuple(reader.seen))
    # What moves before the first read or after the last changes nothing that is not tried from another start.
    if seen:
        for item in range(len(world.stages)):
            if (after := world.moved(item)) is not None:
                yield from interleavings(after, seen)


def worlds(items: int, *, retry: bool) -> Iterator[World]:
    """Every arrangement of `items` in stages that storing in order allows."""
    first = 1 if retry else 0

    def arrange(stages: tuple[str, ...]) -> Iterator[World]:
        if len(stages) == items:
            yield World(stages, retry=retry)
            return
        stored_before = not stages or stages[-1] != STAGES[first]
        for stage in STAGES[2:] if stored_before else ():
            yield from arrange((*stages, stage))
        yield from arrange((*stages, STAGES[first]))

    yield from arrange(())


def assert_law(reading: Reading) -> None:
    assert reading.balanced, reading
    assert structs.replace(reading, landed=None).balanced
    accounts = reading.shapes()
    for account in (*accounts, reading.total()):
        assert account.submitted == sum(getattr(account, name) for name in LAW), (account, reading)
    assert summed(accounts) == reading.total()
    # Whoever counted the rows has not seen more completed than there are.
    total = reading.total()
    assert total.ok + total.failed + total.dead + total.cancelled == reading.rows


@pytest.mark.parametrize("retry", [False, True])
def test_one_item_in_every_order(retry: bool) -> None:
    readings = [r for w in worlds(1, retry=retry) for r in interleavings(w)]
    assert len(readings) > 100
    for reading in readings:
        assert_law(reading)


@pytest.mark.parametrize("retry", [False, True])
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_many_items_in_random_orders(data: st.DataObject, retry: bool) -> None:
    first = STAGES[1] if retry else STAGES[0]
    stored = data.draw(st.lists(st.sampled_from(STAGES[2:]), max_size=5))
    later = data.draw(st.integers(0 if stored else 1, 4))
    world, reader = World((*stored, *(first,) * later), retry=retry), Reader()
    for _ in range(READS):
        reader.read(world)
        for item in data.draw(st.lists(st.integers(0, len(world.stages) - 1), max_size=12)):
            world = world.moved(item) or world
    assert_law(reader.reading())


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_retry_that_opens_while_it_is_read_never_looks_like_loss(data: st.DataObject) -> None:
    """Every item has its outcome, then all of them run again: from some moment on the rows are gone."""
    count, at = data.draw(st.integers(1, 4)), data.draw(st.integers(0, READS))
    world, reader = World(("acked",) * count), Reader()
    for step in range(READS):
        if step == at:
            world = World(("waiting",) * count, retry=True)
        if world.retry:
            for item in data.draw(st.lists(st.integers(0, count - 1), max_size=6)):
                world = world.moved(item) or world
        reader.read(world)
    reading = reader.reading()
    # Rows of before, and tasks of after: such a reading shows by its record that it has to be read again, unless
    # the retry has ended by then and took its record with it.
    assert reading.balanced or reading.void or set(world.stages) <= {"landed", "acked"}
    if reading.balanced:
        assert_law(reading)


@pytest.mark.parametrize("retry", [False, True])
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_loss_at_rest_shows(data: st.DataObject, retry: bool) -> None:
    """An item that is neither leased nor landed is gone: no reading of the rest can balance."""
    stages = data.draw(st.lists(st.sampled_from(("queued", "acked")), min_size=1, max_size=8))
    world = World(tuple(stages), retry=retry)
    queued = [i for i, s in enumerate(stages) if s == "queued"]
    assert settled(world).balanced
    if queued:
        gone = data.draw(st.sampled_from(queued))
        lost = settled(replace(world, lost=frozenset({gone})))
        assert not lost.balanced
        assert not structs.replace(lost, landed=None).balanced  # a status, which does not count anew


def test_a_loss_in_one_shape_is_not_hidden_by_what_another_has_too_much() -> None:
    """Two tasks of t6 and none of t7: together as many as were submitted."""
    row, intake = JobRow(job="j", state="sealed", count=2), Intake(2, "sealed", {"t6": 1, "t7": 1})
    side = Side(intake, {"t6": 2}, 0)
    reading = Reading(row, Landed(0, {}), side, side, {})
    assert not reading.balanced
    assert [(a.shape, a.submitted, a.queued) for a in reading.shapes()] == [("t6", 1, 2), ("t7", 1, 0)]
    assert Reading(row, None, side, side, {}).balanced  # status, which does not count by shape


def test_rows_of_a_cancellation_are_what_remains_of_each_shape() -> None:
    intake = Intake(5, "cancelled", {"t6": 3, "t8": 2})
    side = Side(intake, {}, 0)
    counts = {(6, "ok"): 1, (8, "failed"): 1, (None, "cancelled"): 3}
    row = JobRow(job="j", state="cancelled", count=5, landed=5, ok=1, failed=1, cancelled=3)
    reading = Reading(row, Landed(5, counts), side, side, {})
    assert_law(reading)
    assert [(a.shape, a.ok, a.failed, a.cancelled) for a in reading.shapes()] == [
        ("t6", 1, 0, 2),
        ("t8", 0, 1, 1),
    ]
    short = Reading(row, Landed(4, counts | {(None, "cancelled"): 2}), side, side, {})
    assert not short.balanced


def test_without_shapes_there_is_one_row() -> None:
    side = Side(Intake(2, "sealed"), {"t6": 1}, 0)
    row = JobRow(job="j", state="sealed", count=2, landed=1, ok=1)
    for counts in ({(None, "ok"): 1}, {(6, "ok"): 1}):
        (account,) = Reading(row, Landed(1, counts), side, side, {}).shapes()
        assert (account.shape, account.submitted, account.ok, account.queued) == ("?", 2, 1, 1)


def test_counters_that_disagree_with_the_outcomes_do_not_balance() -> None:
    side = Side(Intake(1, "sealed", {"t6": 1}), {}, 0)
    row = JobRow(job="j", state="completed", count=1, landed=1, failed=1)
    assert not Reading(row, Landed(1, {(6, "ok"): 1}), side, side, {}).balanced


def test_a_record_of_a_later_retry_than_the_rows_voids_the_reading() -> None:
    before = Side(Intake(1, "sealed", {"t6": 1}), {}, 0)
    after = Side(Intake(1, "sealed", {"t6": 1}, generation=2, again=0), {}, 0)
    row = JobRow(job="j", state="completed", count=1, landed=1, ok=1)
    assert not Reading(row, Landed(1, {(6, "ok"): 1}), before, after, {}).balanced
