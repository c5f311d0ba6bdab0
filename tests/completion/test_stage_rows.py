"""What arrives, what is assigned and what is collected, in the tables alone: against a plain model, with seeds."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from headrace.completion import job_rows, pipeline_rows, stage_groups, stage_reading, stage_rows
from headrace.completion.landing import land
from headrace.completion.pipeline_proof import feeding_of
from headrace.completion.stage_rows import Source, Stage
from headrace.completion.store import Connection, Store
from headrace.contracts.messages import ItemError, JobSealed, Result
from headrace.contracts.pipeline import PipelineRecord, PipelineSpec
from tests.completion.pipes import pipeline, stage

pytestmark = pytest.mark.anyio

SPEC = pipeline("p", stage("parts", each="value"), stage("next"), stage("groups", collect="parent"))


@pytest.fixture
def anyio_backend() -> Any:
    """The loop has no part in it."""
    return ("asyncio", {})


@pytest.fixture
def seed() -> int:
    """Another one each time, printed."""
    found = random.randrange(1 << 30)
    print("seed", found)
    return found


def result(job: str, index: int, status: str = "ok", value: Any = None) -> Result:
    """An outcome of a stage's job."""
    raw = msgspec.Raw(msgspec.json.encode(value)) if status == "ok" else msgspec.UNSET
    error = None if status == "ok" else ItemError(type="x")
    return Result(job=job, index=index, function="generate", status=status, value=raw, error=error)  # type: ignore[arg-type]


def record(spec: PipelineSpec) -> PipelineRecord:
    return PipelineRecord(spec=spec, fingerprint="0" * 16, opened_us=1)


def land_mixed(
    connection: Connection, rng: random.Random, job: str, values: dict[int, Any]
) -> dict[int, str]:
    """Land an outcome for each index, in random batches with repeats of other kinds; return each one's first status."""
    first: dict[int, str] = {}
    order = [*values, *rng.choices(list(values), k=len(values))] if values else []
    rng.shuffle(order)
    while order:
        batch = [order.pop() for _ in range(min(len(order), rng.randrange(1, 25)))]
        results = [result(job, i, rng.choice(("ok", "ok", "ok", "failed", "dead")), values[i]) for i in batch]
        for r in results:
            first.setdefault(r.index, r.status)
        land(connection, results)
    return first


def seal(connection: Connection, job: str, count: int) -> None:
    job_rows.sealed(connection, JobSealed(job=job, count=count, input_fingerprint="0" * 16))
    job_rows.finish_full(connection, [job])


@pytest.mark.parametrize("late", [False, True], ids=["noted first", "noted late"])
async def test_each_ok_row_arrives_once_whatever_comes_twice(store: Store, seed: int, *, late: bool) -> None:
    """Also when the pipeline is noted after some, or all, of its rows have landed."""
    rng = random.Random(seed)

    def work(connection: Connection) -> None:
        if not late:
            assert pipeline_rows.note(connection, record(SPEC))
        first = land_mixed(connection, rng, "p-first", {i: [i] for i in range(40)})
        if late:
            pipeline_rows.note(connection, record(SPEC))
        first |= land_mixed(connection, rng, "p-first", {i: [i] for i in range(40, 60)})
        assert not pipeline_rows.note(connection, record(SPEC)), "noted again, it changes nothing"
        rows = connection.execute(
            "SELECT arrival, parent_index FROM stage_arrivals WHERE job = 'p-parts' ORDER BY arrival"
        ).fetchall()
        assert [n for n, _ in rows] == list(range(len(rows)))
        assert sorted(i for _, i in rows) == sorted(i for i, status in first.items() if status == "ok")
        assert connection.execute(
            "SELECT count(*) FROM stage_arrivals WHERE job <> 'p-parts'"
        ).fetchall() == [(0,)]

    await store.write(work)


def feed(
    connection: Connection, rng: random.Random, at: Stage, counts: dict[int, int]
) -> dict[int, tuple[int, int]]:
    """Assign all that has arrived, in pages; `counts` says how many rows each becomes. Return where each begins."""
    found: dict[int, tuple[int, int]] = {}
    while True:
        position = stage_rows.position(connection, at)
        numbers, rows = stage_reading.arrived(connection, at, position.arrival, rng.randrange(1, 12))
        if not numbers:
            return found
        first, page = position.assigned, list[Source]()
        for row in rows:
            page.append(Source(row.index, 1, first, counts[row.index]))
            found[row.index] = (first, counts[row.index])
            first += counts[row.index]
        stage_rows.assign(connection, at, numbers, page, [])


async def test_groups_have_their_members_in_the_order_of_the_input(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    spec_record = record(SPEC)

    def work(connection: Connection) -> None:
        pipeline_rows.note(connection, spec_record)
        first, parts, following, groups = stage_rows.stages(connection, "p")
        assert first.parent is None
        sizes = {i: rng.randrange(4) for i in range(20)}
        ok_first = land_mixed(connection, rng, "p-first", {i: ["x"] * n for i, n in sizes.items()})
        seal(connection, "p-first", 25)
        begin = feed(connection, rng, parts, sizes)
        total = sum(n for _, n in begin.values())
        ok_parts = land_mixed(connection, rng, "p-parts", dict.fromkeys(range(total), 1))
        seal(connection, "p-parts", total)
        stage_rows.mark_fed(connection, "p-parts")
        placed = feed(connection, rng, following, dict.fromkeys(range(total), 1))
        ok_next = land_mixed(connection, rng, "p-next", dict.fromkeys(range(len(placed)), 1))
        seal(connection, "p-next", len(placed))
        assert not stage_rows.position(connection, groups).ended, "p-next may still be fed"
        stage_rows.mark_fed(connection, "p-next")
        assert stage_rows.position(connection, groups).ended
        wanted = [
            [
                placed[part][0]
                for part in range(begin[i][0], begin[i][0] + begin[i][1])
                if part in placed and ok_next[placed[part][0]] == "ok"
            ]
            for i in sorted(begin)
        ]
        assert set(begin) == {i for i, status in ok_first.items() if status == "ok"}
        assert set(placed) == {i for i, status in ok_parts.items() if status == "ok"}
        assert stage_groups.collect(connection, groups, SPEC) == len(wanted)
        assert stage_groups.collect(connection, groups, SPEC) == len(wanted), "again, it changes nothing"
        keys = stage_groups.keys(connection, "p-groups", first=0, end=len(wanted), position=0, limit=10_000)
        found: list[list[int]] = [[] for _ in wanted]
        for group, index, _ in keys:
            found[group].append(index)
        assert found == wanted
        assert stage_groups.sizes(connection, "p-groups", 0, 1_000) == [len(each) for each in wanted]
        for at in (parts, following, groups):
            assert feeding_of(connection, at, spec_record, prove=True).problems == []
        if keys:
            connection.execute('UPDATE stage_members SET grp = grp + 1 WHERE "index" = ?', [keys[0][1]])
            assert feeding_of(connection, groups, spec_record, prove=True).problems

    await store.write(work)
