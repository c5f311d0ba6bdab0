"""A run in this process: rows in, batches through a runner, results out in the order of the rows.

Rows are read ahead while batches run, within bounds. A row has the result that it would have from a
worker, but for who made it and when: the same index, status, value and error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from msgspec import Raw, Struct

from headrace.client.items import Item
from headrace.contracts.messages import ItemError, Result, Row, Timings
from headrace.forge.ahead import ReadAhead
from headrace.forge.batching import Sized, pack
from headrace.forge.function import Function
from headrace.forge.invoke import RowOutcome
from headrace.forge.isolation import Isolation
from headrace.forge.plans import ENGINE, Plan
from headrace.forge.pool import Pool
from headrace.forge.sizes import size_of

MAX_HELD: Final = 65_536
"""Results that wait for an earlier row's, before no further batch is started."""
NO_ROW: Final = "invalid_prompt"


@dataclass(frozen=True, slots=True)
class Numbered:
    """An accepted line with its index."""

    index: int
    item: Item


class Runner(Protocol):
    """What runs batches of one function, or of an engine."""

    @property
    def width(self) -> int:
        """Batches at once."""
        ...

    async def start(self) -> None:
        """Load what is needed; raise a `HeadraceError` if it cannot be."""
        ...

    async def stop(self) -> None:
        """Free it; idempotent."""
        ...

    def size(self, item: Item) -> int:
        """What an item counts against a budget of tokens."""
        ...

    async def run(self, batch: Sequence[Numbered]) -> list[Result]:
        """One result for each item, in order."""
        ...


class Tally(Struct):
    """What came of a run."""

    rows: int = 0
    ok: int = 0
    failed: int = 0
    batches: int = 0
    seconds: float = 0.0


class FunctionRunner:
    """A function over rows on a pool of its own."""

    def __init__(
        self, function: Function[..., Any], plan: Plan, *, pool: Pool | None = None, job: str = "local"
    ) -> None:
        self._function = function
        self._plan = plan
        self._pool = pool or plan.pool(function)
        self._isolation = Isolation(function, self._pool)
        self._job = job

    @property
    def width(self) -> int:
        """Batches at once."""
        return self._pool.width

    @property
    def busy_s(self) -> float:
        """Seconds in batches so far."""
        return self._pool.busy_s

    async def start(self) -> None:
        """Start the processes."""
        await self._pool.start()

    async def stop(self) -> None:
        """End the processes."""
        await self._pool.stop()

    def size(self, item: Item) -> int:
        """As the plan measures rows."""
        raw = bytes(item.prompt.value) if isinstance(item.prompt, Row) else b""
        return size_of(self._plan.size, raw, self._function.codec.decode)

    async def run(self, batch: Sequence[Numbered]) -> list[Result]:
        """The batch's results."""
        started_us = time.time_ns() // 1_000
        raws = [bytes(n.item.prompt.value) for n in batch if isinstance(n.item.prompt, Row)]
        outcomes = iter(await self._isolation.run(raws))
        no_row = RowOutcome(
            error=ItemError(type=NO_ROW, message=f"function {self._function.name} takes rows")
        )
        timings = Timings(started_us=started_us, finished_us=time.time_ns() // 1_000)
        return [
            self._result(n, next(outcomes) if isinstance(n.item.prompt, Row) else no_row, timings)
            for n in batch
        ]

    def _result(self, numbered: Numbered, outcome: RowOutcome, timings: Timings) -> Result:
        common: dict[str, Any] = {
            "job": self._job,
            "index": numbered.index,
            "function": self._function.name,
            "custom_id": numbered.item.custom_id,
            "model": self._function.identity[:512],
            "engine": ENGINE,
            "worker": "local",
            "timings": timings,
        }
        if outcome.error is not None:
            return Result(status="failed", error=outcome.error, **common)
        return Result(status="ok", value=Raw(outcome.value or b"null"), **common)


async def run_local(
    items: Iterable[Numbered],
    runner: Runner,
    plan: Plan,
    write: Callable[[list[Result]], None],
    *,
    progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Run all `items` on a started `runner`, and `write` their results in the order of the items.

    `items` is read in a thread. Raise what reading, running (a `HeadraceError`) or writing raises, after what runs has
    been stopped.
    """
    run = _Run(runner, plan, write, progress or (lambda _: None))
    began = time.perf_counter()
    await run.all(iter(items))
    run.tally.seconds = time.perf_counter() - began
    return run.tally


class _Run:
    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        write: Callable[[list[Result]], None],
        progress: Callable[[Tally], None],
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._write = write
        self._progress = progress
        self._free = asyncio.Semaphore(runner.width)
        self._held: dict[int, Result] = {}
        self._next = 0
        self._running: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._changed = asyncio.Event()
        self.tally = Tally()

    async def all(self, items: Iterator[Numbered]) -> None:
        ahead = ReadAhead(self._sized(items), lambda row: row.nbytes)
        batches = pack(ahead, self._plan.batching, self._plan.order)
        try:
            while (
                self._failed is None and (batch := await asyncio.to_thread(next, batches, None)) is not None
            ):
                await self._room()
                await self._free.acquire()
                task = asyncio.get_running_loop().create_task(self._one([s.item for s in batch]))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            while self._running and self._failed is None:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ahead.stop()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
        if self._failed is not None:
            raise self._failed

    def _sized(self, items: Iterator[Numbered]) -> Iterator[Sized[Numbered]]:
        counts = self._plan.batching.mode == "tokens"
        for numbered in items:
            prompt = numbered.item.prompt
            nbytes = len(bytes(prompt.value)) if isinstance(prompt, Row) else numbered.item.prompt_tokens * 4
            yield Sized(numbered, self._runner.size(numbered.item) if counts else 1, nbytes)

    async def _room(self) -> None:
        """Wait while too many results wait for an earlier one that still runs."""
        while len(self._held) > MAX_HELD and self._running and self._failed is None:
            self._changed.clear()
            await self._changed.wait()

    async def _one(self, batch: list[Numbered]) -> None:
        try:
            results = await self._runner.run(batch)
            self.tally.batches += 1
            self._take(results)
        except asyncio.CancelledError:
            raise
        except BaseException as e:  # noqa: BLE001  (it ends the run, which raises it)
            self._failed = self._failed or e
        finally:
            self._free.release()
            self._changed.set()

    def _take(self, results: list[Result]) -> None:
        for result in results:
            self._held[result.index] = result
        ready: list[Result] = []
        while (result := self._held.pop(self._next, None)) is not None:
            ready.append(result)
            self._next += 1
        tally = self.tally
        tally.rows += len(results)
        ok = sum(result.status == "ok" for result in results)
        tally.ok += ok
        tally.failed += len(results) - ok
        if ready:
            self._write(ready)
        self._progress(tally)
