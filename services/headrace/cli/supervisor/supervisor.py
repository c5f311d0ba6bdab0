"""Start in order, restart what dies, drain in the opposite order.

A stop is: (1) no more restarts; (2) the workers drain, all at once: they start nothing new, finish or give
back what runs, and their results are stored; (3) the gateways end the calls under way; (4) completion lands what is
stored; (5) the broker, last. Each has its grace and is killed after it. A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from headrace.cli.supervisor.backoff import Backoff
from headrace.cli.supervisor.child import Child, ChildSpec, how_it_ended
from headrace.contracts.errors import Unavailable

Say = Callable[[str], None]


class Supervisor:
    """Processes in stages: a stage is started when the one before is ready, and stopped in the order given.

    `changed` is called with the pids by name whenever they are different; `say` with one line for each event.
    """

    def __init__(
        self,
        *,
        say: Say,
        changed: Callable[[dict[str, int]], None],
        ready_timeout_s: float = 300.0,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self.children: list[Child] = []
        self.stopping = asyncio.Event()
        self._say = say
        self._changed = changed
        self._ready_timeout_s = ready_timeout_s
        self._backoff = backoff
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._killed = False

    async def start(self, specs: Sequence[ChildSpec]) -> None:
        """Start a stage, all at once, and wait until each is ready; then keep them running.

        Raise `Unavailable` with its own last words if one ends, or is not ready in time.
        """
        stage = [Child(spec) for spec in specs]
        self.children += stage
        for child in stage:
            await child.start()
        self._report_pids()
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(self._first_start(child)) for child in stage]
        problems = [problem for check in checks if (problem := check.result())]
        if problems:
            raise Unavailable(problems[0], code="start_failed")
        for child in stage:
            self._keepers[child.name] = asyncio.create_task(self._keep(child), name=f"keep {child.name}")

    async def stop(self, order: Sequence[Sequence[str]]) -> bool:
        """Drain the groups of processes in `order`, by name. True if all ended within their grace."""
        self.stopping.set()
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        clean = True
        for names in order:
            group = [child for child in self.children if child.name in names]
            ended = await asyncio.gather(*(child.stop() for child in group))
            for child, by_itself in zip(group, ended, strict=True):
                if not by_itself and not self._killed:
                    self._say(
                        f"{child.name} did not stop in {child.spec.grace_s:g} s: killed (its leases go back)"
                    )
            clean = clean and all(ended)
            self._report_pids()
        return clean and not self._killed

    def kill(self) -> None:
        """End every process now."""
        self._killed = True
        self.stopping.set()
        for child in self.children:
            child.kill()

    async def _first_start(self, child: Child) -> str:
        """What is wrong with the start of `child`, in one sentence; empty if it is ready."""
        ready = asyncio.create_task(child.wait_ready())
        ended = asyncio.create_task(child.wait())
        stop = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait(
                (ready, ended, stop), timeout=self._ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ready.done() or stop.done():
                return ""
            if ended.done():
                why = child.last_words() or how_it_ended(ended.result())
                return f"{child.name} did not start: {why} (log: {child.spec.log})"
            return f"{child.name} was not ready within {self._ready_timeout_s:g} s (log: {child.spec.log})"
        finally:
            for task in (ready, ended, stop):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _keep(self, child: Child) -> None:
        """Start `child` again whenever it ends, waiting longer each time that it does not live long."""
        backoff = self._backoff()
        while True:
            status = await child.wait()
            delay = backoff.after_death(time.monotonic() - child.started_at)
            self._report_pids()
            self._say(f"{child.name} ended ({how_it_ended(status)}): starting it again in {delay:.1f} s")
            await asyncio.sleep(delay)
            try:
                await child.start()
            except OSError as e:
                self._say(f"{child.name} cannot be started: {e}")
                continue
            self._report_pids()
            if await self._ready_or_ended(child):
                self._say(f"{child.name} is back (pid {child.pid})")

    async def _ready_or_ended(self, child: Child) -> bool:
        ready = asyncio.create_task(child.wait_ready())
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait(
                (ready, ended), timeout=self._ready_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            return ready.done() and not ended.done()
        finally:
            ready.cancel()
            ended.cancel()

    def _report_pids(self) -> None:
        self._changed({child.name: child.pid for child in self.children if child.pid})
