"""Other people's SQL: what runs, what is refused, and what it may cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from headrace.completion.outcomes import insert_results
from headrace.completion.query import Queries
from headrace.completion.store import Store
from headrace.contracts.api import QueryReply, QueryRequest
from headrace.contracts.errors import InvalidInput, Refused, Unavailable
from tests.completion.world import error_of, result

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    """One loop is enough here: everything of interest happens in DuckDB's threads."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def queries(store: Store) -> AsyncIterator[Queries]:
    await store.write(
        insert_results, [result("j", i, "failed" if i % 10 == 0 else "ok") for i in range(1_000)], 1
    )
    serving = Queries(store, timeout_s=3.0, max_rows=500, max_bytes=100_000)
    yield serving
    await asyncio.to_thread(serving.close)


async def ask(queries: Queries, sql: str, max_rows: int = 1_000) -> QueryReply:
    return await queries.ask(QueryRequest(sql=sql, max_rows=max_rows), {"Headrace-User": "tester"})


READS = {
    "SELECT status, count(*) AS n FROM outcomes GROUP BY status ORDER BY n": [["failed", 100], ["ok", 900]],
    'FROM outcomes SELECT max("index")': [[999]],
    "WITH a AS (SELECT 1 AS x), b AS (SELECT x + 1 AS y FROM a) SELECT * FROM a, b;": [[1, 2]],
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT sum(n) FROM r": [
        [15]
    ],
    "VALUES (1, 'a')": [[1, "a"]],
    "SELECT j.state FROM outcomes AS o JOIN main.jobs AS j USING (job) LIMIT 1": [["open"]],
    "SELECT * FROM (PIVOT outcomes ON status IN ('ok', 'failed') USING count(*) GROUP BY job)": [
        ["j", 900, 100]
    ],
    "SELECT sum(i) FROM range(10) AS t(i)": [[45]],
    "SELECT unnest([1, 2])": [[1], [2]],
    "SELECT choices->>'$[0].text' FROM outcomes WHERE \"index\" = 1": [["answer 1"]],
    "SELECT count(*) > 5 FROM information_schema.columns WHERE table_name = 'outcomes'": [[True]],
    "SELECT lpad('7', 3, '0'), printf('%.2f', 1.5)": [["007", "1.50"]],
    "SELECT 'DROP TABLE jobs; COPY x TO y' AS text -- a comment; with a semicolon": [
        ["DROP TABLE jobs; COPY x TO y"]
    ],
}


@pytest.mark.parametrize("sql", READS)
async def test_reads(queries: Queries, sql: str) -> None:
    assert (await ask(queries, sql)).rows == READS[sql]


@pytest.mark.parametrize(
    "sql", ["DESCRIBE outcomes", "SHOW TABLES", "SUMMARIZE jobs", "EXPLAIN SELECT * FROM jobs"]
)
async def test_describing_is_reading(queries: Queries, sql: str) -> None:
    assert (await ask(queries, sql)).rows


