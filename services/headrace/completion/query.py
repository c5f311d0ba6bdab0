"""`hr.api.query`: somebody else's statement, read-only, bounded in rows, bytes, time and memory, and logged.

It runs on its own connection and threads and sees a snapshot, so landing goes on beside it. What it holds in memory
comes out of the one limit of the database; if landing needs that, queries are interrupted, not landing.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import logging
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import duckdb
import msgspec

from headrace.completion.sqlguard import check
from headrace.completion.store import Connection, Store
from headrace.contracts.api import QueryReply, QueryRequest
from headrace.contracts.errors import HeadraceError, InvalidInput, Refused, Unavailable

log = logging.getLogger("headrace.completion")

R = TypeVar("R")

AT_ONCE: Final = 2
"""Queries that run at once; others wait for a thread within their time."""
GROWTH_BYTES: Final = 192 << 20
"""The process may grow by this much while a query runs: text is not in DuckDB's own account of its memory."""
LOGGED: Final = 10_000
"""Newest entries of the log of queries that are kept."""
WATCH_S: Final = 0.02
_FETCH = 200
_PAGE = os.sysconf("SC_PAGE_SIZE")

_ASK = """
INSERT INTO queries
SELECT coalesce(max(id), 0) + 1, make_timestamp($1::BIGINT), $2, $3, 'running', NULL, NULL FROM queries
RETURNING id"""


class Queries:
    """Runs queries. `max_rows` and `timeout_s` bound each; a reply stays under `max_bytes`."""

    def __init__(self, store: Store, *, timeout_s: float, max_rows: int, max_bytes: int) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="duckdb-query")

    def close(self) -> None:
        """Take no more queries and end those that run."""
        self._store.interrupt_queries()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def ask(self, request: QueryRequest, headers: Mapping[str, str]) -> QueryReply:
        """Run one statement and return its rows.

        Raise `InvalidInput` for what is no valid SQL, `Refused` for what is not allowed or takes too much,
        `Unavailable` if it was interrupted for the sake of landing. Whatever comes of it stands in the table `queries`.
        """
        asked_by = headers.get("Headrace-User", "")[:256]
        began = time.monotonic()
        number = await self._store.write(_note, time.time_ns() // 1_000, asked_by, request.sql[:10_000])
        outcome, rows = "ok", 0
        try:
            reply = await self._run(request)
            rows = len(reply.rows)
            return reply
        except HeadraceError as e:
            outcome = f"{e.code}: {e}"[:500]
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            took_us = int((time.monotonic() - began) * 1e6)
            await asyncio.shield(self._store.write(_note_end, number, outcome, rows, took_us))

    async def _run(self, request: QueryRequest) -> QueryReply:
        return await self.watched(
            _Running(request.sql, min(request.max_rows, self._max_rows), self._max_bytes)
        )

    async def watched(self, running: Interruptible[R]) -> R:
        """What `running` reads, on a query's thread and within the bounds of time and memory.

        Raise as `ask` does.
        """
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, lambda: self._store.query(running.run))
        deadline, memory = loop.time() + self._timeout_s, _rss_bytes() + GROWTH_BYTES
        why: Refused | None = None
        try:
            while not future.done():
                await asyncio.wait((future,), timeout=WATCH_S)
                if loop.time() > deadline:
                    why = Refused(f"the query took longer than {self._timeout_s:g} s", code="query_timeout")
                elif _rss_bytes() > memory:
                    why = Refused("the query needs too much memory: select less of it", code="query_memory")
                if why is not None:
                    running.interrupt()
            return future.result()
        except duckdb.InterruptException:
            raise why or Unavailable("the query was interrupted: try again", code="interrupted") from None
        except duckdb.OutOfMemoryException:
            msg = "the query needs too much memory: select less of it"
            raise Refused(msg, code="query_memory") from None
        except (duckdb.Error, UnicodeDecodeError) as e:
            raise InvalidInput(" ".join(str(e).split())[:1_000], field="sql") from None
        finally:
            running.interrupt()


class Interruptible(Generic[R]):
    """One reading in its thread: `check` says whether it may run, `work` runs it."""

    def __init__(self) -> None:
        self._cursor: Connection | None = None
        self._ended = False

    def interrupt(self) -> None:
        """End it; one that has not begun does not begin."""
        self._ended = True
        if self._cursor is not None:
            self._cursor.interrupt()

    def run(self, cursor: Connection) -> R:
        """Check it, then run it."""
        if self._ended:
            msg = "ended before it began"
            raise duckdb.InterruptException(msg)
        self.check(cursor)
        self._cursor = cursor
        try:
            return self.work(cursor)
        finally:
            self._cursor = None

    def check(self, cursor: Connection) -> None:
        """Raise unless it may run."""
        raise NotImplementedError

    def work(self, cursor: Connection) -> R:
        """Read."""
        raise NotImplementedError


class _Running(Interruptible[QueryReply]):
    """One statement."""

    def __init__(self, sql: str, max_rows: int, max_bytes: int) -> None:
        super().__init__()
        self._sql = sql
        self._max_rows = max_rows
        self._max_bytes = max_bytes

    def check(self, cursor: Connection) -> None:
        check(cursor, self._sql)

    def work(self, cursor: Connection) -> QueryReply:
        """Execute the statement; fetch until a bound is reached."""
        cursor.execute(self._sql)
        columns = [str(d[0]) for d in cursor.description or ()]
        rows: list[list[Any]] = []
        size = sum(map(len, columns)) + 1_024
        while page := cursor.fetchmany(min(_FETCH, self._max_rows + 1 - len(rows))):
            for values in page:
                row = [json_safe(v) for v in values]
                size += len(msgspec.json.encode(row)) + 1
                if len(rows) == self._max_rows or size > self._max_bytes:
                    return QueryReply(columns=columns, rows=rows, truncated=True)
                rows.append(row)
        return QueryReply(columns=columns, rows=rows)


def json_safe(value: Any) -> Any:
    """`value` as JSON carries it: ISO 8601 times, base64 blobs, exact decimals and large integers as text, NaN null."""
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        return {str(k): json_safe(v) for k, v in pairs.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in cast("list[Any]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, dt.date | dt.time) else str(value)


def _note(connection: Connection, at_us: int, asked_by: str, sql: str) -> int:
    """Write that a query is about to run, before it runs; forget the oldest entries."""
    row = connection.execute(_ASK, [at_us, asked_by, sql]).fetchone()
    number = int(row[0]) if row else 0
    if number % 100 == 0:
        connection.execute("DELETE FROM queries WHERE id <= ?", [number - LOGGED])
    return number


def _note_end(connection: Connection, number: int, outcome: str, rows: int, took_us: int) -> None:
    connection.execute(
        "UPDATE queries SET outcome = ?, rows = ?, took_us = ? WHERE id = ?", [outcome, rows, took_us, number]
    )


def _rss_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell (the time limit still holds)."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0
