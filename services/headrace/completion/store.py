"""The one DuckDB file and the threads that may touch it: one that writes, some that read.

DuckDB lets many connections of one process work on a file at once; each reads a snapshot. So writing has
its own thread (every transaction in order, none waits for a reader), and reads, short ones and queries of
users apart, have theirs. The event loop never waits inside DuckDB.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import duckdb

from headrace.completion.database import (
    Connection,
    Memory,
    first_line,
    is_broken,
    is_datas_fault,
    lacks_memory,
    open_database,
)
from headrace.contracts.errors import Conflict, InvalidInput, Unavailable

log = logging.getLogger("headrace.completion")

P = ParamSpec("P")
R = TypeVar("R")
READ_THREADS = 4


class Store:
    """An open data plane. Open it with `await open()`; `close()` writes a checkpoint.

    `memory_limit` bounds DuckDB's own buffers. All calls may come from any task of one event loop.
    """

    def __init__(self, path: Path, *, memory_limit: str = "128MB") -> None:
        self.path = path
        self._memory = Memory(memory_limit)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="duckdb-writer")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="duckdb-reader")
        self._connection: Connection | None = None
        self._reads: set[Connection] = set()
        self._queries: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False

    # --- life --------------------------------------------------------------------------------------
    async def open(self) -> None:
        """Open or create the file and bring its schema up to date.

        Raise `Conflict` if another process has it open or a newer Headrace wrote it, `Unavailable` if it cannot be
        read.
        """
        await self._in(self._writer, self._open)

    def _open(self) -> None:
        self._connection = open_database(self.path, self._memory)

    async def close(self) -> None:
        """Interrupt queries, write a checkpoint, close. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.interrupt_queries()
        await asyncio.get_running_loop().run_in_executor(None, self._readers.shutdown)
        await self._in(self._writer, self._close)
        self._writer.shutdown(wait=False)

    def _close(self) -> None:
        if self._connection is None:
            return
        try:
            self._connection.execute("CHECKPOINT")
        except duckdb.Error as e:
            # The write-ahead log holds everything that is committed: the next start replays it.
            log.warning("no checkpoint at close", extra={"reason": first_line(e)})
        self._connection.close()
        self._connection = None

    def _reopen(self) -> None:
        """Open the file anew after an error that left the instance unusable (on the writer's thread)."""
        log.warning("reopening the database", extra={"path": str(self.path)})
        with self._lock:
            connection, self._connection = self._connection, None
            for cursor in (*self._reads, *self._queries):
                cursor.interrupt()
                cursor.close()
            self._reads.clear()
            self._queries.clear()
        if connection is not None:
            connection.close()
        self._open()

    # --- work --------------------------------------------------------------------------------------
    async def write(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `work(connection, ...)` as one transaction on the writer's thread; commit, or roll back and raise.

        Raise `Unavailable` for what DuckDB could not do now (disk full, out of memory), `InvalidInput` for data that
        it will never take: nothing of it is stored.
        """
        return await self._in(self._writer, functools.partial(self._transact, work, *args, **kwargs))

    def _transact(self, work: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        if self._connection is None:
            self._open()
        connection = self._connection
        if connection is None:
            msg = f"{self.path} is not open"
            raise Unavailable(msg)
        try:
            connection.execute("BEGIN TRANSACTION")
            result = work(connection, *args, **kwargs)
            connection.execute("COMMIT")
            return result
        except BaseException as e:
            self._roll_back(connection)
            self._recover(e)
            if is_datas_fault(e):
                msg = f"the data plane cannot take this: {first_line(e)}"
                raise InvalidInput(msg) from e
            if isinstance(e, duckdb.Error):
                msg = f"the data plane could not write: {first_line(e)}"
                raise Unavailable(msg, code="data_plane") from e
            raise

    @staticmethod
    def _roll_back(connection: Connection) -> None:
        # "No transaction is active" is what a failed COMMIT leaves behind, and a broken instance refuses this too.
        with contextlib.suppress(duckdb.Error):
            connection.execute("ROLLBACK")

    def _recover(self, error: BaseException) -> None:
        """Make the next try possible: give landing the memory that queries hold, or more; leave a broken instance."""
        reopen = is_broken(error)
        if lacks_memory(error):
            if self._queries:
                self.interrupt_queries()
            else:
                reopen = self._memory.double() or reopen
        if reopen:
            try:
                self._reopen()
            except (Conflict, Unavailable) as e:
                log.warning("the database stays closed until the next try", extra={"reason": str(e)[:300]})

    async def read(
        self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run `work(cursor, ...)` on a reader's thread, on a snapshot that no writer waits for.

        Raise `Unavailable` if DuckDB could not read (the file is being reopened, say).
        """
        try:
            return await self._in(self._readers, lambda: self._on_cursor(self._reads, work, *args, **kwargs))
        except duckdb.Error as e:
            if lacks_memory(e):
                await self._in(self._writer, functools.partial(self._recover, e))
            msg = f"the data plane could not be read, try again: {first_line(e)}"
            raise Unavailable(msg, code="data_plane") from e

    def query(self, work: Callable[Concatenate[Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work(cursor, ...)` in this thread, read-only; landing interrupts it when it needs the memory.

        Raise `Unavailable` if the file is closed; DuckDB's own errors pass through.
        """
        return self._on_cursor(self._queries, work, *args, **kwargs)

    def _on_cursor(self, cursors: set[Connection], work: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        with self._lock:
            if self._connection is None or self._closed:
                msg = "the data plane is closed at the moment: try again"
                raise Unavailable(msg, code="data_plane")
            cursor = self._connection.cursor()
            cursors.add(cursor)
        try:
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            return work(cursor, *args, **kwargs)
        finally:
            with self._lock:
                cursors.discard(cursor)
            cursor.close()

    def interrupt_queries(self) -> None:
        """Make every query that is under way end with `duckdb.InterruptException`."""
        with self._lock:
            for cursor in self._queries:
                cursor.interrupt()

    @staticmethod
    async def _in(executor: ThreadPoolExecutor, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