HOSTILE = [
    # writing
    "INSERT INTO jobs (job) VALUES ('x')",
    "UPDATE jobs SET ok = 0",
    "DELETE FROM outcomes",
    "DROP TABLE outcomes",
    "TRUNCATE outcomes",
    "CREATE TABLE t AS SELECT 1",
    "CREATE TEMP TABLE t AS SELECT 1",
    "CREATE MACRO f(x) AS x",
    "ALTER TABLE jobs ADD COLUMN x INTEGER",
    "MERGE INTO jobs USING jobs AS j ON true WHEN MATCHED THEN DELETE",
    "WITH x AS (INSERT INTO jobs (job) VALUES ('x') RETURNING job) SELECT * FROM x",
    "WITH x AS (DELETE FROM jobs RETURNING job) SELECT * FROM x",
    "SELECT * FROM (WITH x AS (UPDATE jobs SET ok = 0 RETURNING job) SELECT * FROM x)",
    "EXPLAIN ANALYZE INSERT INTO jobs (job) VALUES ('x')",
    "EXPLAIN ANALYZE DELETE FROM outcomes",
    # leaving the transaction or the instance
    "COMMIT",
    "BEGIN TRANSACTION",
    "SELECT 1; DELETE FROM jobs",
    "ATTACH '/tmp/evil.db' AS evil",
    "DETACH plane",
    "USE memory",
    "CHECKPOINT",
    "VACUUM",
    "EXPORT DATABASE '/tmp/evil'",
    "IMPORT DATABASE '/tmp/evil'",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "CALL pragma_version()",
    "PRAGMA database_list",
    "SET threads = 8",
    "SET GLOBAL enable_external_access = true",
    "RESET memory_limit",
    "SET VARIABLE x = 1",
    "INSTALL httpfs",
    "LOAD httpfs",
    # files and the network
    "COPY jobs TO '/tmp/evil.csv'",
    "COPY (SELECT 1) TO '/tmp/evil.csv'",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM 'evil.parquet'",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_csv_auto('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM read_json('/etc/passwd')",
    "SELECT * FROM read_parquet('https://example.org/x.parquet')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM sniff_csv('/etc/passwd')",
    "SELECT * FROM parquet_metadata('/tmp/x')",
    "SELECT (SELECT content FROM read_text('/etc/passwd'))",
    "WITH a AS (SELECT * FROM read_text('/etc/passwd')) SELECT * FROM a",
    "DESCRIBE SELECT * FROM read_csv('/etc/passwd')",
    "DESCRIBE '/etc/passwd'",
    "SUMMARIZE '/etc/passwd'",
    "SELECT * FROM jobs WHERE job IN (SELECT content FROM read_text('/etc/passwd'))",
    # what the instance knows
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM duckdb_databases",
    "SELECT * FROM duckdb_databases()",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM pg_catalog.pg_settings",
    "SELECT * FROM sqlite_master",
    "WITH duckdb_databases AS (SELECT * FROM duckdb_databases) SELECT * FROM duckdb_databases",
    "SELECT * FROM jobs, (WITH pg_settings AS (SELECT 1) SELECT 1), pg_settings",
    "SHOW DATABASES",
    "SHOW ALL TABLES",
    "SHOW threads",
    "SELECT getenv('HOME')",
    "SELECT current_setting('memory_limit')",
    "SELECT getvariable('x')",
    # by another name
    "SELECT * FROM query('DELETE FROM jobs')",
    "SELECT * FROM query_table('duckdb_databases')",
    "SELECT * FROM json_execute_serialized_sql('{}')",
    "SELECT * FROM some_python_variable",
    "SELECT * FROM temp.main.t",
    "SELECT write_log('x')",
    "SELECT nextval('s')",
    "SELECT pg_sleep(60)",
    # one step that makes gigabytes
    "SELECT length(repeat('x', 4000000000))",
    "SELECT length(lpad('x', 4000000000, 'y'))",
    "SELECT length(repeat('x', CAST('4000000000' AS BIGINT)))",
    "SELECT len(range(1000000000))",
    "SELECT length(printf('%2000000000d', 1))",
    "SELECT length(format('{:{}}', 1, 2000000000))",
    "SELECT len(list_resize([1], 2000000000))",
]  # fmt: skip


@pytest.mark.parametrize("sql", HOSTILE)
async def test_hostile_statements_are_refused(queries: Queries, store: Store, sql: str) -> None:
    some_python_variable = [{"a": 1}]  # noqa: F841  (DuckDB can read variables of the caller by name)
    began = time.monotonic()
    error = await error_of(ask(queries, sql))
    assert isinstance(error, Refused | InvalidInput), error
    assert time.monotonic() - began < 1.0
    count = await store.read(lambda c: c.execute("SELECT count(*) FROM outcomes").fetchone())
    assert count == (1_000,)
    # A refusal says why in words, and has nothing of a file in it.
    assert "root:" not in str(error)


@pytest.mark.parametrize(
    "sql",
    ["SELECT", "", ";", "-- nothing", "SELEC 1", "SELECT nope FROM jobs", "SELECT 1/", "(" * 3_000 + "1" + ")" * 3_000,
     "SELECT " + "+".join(["1"] * 20_000), "SELECT 'abc'::INTEGER", "SELECT error('boom')"],
)  # fmt: skip
async def test_what_is_no_query_says_so(queries: Queries, sql: str) -> None:
    error = await error_of(ask(queries, sql or " "))
    assert isinstance(error, InvalidInput | Refused)
    assert (await ask(queries, "SELECT 1")).rows == [[1]]


async def test_rows_and_bytes_are_bounded(queries: Queries) -> None:
    reply = await ask(queries, "SELECT i FROM range(100000000) AS t(i)")
    assert (len(reply.rows), reply.truncated) == (500, True)
    reply = await ask(queries, "SELECT i FROM range(7) AS t(i)", max_rows=7)
    assert (len(reply.rows), reply.truncated) == (7, False)
    reply = await ask(queries, "SELECT repeat('x', 10000) FROM range(300)")
    assert (len(reply.rows), reply.truncated) == (9, True)
    reply = await ask(
        queries, "SELECT repeat('x', 9999) || repeat('x', 9999) || i FROM range(300) AS t(i)", max_rows=2
    )
    assert (len(reply.rows), reply.truncated) == (2, True)


