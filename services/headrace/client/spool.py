"""Temporary files for what can be read only once: standard input, pipes, iterables."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.contracts.errors import InvalidInput

Rows = Iterable[Mapping[str, Any] | str]
"""Lines from Python: a dict is a line as it would stand in a file, a string is a prompt."""

_COPY: Final = 1 << 20


class Spool:
    """A temporary file that `remove` removes."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="headrace-", suffix=".spool")
        os.close(handle)
        self.path = Path(name)

    def remove(self) -> None:
        """Remove the file; safe to call twice."""
        self.path.unlink(missing_ok=True)


def spool_stream(read: Callable[[int], bytes]) -> Spool:
    """Copy all that `read(n)` gives to a spool; `InvalidInput` if the disk does not take it."""
    spool = Spool()
    try:
        with spool.path.open("wb") as out:
            while data := read(_COPY):
                out.write(data)
    except OSError as e:
        spool.remove()
        msg = f"cannot keep the input in {spool.path.parent}: {e.strerror}"
        raise InvalidInput(msg, code="no_spool") from None
    except BaseException:
        spool.remove()
        raise
    return spool


def spool_rows(rows: Iterable[Any], *, whole: bool = False) -> Spool:
    """Write `rows` as JSON lines to a spool; `InvalidInput` with the position of one that is no JSON.

    `whole`: they are rows for a function, so that a string is a row and no prompt.
    """
    spool = Spool()
    encode = msgspec.json.encode
    try:
        with spool.path.open("wb") as out:
            for number, row in enumerate(rows, 1):
                try:
                    line = encode({"prompt": row} if isinstance(row, str) and not whole else row)
                except (TypeError, ValueError, RecursionError) as e:
                    msg = f"row {number} cannot be written as JSON: {str(e)[:200]}"
                    raise InvalidInput(msg, line=number) from None
                out.write(line)
                out.write(b"\n")
    except OSError as e:
        spool.remove()
        msg = f"cannot keep the rows in {spool.path.parent}: {e.strerror}"
        raise InvalidInput(msg, code="no_spool") from None
    except BaseException:
        spool.remove()
        raise
    return spool
