"""The account of the job, read again and again while things break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from headrace.client import status
from headrace.contracts.api import JobAudit
from headrace.contracts.errors import HeadraceError, NotFound
from headrace.mesh.connection import Mesh

EVERY_S: Final = 0.5
ANSWER_S: Final = 15.0
"""An audit reads again while its sources differ, and a busy machine is slow; one without an answer is no sample."""
AT_ONCE: Final = 3


class Sampler:
    """Counts balanced and unbalanced audits until it is cancelled; `ended` is set when one says that the job has."""

    def __init__(
        self, mesh: Mesh, job: str, *, show: Callable[[JobAudit], None], every_s: float = EVERY_S
    ) -> None:
        self.balanced = 0
        self.unbalanced: list[JobAudit] = []
        self.unanswered = 0
        self.last: JobAudit | None = None
        self.ended = asyncio.Event()
        self._mesh = mesh
        self._job = job
        self._show = show
        self._every_s = every_s
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def landed(self) -> int:
        """Items that have their outcome, as last heard."""
        a = self.last
        return 0 if a is None else a.ok + a.failed + a.dead + a.cancelled

    async def run(self) -> None:
        """Sample for ever."""
        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                task = group.create_task(self._sample())
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
                task.add_done_callback(lambda _: slots.release())
                await asyncio.sleep(self._every_s)

    def abandon(self) -> None:
        """Whoever would have answered is gone: what is being asked gets no answer any more."""
        self.unanswered += len(self._asking)
        for task in self._asking:
            task.cancel()

    async def _sample(self) -> None:
        try:
            found = await status.audit(self._mesh, self._job, timeout_s=ANSWER_S)
        except NotFound:
            return  # not opened yet
        except HeadraceError:
            self.unanswered += 1
            return
        self.take(found)

    def take(self, found: JobAudit) -> None:
        """Count one audit."""
        if found.balanced:
            self.balanced += 1
        else:
            self.unbalanced.append(found)
        if self.last is None or found.ok + found.failed + found.dead + found.cancelled >= self.landed:
            self.last = found
        self._show(found)
        if found.state in status.ENDED:
            self.ended.set()

    async def final(self, *, timeout_s: float) -> JobAudit | None:
        """The audit of the mesh at rest: asked until it is answered, and balanced if it ever is; None without one."""
        found: JobAudit | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while found is None or not found.balanced:
                    with contextlib.suppress(HeadraceError):
                        found = await status.audit(self._mesh, self._job, timeout_s=ANSWER_S)
                    await asyncio.sleep(0.1 if found is None or found.balanced else EVERY_S)
        return found
