"""Outcomes and counters on a real DuckDB, without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest

from headrace.completion import job_rows
from headrace.completion.counting import count_landed, gaps
from headrace.completion.jobs import apply
from headrace.completion.landing import land
from headrace.completion.outcomes import CHUNK_BYTES, encode_chunks, insert_results
from headrace.completion.results import _COLUMNS, to_result
from headrace.completion.schema import STEPS
from headrace.completion.store import Store
from headrace.contracts.errors import Conflict, InvalidInput, Unavailable
from headrace.contracts.generation import Generation
from headrace.contracts.messages import (
    Choice,
    ItemError,
    JobCancelled,
    JobCompleted,
    JobOpened,
    JobSealed,
    Result,
    Task,
    TextPrompt,
    Timings,
    Usage,
)
from tests.completion.world import result

pytestmark = pytest.mark.anyio
INPUT = "0123456789abcdef"


async def counters(store: Store, job: str = "j") -> dict[str, Any]:
    def read(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
        cursor = connection.execute("SELECT * FROM jobs WHERE job = ?", [job])
        names = [d[0] for d in cursor.description]
        return dict(zip(names, cursor.fetchone(), strict=True))

    return await store.read(read)


async def rows(store: Store, statement: str) -> list[tuple[Any, ...]]:
    return await store.read(lambda c: c.execute(statement).fetchall())


def plain(found: Result) -> tuple[Result, bytes | None]:
    """The result without its value, and the value's bytes: raw JSON has no equality."""
    value = None if found.value is msgspec.UNSET else bytes(found.value)
    return msgspec.structs.replace(found, value=msgspec.UNSET), value


async def test_the_same_batch_twice_lands_once_and_counts_as_duplicates(store: Store) -> None:
    batch = [result("j", i) for i in range(100)]
    for _ in range(2):
        await store.write(insert_results, batch, 1)
    job = await counters(store)
    assert (job["ok"], job["landed"], job["duplicates"]) == (100, 100, 100)
    assert (job["tokens_in"], job["tokens_out"]) == (300, 200)


async def test_duplicates_inside_one_batch_and_across_chunks(store: Store) -> None:
    batch = [result("j", i % 2_100) for i in range(4_500)]
    await store.write(insert_results, batch, 1)
    job = await counters(store)
    assert (job["ok"], job["duplicates"]) == (2_100, 2_400)


async def test_the_first_terminal_outcome_wins(store: Store) -> None:
    await store.write(insert_results, [result("j", 0, "failed"), result("j", 0)], 1)
    await store.write(insert_results, [result("j", 0)], 2)
    job = await counters(store)
    assert (job["ok"], job["failed"], job["duplicates"]) == (0, 1, 2)


