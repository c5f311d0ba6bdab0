"""Opening the DuckDB file, and what its errors mean: whose fault, whether it can go on, whether it lacks memory."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final

import duckdb

from headrace.completion.schema import migrate
from headrace.contracts.errors import Conflict, Unavailable

log = logging.getLogger("headrace.completion")

Connection = duckdb.DuckDBPyConnection

# After these the instance refuses all further work until it is opened anew (a full disk in the middle of a commit).
_BROKEN: Final = ("invalidated", "fatal", "must be restarted")
_NO_MEMORY: Final = re.compile(r"out of memory|(allocate|pin) (data|block)", re.IGNORECASE)
_UNITS: Final = {"KB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}
MAX_DOUBLINGS: Final = 5


class Memory:
    """DuckDB's memory limit: the setting, doubled where the data does not fit.

    DuckDB scans and checkpoints 2,048 values of a column at a time, and has to hold them: with results of 100 kB that
    is 200 MB, whatever the setting. Without more, such a table could never be written again, so the limit rises, up to
    32 times and half of the machine's memory, and says so.
    """

    def __init__(self, limit: str) -> None:
        self.bytes = int(limit[:-2]) * _UNITS[limit[-2:]]
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._most = max(self.bytes, min(self.bytes << MAX_DOUBLINGS, physical // 2))

    def double(self) -> bool:
        """Raise the limit; False if it is as high as it may be."""
        if self.bytes >= self._most:
            return False
        self.bytes = min(self._most, self.bytes * 2)
        log.warning(
            "results are too wide for the memory limit of the database: raised",
            extra={"memory_limit_mb": self.bytes // 1_000_000},
        )
        return True


def open_database(path: Path, memory: Memory) -> Connection:
    """Open or create the file and bring its schema up to date; the instance cannot be reconfigured afterwards.

    Raise `Conflict` if another process has it open or a newer Headrace wrote it, `Unavailable` if it cannot be read.
    """
    while True:
        connection: Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = duckdb.connect(str(path), config=_config(memory))
            migrate(connection)
        except (duckdb.Error, OSError) as e:
            if connection is not None:
                connection.close()
            if lacks_memory(e) and memory.double():
                continue  # replaying the log of what was committed takes as much as writing it
            raise _cannot_open(path, e) from None
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        return connection


def _config(memory: Memory) -> dict[str, str | bool | int | float | list[str]]:
    return {
        "memory_limit": f"{memory.bytes // 1_000}KB",
        # One thread a connection: a user's query must not take the cores that landing needs.
        "threads": 1,
        # Neither landing nor reading needs a file or an address outside of the database, so no query gets one;
        # locked, since a setting could be changed by whoever may run a statement.
        "enable_external_access": False,
        "python_enable_replacements": False,
        "autoload_known_extensions": False,
        "autoinstall_known_extensions": False,
        "allow_community_extensions": False,
        "lock_configuration": True,
    }


def is_datas_fault(error: BaseException) -> bool:
    """Whether the statement's data, and not the disk or the memory, is to blame."""
    return isinstance(error, duckdb.DataError | duckdb.InvalidInputException)


def is_broken(error: BaseException) -> bool:
    """Whether the instance refuses all further work."""
    return isinstance(error, duckdb.FatalException | duckdb.InternalException) or (
        isinstance(error, duckdb.Error) and any(word in str(error).lower() for word in _BROKEN)
    )


def lacks_memory(error: BaseException) -> bool:
    """Whether DuckDB's memory limit is to blame."""
    return isinstance(error, duckdb.OutOfMemoryException) or (
        isinstance(error, duckdb.Error) and _NO_MEMORY.search(str(error)) is not None
    )


def first_line(error: BaseException) -> str:
    """What an error says first, without the advice that DuckDB adds."""
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


def _cannot_open(path: Path, error: BaseException) -> Conflict | Unavailable:
    text = str(error)
    if "lock" in text.lower() and not lacks_memory(error):
        found = re.search(r"PID (\d+)", text)
        holder = f"process {found[1]}" if found else "another process"
        msg = f"{path} is already open in {holder}: one completion service owns a data plane; stop the other one first"
        return Conflict(msg, code="already_running")
    return Unavailable(f"cannot open the database {path}: {first_line(error)}", code="data_plane")
