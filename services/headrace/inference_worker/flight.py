"""The flight recorder: which items are in the engine, in a file that outlives this process.

An engine that lives in the worker's process takes it along when it dies of a fault. The recorder is a small file under
the mesh's folder, mapped into memory: taking an item in or out is a few stores, no system call, and the pages are the
kernel's, so they survive whatever ends the process. Beside it lies a file into which `faulthandler` writes when the
kernel sends one of its fatal signals: that tells a fault from a kill. Both are removed by an orderly stop, and read by
`wreckage` after any other end.

Format, little-endian: 16 bytes of head (magic, version, number of seats), then for each seat the item's sequence in
its stream (0: free), when the stream stored it, and when it went into the engine, in microseconds; 8 bytes each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import mmap
import os
import secrets
import struct
import sys
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self

log = logging.getLogger("headrace.worker")

SUFFIX: Final = ".flight"
FAULT_SUFFIX: Final = ".fault"
_MAGIC: Final = b"HRFLIGHT"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sII")
_SEAT: Final = struct.Struct("<QQQ")
_SEQUENCE: Final = struct.Struct("<Q")
_TIMES: Final = struct.Struct("<QQ")
MOST_SEATS: Final = 1 << 16


class Passenger(NamedTuple):
    """An item that was in an engine: its sequence in the stream, and two times in microseconds."""

    sequence: int
    stored_us: int
    started_us: int


class FlightRecorder:
    """The recorder of this process. The lock on its file is held for as long as the process lives."""

    def __init__(self, path: Path, seats: int) -> None:
        """Make the file; raise `OSError` if that cannot be."""
        seats = max(1, min(seats, MOST_SEATS))
        size = _HEAD.size + seats * _SEAT.size
        self.path = path
        # Under its own name only once it is locked: whoever finds it unlocked takes it for a dead one's.
        unlocked = path.with_suffix(".new")
        self._fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
            _HEAD.pack_into(self._map, 0, _MAGIC, _VERSION, seats)
            self._fault: IO[Any] | None = path.with_suffix(FAULT_SUFFIX).open("xb", buffering=0)
            unlocked.rename(path)
        except BaseException:
            os.close(self._fd)
            unlocked.unlink(missing_ok=True)
            raise
        self._free = [_HEAD.size + i * _SEAT.size for i in reversed(range(seats))]
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.enable(self._fault)

    @classmethod
    def create(cls, folder: Path, worker: str, *, seats: int) -> Self | None:
        """The recorder of `worker` under the mesh's folder; None where there is no folder, or it cannot be used."""
        if not folder.is_dir():
            return None
        run = folder / "run"
        try:
            run.mkdir(exist_ok=True)
            return cls(run / f"{worker}-{secrets.token_hex(4)}{SUFFIX}", seats)
        except (OSError, ValueError) as e:
            log.warning("no flight recorder: a crash will not name its items", extra={"reason": str(e)[:200]})
            return None

    def enter(self, sequence: int, stored_us: int, started_us: int) -> int:
        """Record that an item goes into the engine; return its seat, -1 if all are taken."""
        if not self._free:
            return -1
        seat = self._free.pop()
        # The sequence last: with it the seat is taken, whatever ends the process between the two.
        _TIMES.pack_into(self._map, seat + _SEQUENCE.size, stored_us, started_us)
        _SEQUENCE.pack_into(self._map, seat, sequence)
        return seat

    def leave(self, seat: int) -> None:
        """Record that the item of `seat` is out of the engine."""
        if seat >= 0:
            _SEQUENCE.pack_into(self._map, seat, 0)
            self._free.append(seat)

    def close(self) -> None:
        """Remove the files: an orderly end leaves nothing to read; idempotent."""
        if self._fault is None:
            return
        fault, self._fault = self._fault, None
        faulthandler.disable()
        if self._was_enabled:
            with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no standard error
                faulthandler.enable(sys.__stderr__ or sys.stderr)
        fault.close()
        self._map.close()
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(FAULT_SUFFIX).unlink(missing_ok=True)
        os.close(self._fd)


def read_passengers(data: bytes) -> list[Passenger]:
    """Who was in the engine, newest last; raise `ValueError` for bytes that are no recorder's."""
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are no flight recorder")
    magic, version, seats = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or len(data) < _HEAD.size + seats * _SEAT.size:
        raise ValueError("not a flight recorder of this version")
    end = _HEAD.size + seats * _SEAT.size
    found = (Passenger(*fields) for fields in _SEAT.iter_unpack(data[_HEAD.size : end]))
    return sorted((p for p in found if p.sequence), key=lambda p: (p.started_us, p.sequence))