async def test_jobs_in_one_batch_are_counted_apart(store: Store) -> None:
    batch = [result(f"j{i % 3}", i // 3, "dead" if i % 2 else "ok") for i in range(300)]
    await store.write(insert_results, [*batch, *batch[:3]], 1)
    for name in ("j0", "j1", "j2"):
        job = await counters(store, name)
        assert (job["ok"], job["dead"], job["duplicates"]) == (50, 50, 1)


async def test_many_jobs_of_one_item_land_in_one_batch(store: Store) -> None:
    await store.write(insert_results, [result(f"j{i}", 0) for i in range(2_000)], 1)
    assert await rows(store, "SELECT count(*), sum(ok) FROM jobs") == [(2_000, 2_000)]


async def test_of_two_generations_the_latest_counts(store: Store) -> None:
    await store.write(insert_results, [result("j", i, "failed" if i < 3 else "ok") for i in range(10)], 1)
    await store.write(insert_results, [result("j", 0, generation=2), result("j", 1, "dead", generation=2)], 2)
    job = await counters(store)
    assert (job["landed"], job["ok"], job["failed"], job["dead"], job["duplicates"]) == (10, 8, 1, 1, 0)
    assert await rows(store, "SELECT count(*) FROM outcomes") == [(12,)]
    # A late repeat of the first generation changes nothing.
    await store.write(insert_results, [result("j", 0, "failed")], 3)
    job = await counters(store)
    assert (job["ok"], job["failed"], job["duplicates"]) == (8, 1, 1)
    landed = await store.read(count_landed, "j")
    assert (landed.rows, landed.indices, landed.of("ok")) == (12, 10, 8)


async def test_every_field_comes_back_as_it_was(store: Store) -> None:
    task = Task(
        job="j", index=1, function="f", prompt=TextPrompt(text="näh 🙂"), params=Generation(temperature=0.5)
    )
    full = Result(
        job="j",
        index=1,
        function="f",
        status="failed",
        generation=3,
        tenant="t",
        custom_id="c-1",
        choices=[
            Choice(
                text='a "b"\n\u0000 🙂',
                finish_reason="tool_calls",
                token_ids=[1, 2],
                tool_calls=[{"id": "x"}],
            ),
            Choice(text="", logprobs={"content": [1.5, None]}, stop_reason=7),
        ],
        value=msgspec.Raw(b'{"a":[1,123456789012345678901234567890,null]}'),
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3),
        error=ItemError(type="too_long", message="m", field="prompt"),
        model="org/model",
        engine="echo",
        params_fingerprint="f" * 16,
        worker="w",
        attempt=4,
        chat=True,
        timings=Timings(submitted_us=1, received_us=1_790_000_000_123_456, started_us=3, finished_us=4),
        trace_id="0" * 31 + "1",
        task=task,
    )
    bare = Result(job="j", index=2, function="f", status="ok")
    await store.write(insert_results, [full, bare], 5)
    found = await rows(store, f'SELECT {_COLUMNS} FROM outcomes ORDER BY "index"')
    for stored, sent in zip(found, (full, bare), strict=True):
        assert plain(to_result(stored)) == plain(sent)
    assert await rows(store, 'SELECT text, finish_reason FROM outcomes ORDER BY "index"') == [
        ('a "b"\n\u0000 🙂', "tool_calls"),
        (None, None),
    ]


async def test_a_null_value_is_no_value(store: Store) -> None:
    await store.write(insert_results, [result("j", 0, value=msgspec.Raw(b"null"))], 1)
    assert await rows(store, "SELECT value IS NULL FROM outcomes") == [(True,)]


async def test_bytes_that_are_not_utf8_are_refused_whole(store: Store) -> None:
    bad = result("j", 1, value=msgspec.Raw(b'"\xff"'))
    with pytest.raises(InvalidInput):
        await store.write(insert_results, [result("j", 0), bad], 1)
    assert await rows(store, "SELECT count(*) FROM outcomes") == [(0,)]


def test_large_results_are_split_by_bytes() -> None:
    big = [result("j", i, choices=[Choice(text="x" * 900_000)]) for i in range(30)]
    chunks = list(encode_chunks(big))
    assert max(map(len, chunks)) <= CHUNK_BYTES
    assert sum(len(msgspec.json.decode(c)) for c in chunks) == 30


# --- states ---------------------------------------------------------------------------------------
def opened(job: str = "j") -> JobOpened:
    return JobOpened(job=job, function="f", input_fingerprint=INPUT, model="m", at_us=7, source="x.jsonl")


def sealed(count: int, job: str = "j") -> JobSealed:
    return JobSealed(job=job, count=count, input_fingerprint=INPUT, at_us=9)


async def test_the_states_of_a_job(store: Store) -> None:
    await store.write(apply, [opened()])
    assert (await counters(store))["state"] == "open"
    await store.write(land, [result("j", i) for i in range(2)])
    await store.write(apply, [sealed(3)])
    assert (await counters(store))["state"] == "sealed"
    ended = await store.write(land, [result("j", 2)])
    assert [(e.state, e.count, e.ok) for e in ended] == [("completed", 3, 3)]
    assert await store.write(land, [result("j", 2)]) == []
    assert (await counters(store))["duplicates"] == 1


async def test_failed_items_make_it_completed_with_errors(store: Store) -> None:
    await store.write(apply, [opened(), sealed(9)])
    (ended,) = await store.write(land, [result("j", i, "failed") for i in range(9)])
    assert (ended.state, ended.failed) == ("completed_with_errors", 9)


async def test_a_sealed_job_of_nothing_is_complete_at_once(store: Store) -> None:
    (ended,), _ = await store.write(apply, [opened(), sealed(0)])
    assert (ended.state, ended.count) == ("completed", 0)


async def test_results_before_opened_and_events_in_any_order(store: Store) -> None:
    await store.write(land, [result("j", i) for i in range(3)])
    (ended,), _ = await store.write(apply, [sealed(3), opened(), opened()])
    assert ended.state == "completed"
    job = await counters(store)
    assert (job["function"], job["model"], job["source"], job["state"]) == ("f", "m", "x.jsonl", "completed")


async def test_an_outcome_beyond_the_count_does_not_complete_a_job(store: Store) -> None:
    await store.write(apply, [opened(), sealed(3)])
    assert await store.write(land, [result("j", i) for i in (0, 1, 7)]) == []
    (ended,) = await store.write(land, [result("j", 2)])
    assert ended.count == 3


async def test_cancelling_keeps_outcomes_and_fills_the_rest(store: Store) -> None:
    await store.write(apply, [opened()])
    await store.write(land, [result("j", i, "failed" if i == 4 else "ok") for i in (0, 4, 9)])
    _, cancelling = await store.write(apply, [JobCancelled(job="j", count=25, reason="enough")])
    assert cancelling == [("j", "enough", "requested")]
    # Even if the rest lands now and the job is sealed, it is a cancelled job.
    assert await store.write(apply, [sealed(25)]) == ([], [])
    _, ended = await store.write(job_rows.fill_cancelled, "j", 0)
    assert ended == JobCompleted(
        job="j", state="cancelled", count=25, ok=2, failed=1, cancelled=22, at_us=ended.at_us,
        cause="requested", reason="enough",
    )  # fmt: skip
    assert await store.write(job_rows.fill_cancelled, "j", 0) == (-1, None)
    await store.write(land, [result("j", 5)])
    job = await counters(store)
    assert (job["ok"], job["failed"], job["cancelled"], job["duplicates"], job["state"]) == (
        2,
        1,
        22,
        1,
        "cancelled",
    )
    assert await rows(
        store, "SELECT DISTINCT error_type, error_message FROM outcomes WHERE status = 'cancelled'"
    ) == [("cancelled", "enough")]


async def test_an_ended_job_cannot_be_cancelled(store: Store) -> None:
    await store.write(apply, [opened(), sealed(1)])
    await store.write(land, [result("j", 0)])
    assert await store.write(job_rows.cancelling, "j", "late") == "completed"
    _, cancelling = await store.write(apply, [JobCancelled(job="j", count=1)])
    assert cancelling == []
    assert (await counters(store))["state"] == "completed"


async def test_unannounced_endings_are_found(store: Store) -> None:
    await store.write(apply, [opened(), sealed(1)])
    (ended,) = await store.write(land, [result("j", 0)])
    assert await store.read(job_rows.endings) == [ended]
    await store.write(apply, [ended])
    assert await store.read(job_rows.endings) == []


async def test_gaps_are_inclusive_ranges(store: Store) -> None:
    await store.write(insert_results, [result("j", i) for i in (2, 3, 5, 8, 11)], 1)
    assert await store.read(gaps, "j", 10, 100) == [(0, 1), (4, 4), (6, 7), (9, 9)]
    assert await store.read(gaps, "j", 10, 2) == [(0, 1), (4, 4)]
    assert await store.read(gaps, "j", 2, 10) == [(0, 1)]
    assert await store.read(gaps, "none", 3, 10) == [(0, 2)]
    assert await store.read(gaps, "none", 0, 10) == []


# --- the file -------------------------------------------------------------------------------------
async def test_what_is_committed_is_there_after_reopening(tmp_path: Path) -> None:
    for round_ in range(3):
        store = Store(tmp_path / "x" / "p.duckdb")
        await store.open()
        await store.write(insert_results, [result("j", round_)], 1)
        assert (await counters(store))["ok"] == round_ + 1
        assert await rows(store, "SELECT max(version), count(*) FROM schema_version") == [
            (STEPS[-1][0], len(STEPS))
        ]
        await store.close()
        await store.close()


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.duckdb"
    store = Store(path)
    await store.open()
    await store.write(
        lambda c: c.execute("INSERT INTO schema_version VALUES (999, 'later', now()::TIMESTAMP)")
    )
    await store.close()
    with pytest.raises(Conflict, match="999"):
        await Store(path).open()


async def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "p.duckdb").write_bytes(b"no database at all" * 1_000)
    with pytest.raises(Unavailable, match="cannot open the database"):
        await Store(tmp_path / "p.duckdb").open()


async def test_a_failed_write_leaves_nothing_behind(store: Store) -> None:
    def half(connection: duckdb.DuckDBPyConnection) -> None:
        insert_results(connection, [result("j", 0)], 1)
        connection.execute("SELECT no_such_function()")

    with pytest.raises(Unavailable):
        await store.write(half)
    assert await rows(store, "SELECT count(*) FROM outcomes") == [(0,)]
    await store.write(insert_results, [result("j", 0)], 1)
    assert await rows(store, "SELECT count(*) FROM outcomes") == [(1,)]
