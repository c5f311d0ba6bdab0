"""The buffer of what an agent did: noting costs its caller microseconds, whatever the broker does.

    recorded = captured + dropped + waiting      at every moment, exactly

What finds the buffer full is dropped, and counted; its number is missing then.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import deque
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

RECORD_BYTES: Final = 64 << 10
"""A record's data that is longer is left out; the record says how long it was."""
BUFFER_BYTES: Final = 32 << 20
"""Data that may wait in one process, whatever the number of records."""

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class Waiting(NamedTuple):
    """A record in the buffer."""

    seq: int
    at_us: int
    run: str
    kind: str
    name: str | None
    message: str | None
    peer: str | None
    hop: int
    data: bytes
    trace_id: str | None


class Counts(Struct, frozen=True):
    """The account of one life: recorded = captured + dropped + waiting."""

    recorded: int
    captured: int
    dropped: int
    waiting: int


class Recorder:
    """The buffer: `record` never waits and never raises. Safe to call from any thread."""

    def __init__(self, *, limit: int, max_bytes: int = BUFFER_BYTES) -> None:
        self.life = uuid.uuid4().hex
        self._limit = limit
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._buffer: deque[Waiting] = deque()
        self._bytes = 0
        self._recorded = self._captured = self._dropped = self._held = 0
        self._last_us = 0
        self._asleep = False
        self._wake: Any = None

    def record(
        self,
        run: str,
        kind: str,
        data: Any = None,
        *,
        name: str | None = None,
        message: str | None = None,
        peer: str | None = None,
        hop: int = 0,
        trace_id: str | None = None,
    ) -> None:
        """Note that `kind` was done in `run`. `data` is anything that JSON can say, taken as it is now."""
        try:
            encoded = b"" if data is None else bytes(data) if isinstance(data, Raw) else _encode(data)
        except Exception as e:  # noqa: BLE001  (whatever an object's own code raises is not the agent's trouble)
            encoded = _encode({"unreadable": type(e).__name__})
        if len(encoded) > RECORD_BYTES:
            encoded = b'{"left_out_bytes":%d}' % len(encoded)
        with self._lock:
            self._recorded += 1
            # Not before the one before it: so the order of time is the order of numbers.
            at_us = self._last_us = max(time.time_ns() // 1_000, self._last_us + 1)
            if len(self._buffer) + self._held >= self._limit or self._bytes + len(encoded) > self._max_bytes:
                self._dropped += 1
                return
            self._bytes += len(encoded)
            self._buffer.append(
                Waiting(self._recorded, at_us, run, kind, name, message, peer, hop, encoded, trace_id)
            )
            wake = self._wake if self._asleep else None
            self._asleep = False
        if wake is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # the loop is closed: nobody takes it, and the counts say so
                wake()

    @property
    def counts(self) -> Counts:
        """The account now."""
        with self._lock:
            return Counts(self._recorded, self._captured, self._dropped, len(self._buffer) + self._held)

    # --- for the publisher ---------------------------------------------------------------------------
    def on_waking(self, wake: Any) -> None:
        """Call `wake` (from any thread) when something is recorded after `take` found nothing."""
        self._wake = wake

    def take(self, most: int, *, then_sleep: bool = False) -> list[Waiting]:
        """Up to `most` records, oldest first; they count as waiting until `captured` or `lost` is told.

        With `then_sleep` the next record wakes whoever found nothing.
        """
        with self._lock:
            taken = [self._buffer.popleft() for _ in range(min(most, len(self._buffer)))]
            self._held += len(taken)
            self._asleep = then_sleep and not taken
            return taken

    def captured(self, records: list[Waiting]) -> None:
        """These are stored."""
        with self._lock:
            self._captured += len(records)
            self._given_back(records)

    def lost(self, records: list[Waiting]) -> None:
        """These never will be."""
        with self._lock:
            self._dropped += len(records)
            self._given_back(records)

    def give_up(self) -> None:
        """Whatever waits in the buffer never will be stored."""
        with self._lock:
            self._dropped += len(self._buffer)
            self._bytes -= sum(len(r.data) for r in self._buffer)
            self._buffer.clear()

    def _given_back(self, records: list[Waiting]) -> None:
        self._held -= len(records)
        self._bytes -= sum(len(r.data) for r in records)
