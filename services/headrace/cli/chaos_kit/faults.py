"""How each fault is done, and undone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from headrace.cli.chaos_kit import guard, quota
from headrace.cli.chaos_kit.local import LocalMesh
from headrace.cli.chaos_kit.plan import BROKER, COMPLETION, SUBMIT, Fault
from headrace.cli.chaos_kit.streams import Streams
from headrace.cli.chaos_kit.submitter import Submitter
from headrace.contracts.errors import HeadraceError

READY_S: Final = 60.0
"""How long a fault waits for its victim to be back from the last one."""


class Done(Struct, frozen=True, kw_only=True):
    """A fault as it happened: `at_s` seconds after the start, `pid` of the victim (0 for a stream)."""

    at_s: float
    fault: str
    victim: str
    pid: int = 0
    seconds: float = 0.0
    count: int = 0
    note: str = ""


class Faults:
    """Does faults, one at a time on each victim, and remembers what it did (`done`). `said` hears of each."""

    def __init__(
        self, local: LocalMesh, streams: Streams, submitter: Submitter, *, said: Callable[[Done], None]
    ) -> None:
        self.done: list[Done] = []
        self.left_out = 0
        self._local = local
        self._streams = streams
        self._submitter = submitter
        self._said = said
        self._was_done: set[int] = set()
        self._began = time.monotonic()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def inject(self, fault: Fault) -> None:
        """Do one fault, once its victim is back from the last one, and return when it is over.

        One that cannot be done now (its process does not come back, the broker is away, nothing is stored that could
        be delayed) is left out.
        """
        steps: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "kill": self._kill,
            "pause": self._pause,
            "disk-full": self._fill_disk,
            "queue-full": self._fill_queue,
            "delay": self._delay,
            "duplicate": self._duplicate,
        }
        async with self._locks[fault.victim]:
            self._was_done.discard(id(fault))
            with contextlib.suppress(HeadraceError):
                await steps[fault.kind](fault)
            self.left_out += id(fault) not in self._was_done

    def _note(
        self, fault: Fault, *, pid: int = 0, count: int = 0, seconds: float = 0.0, note: str = ""
    ) -> None:
        at_s = round(time.monotonic() - self._began, 2)
        done = Done(
            at_s=at_s, fault=fault.kind, victim=fault.victim, pid=pid, seconds=seconds, count=count, note=note
        )
        self.done.append(done)
        self._was_done.add(id(fault))
        self._said(done)

    # --- processes ---------------------------------------------------------------------------------
    async def _kill(self, fault: Fault) -> None:
        if fault.victim == SUBMIT:
            if pid := await self._submitter.kill():
                self._note(fault, pid=pid)
        elif await self._local.ready(fault.victim, timeout_s=READY_S) and (
            pid := self._local.signal(fault.victim, signal.SIGKILL)
        ):
            self._note(fault, pid=pid)

    async def _pause(self, fault: Fault) -> None:
        if not await self._local.ready(fault.victim, timeout_s=READY_S):
            return
        if pid := self._local.pid(fault.victim):
            lease_s = self._local.settings.ack_wait_s
            note = "longer than a lease" if fault.seconds > lease_s and fault.victim != BROKER else ""
            async with guard.stopped(pid, seconds=fault.seconds):
                self._note(fault, pid=pid, seconds=fault.seconds, note=note)
                await asyncio.sleep(fault.seconds)

    async def _fill_disk(self, fault: Fault) -> None:
        if not quota.SUPPORTED or not await self._local.ready(COMPLETION, timeout_s=READY_S):
            return
        database = self._local.layout.database
        if pid := self._local.pid(COMPLETION):
            with quota.full(pid, [database, database.with_name(f"{database.name}.wal")]) as size:
                self._note(
                    fault, pid=pid, seconds=fault.seconds, note=f"no file may grow over {size:,} bytes"
                )
                await asyncio.sleep(fault.seconds)

    # --- streams -----------------------------------------------------------------------------------
    async def _fill_queue(self, fault: Fault) -> None:
        async with self._streams.full(fault.victim) as bound:
            self._note(fault, seconds=fault.seconds, note=f"bound lowered to {bound:,} bytes")
            await asyncio.sleep(fault.seconds)

    async def _delay(self, fault: Fault) -> None:
        if taken := await self._streams.take(fault.victim, fault.count):
            self._note(fault, count=taken, note="taken by a thief and never acked")

    async def _duplicate(self, fault: Fault) -> None:
        if copies := await self._streams.duplicate(fault.count):
            self._note(fault, count=copies, note="stored results published again")