async def test_values_are_safe_in_json(queries: Queries) -> None:
    reply = await ask(
        queries,
        """SELECT 1.10::DECIMAL(9, 2), 'nan'::DOUBLE, 'inf'::DOUBLE, '\\xAA\\x01'::BLOB,
        TIMESTAMP '2026-01-02 03:04:05.678', DATE '2026-01-02', TIME '03:04:05', INTERVAL 90 SECOND,
        170141183460469231731687303715884105727::HUGEINT, {'a': [1, NULL]}, MAP {'k': 1},
        '00000000-0000-0000-0000-000000000001'::UUID, true, NULL, '{"j": 1}'::JSON""",
    )
    assert reply.rows == [
        [
            "1.10", None, None, "qgE=", "2026-01-02T03:04:05.678000", "2026-01-02", "03:04:05", 90.0,
            "170141183460469231731687303715884105727", {"a": [1, None]}, {"k": 1},
            "00000000-0000-0000-0000-000000000001", True, None, '{"j": 1}',
        ]
    ]  # fmt: skip


async def test_time_is_bounded(store: Store) -> None:
    queries = Queries(store, timeout_s=0.3, max_rows=10, max_bytes=100_000)
    began = time.monotonic()
    error = await error_of(ask(queries, "SELECT count(*) FROM range(1000000) AS a, range(1000000) AS b"))
    assert error.code == "query_timeout"
    assert time.monotonic() - began < 2.0
    assert (await ask(queries, "SELECT 1")).rows == [[1]]
    queries.close()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(DISTINCT a.i * 100000 + b.i) FROM range(100000) AS a(i), range(100000) AS b(i)",
        "SELECT length(string_agg('0123456789' || i, '')) FROM range(100000000) AS t(i)",
        """WITH RECURSIVE r AS (SELECT 1 AS n, 'x' AS s UNION ALL SELECT n + 1, s || s FROM r WHERE n < 40)
        SELECT max(length(s)) FROM r""",
    ],
)
async def test_memory_is_bounded(queries: Queries, sql: str) -> None:
    error = await error_of(ask(queries, sql))
    assert error.code in ("query_memory", "query_timeout"), error
    assert (await ask(queries, "SELECT 1")).rows == [[1]]


async def test_a_long_query_does_not_stop_landing(queries: Queries, store: Store) -> None:
    long = asyncio.ensure_future(
        error_of(
            ask(
                queries,
                "SELECT count(*) FROM outcomes AS a, outcomes AS b, range(100000) WHERE a.text > b.text",
            )
        )
    )
    await asyncio.sleep(0.2)
    slowest = 0.0
    for batch in range(10):
        began = time.monotonic()
        await store.write(insert_results, [result("k", batch * 100 + i) for i in range(100)], 1)
        slowest = max(slowest, time.monotonic() - began)
    assert not long.done()
    assert slowest < 1.0
    assert (await ask(queries, "SELECT ok FROM jobs WHERE job = 'k'")).rows == [[1_000]]
    assert (await long).code == "query_timeout"


async def test_landing_has_the_memory_that_a_query_holds(queries: Queries, store: Store) -> None:
    sql = "SELECT length(string_agg('0123456789' || (i % 7), '')) FROM range(100000000) AS t(i)"
    greedy = [asyncio.ensure_future(error_of(ask(queries, sql))) for _ in range(2)]
    deadline = time.monotonic() + 5.0
    for batch in range(20):
        while True:
            try:
                await store.write(insert_results, [result("k", batch * 2_000 + i) for i in range(2_000)], 1)
                break
            except Unavailable:  # and landing tries again
                assert time.monotonic() < deadline
    assert all(
        e.code in ("query_memory", "query_timeout", "interrupted") for e in await asyncio.gather(*greedy)
    )
    assert (await ask(queries, "SELECT ok FROM jobs WHERE job = 'k'")).rows == [[40_000]]


async def test_who_asked_what_is_kept(queries: Queries) -> None:
    await ask(queries, "SELECT 42")
    await error_of(ask(queries, "DELETE FROM jobs"))
    reply = await ask(
        queries, "SELECT asked_by, sql, split_part(outcome, ':', 1), rows FROM queries ORDER BY id"
    )
    assert reply.rows[:2] == [
        ["tester", "SELECT 42", "ok", 1],
        ["tester", "DELETE FROM jobs", "not_read_only", 0],
    ]
    assert reply.rows[2][2] == "running"


async def test_the_log_of_queries_is_bounded(queries: Queries, monkeypatch: Any) -> None:
    monkeypatch.setattr("headrace.completion.query.LOGGED", 50)
    for _ in range(101):
        await ask(queries, "SELECT 1")
    (row,) = (await ask(queries, "SELECT count(*), max(id) FROM queries")).rows
    assert row == [52, 102]
