"""The processes of one function: batches go to a free one, a dead one is replaced.

`run` puts a batch beside others (an async function has several in a process), `run_apart` gives it a process to
itself: when one dies, that alone tells which batch it died of.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from headrace.contracts.errors import Unavailable
from headrace.forge.children import Child, Died
from headrace.forge.function import Function
from headrace.forge.invoke import RowOutcome, invoke, invoke_async

log = logging.getLogger("headrace.forge")

START_TRIES: Final = 3
START_PAUSE_S: Final = 0.5


class Pool(Protocol):
    """Where batches run."""

    @property
    def width(self) -> int:
        """Batches at once."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds in batches so far."""
        ...

    async def start(self) -> None:
        """Be ready for batches."""
        ...

    async def stop(self) -> None:
        """End what runs; idempotent."""
        ...

    async def run(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        """The outcomes of a batch; raise `BatchFailed` or `Died`."""
        ...

    async def run_apart(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        """As `run`, with nothing beside it."""
        ...


class _Seat:
    """The place of one process, which is replaced when it died. `busy`: batches that are in it or wait for it."""

    def __init__(self, make: Callable[[], Child]) -> None:
        self._make = make
        self._turn = asyncio.Lock()
        self.child = make()
        self.busy = 0
        self.retiring = False
        self.spent_s = 0.0

    async def living(self) -> Child:
        """The process, a new one if it died, once for all batches that ask; raise what its start raises."""
        async with self._turn:
            for attempt in range(START_TRIES):
                if self.child.alive:
                    break
                if self.child.pid:
                    await self.replace()
                try:
                    await self.child.start()
                except Unavailable:
                    if attempt == START_TRIES - 1:
                        raise
                    await asyncio.sleep(START_PAUSE_S * 2**attempt)
            return self.child

    async def replace(self) -> None:
        """End the process and put a new one, unstarted, in its place."""
        await self.child.stop()
        self.spent_s += self.child.busy_s
        self.child = self._make()
        self.retiring = False


class ProcessPool:
    """`processes` children (0: one for each core), each with up to `concurrency` batches."""

    def __init__(
        self,
        function: Function[..., Any],
        *,
        processes: int = 1,
        concurrency: int = 1,
        options: Mapping[str, str] | None = None,
    ) -> None:
        cores = _cores()
        count = processes or cores
        threads = max(1, cores // count) if count > 1 else 0
        given = dict(options or {})
        self._function = function
        self._each = concurrency if function.is_async else 1
        self._seats = [_Seat(lambda: Child(function, given, threads=threads)) for _ in range(count)]
        self._changed = asyncio.Condition()
        self._apart_waiting = 0
        self._stopped = False
        self._width = count * self._each

    @property
    def width(self) -> int:
        """Batches at once."""
        return self._width

    @property
    def busy_s(self) -> float:
        """Seconds in batches, of all processes together."""
        return sum(seat.spent_s + seat.child.busy_s for seat in self._seats)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [seat.child.pid for seat in self._seats if seat.child.alive]

    async def start(self) -> None:
        """Start all; raise what one says if the function cannot be imported there."""
        try:
            await asyncio.gather(*(seat.living() for seat in self._seats))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all processes, what runs in them too; idempotent."""
        self._stopped = True
        await asyncio.gather(*(seat.child.stop() for seat in self._seats), return_exceptions=True)

    async def run(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        """Run a batch in the least busy process; raise `BatchFailed`, `Died`, or what a new process's start raises."""
        return await self._run(rows, places=1)

    async def run_apart(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        """Run a batch with nothing beside it in its process; raise as `run`."""
        return await self._run(rows, places=self._each)

    async def _run(self, rows: Sequence[bytes], *, places: int) -> list[RowOutcome]:
        seat = await self._take(places)
        try:
            if self._stopped:
                raise Died("was stopped", stopped=True)
            child = await seat.living()
            outcomes = await child.ask(rows, self._function.limits.timeout_s)
            limit = self._function.limits.memory_mb
            seat.retiring = seat.retiring or bool(limit and child.memory_mb > limit)
            return outcomes
        finally:
            seat.busy -= places
            if seat.retiring and not seat.busy:
                log.info(
                    "a process has grown beyond its limit, and is replaced", extra={"pid": seat.child.pid}
                )
                await seat.replace()
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, places: int) -> _Seat:
        apart = places == self._each > 1
        async with self._changed:
            self._apart_waiting += apart
            try:
                while (seat := self._pick(places, apart=apart)) is None:
                    await self._changed.wait()
            finally:
                self._apart_waiting -= apart
            seat.busy += places
            return seat

    def _pick(self, places: int, *, apart: bool) -> _Seat | None:
        """Who waits for an empty process goes first, or it would wait for ever beside a stream of others."""
        if not apart and self._apart_waiting:
            return None
        fit = [seat for seat in self._seats if seat.busy + places <= self._each and not seat.retiring]
        return min(fit, key=lambda seat: seat.busy, default=None)


class InlinePool:
    """No other process: a plain function runs in a thread, an async one in the loop. For tests and small scripts, and
    for functions that no other process could import; nothing bounds their time, and a crash is ours.
    """

    def __init__(self, function: Function[..., Any], *, concurrency: int = 1) -> None:
        self._function = function
        self._width = concurrency if function.is_async else 1
        self._turn = asyncio.Semaphore(self._width)
        self._busy_s = 0.0

    @property
    def width(self) -> int:
        """Batches at once."""
        return self._width

    @property
    def busy_s(self) -> float:
        """Seconds in batches so far."""
        return self._busy_s

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def run(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        """Run a batch; raise `BatchFailed`."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            began = clock()
            try:
                if self._function.is_async:
                    return await invoke_async(self._function, rows)
                return await asyncio.to_thread(invoke, self._function, rows)
            finally:
                self._busy_s += clock() - began

    async def run_apart(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        """As `run`."""
        return await self.run(rows)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
