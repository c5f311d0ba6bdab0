"""What dead workers left in the mesh's folder: their flight recorders, each taken over by one worker that starts.

With a fault's trace beside it, the items in it are recorded as suspects, as if their engine had died. Without one the
process was killed, and its items are not suspects: their leases lapse, and that is all.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

from headrace.contracts.errors import HeadraceError
from headrace.contracts.suspects import Suspect
from headrace.inference_worker.flight import FAULT_SUFFIX, SUFFIX, Passenger, read_passengers
from headrace.inference_worker.incidents import after_crash
from headrace.mesh.crash import crash_point
from headrace.mesh.suspects import SuspectBook

log = logging.getLogger("headrace.worker")

TRACE_BYTES: Final = 64 << 10
SHOWN: Final = 4_096
"""Characters of a trace in the log."""
AT_ONCE: Final = 64
"""Records read at once."""


async def take_over(folder: Path, book: SuspectBook) -> int:
    """Record the suspects of every dead recorder in the mesh's folder; return how many there are.

    Nothing is raised, for a worker must start whatever lies there. What could not be recorded stays for the next one.
    """
    total = 0
    for path in sorted((folder / "run").glob(f"*{SUFFIX}")):
        try:
            with _owned(path) as data:
                if data is None:
                    continue
                total += await _record(path, data, book)
                crash_point("wreckage-recorded")
                path.with_suffix(FAULT_SUFFIX).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        except (OSError, HeadraceError) as e:
            log.warning("a dead worker's recorder stays", extra={"path": str(path), "reason": str(e)[:200]})
    return total


@contextlib.contextmanager
def _owned(path: Path) -> Generator[bytes | None]:
    """The bytes of a recorder whose owner is dead, held so that no other worker takes it; None if it is not ours."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        # Another worker may have been done with it between our opening and our lock.
        status = os.fstat(fd)
        yield os.pread(fd, status.st_size, 0) if status.st_nlink else None
    finally:
        os.close(fd)


async def _record(path: Path, data: bytes, book: SuspectBook) -> int:
    text = _read(path.with_suffix(FAULT_SUFFIX))
    trace = next((line.strip() for line in text.splitlines() if line.strip()), "")
    try:
        passengers = read_passengers(data)
    except ValueError as e:
        log.warning("a recorder cannot be read, and is removed", extra={"path": str(path), "reason": str(e)})
        return 0
    if not trace or not passengers:
        log.info("a worker was killed", extra={"recorder": path.stem, "items": len(passengers)})
        return 0
    error = f"the process died: {trace}"
    # The recorder's own name, so that taking it over twice (we die before it is removed) counts one crash.
    incident, alone = path.stem[-128:], len(passengers) == 1
    suspects: dict[int, Suspect] = {}
    for first in range(0, len(passengers), AT_ONCE):
        some = passengers[first : first + AT_ONCE]
        known = await asyncio.gather(*(_known(book, p) for p in some))
        for passenger, before in zip(some, known, strict=True):
            suspects[passenger.sequence] = after_crash(
                before,
                stored_us=passenger.stored_us,
                incident=incident,
                alone=alone,
                error=error,
                worker=path.stem.rpartition("-")[0],
                started_us=passenger.started_us,
            )
    await book.record(suspects)
    log.error(
        "a worker died of a fault",
        extra={"recorder": path.stem, "suspects": len(suspects), "reason": error, "trace": text[:SHOWN]},
    )
    return len(suspects)


async def _known(book: SuspectBook, passenger: Passenger) -> Suspect | None:
    return await book.look_up(passenger.sequence, passenger.stored_us)


def _read(path: Path) -> str:
    """A fault's trace, whose first line names the fault; empty if there was none."""
    try:
        with path.open("rb") as f:
            return f.read(TRACE_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
