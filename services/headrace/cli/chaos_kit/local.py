"""The mesh that is broken: a folder, a port and a supervisor of its own.

What starts the killed processes again is the supervisor of `headrace up`, with a shorter back-off: here deaths are the
rule, and a run should not spend itself waiting.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from msgspec import Struct

from headrace.cli.chaos_kit.plan import BROKER
from headrace.cli.supervisor.backoff import Backoff
from headrace.cli.supervisor.child import Child
from headrace.cli.supervisor.layout import Layout, MeshState, choose_port
from headrace.cli.supervisor.lock import DirLock
from headrace.cli.supervisor.plan import SERVER, Plan
from headrace.cli.supervisor.supervisor import Supervisor
from headrace.contracts.errors import InvalidInput, Unavailable
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision
from headrace.mesh.settings import CONFIG_FILE, load_settings

MAX_TRIES: Final = 25
"""Deliveries before an item is given up. An innocent item loses one each time that what holds it is killed, paused or
robbed; five, the default of a mesh that is left alone, would give some of them up.
"""
GRACE_S: Final = 3.0
_SETTINGS_KEPT: Final = ("HEADRACE_CACHE",)


class LocalOptions(Struct, frozen=True, kw_only=True):
    """What the mesh is made of."""

    engine: str
    model: str | None = None
    workers: int = 2
    function: str = "generate"
    slots: int | None = None
    engine_options: list[str] = []
    durability: Literal["safe", "relaxed"] | None = None
    ack_wait_s: float = 3.0
    max_bytes: int = -1


def forget_environment() -> None:
    """Drop settings of other meshes from the environment: nothing of them may reach this one, or be reached by it."""
    for name in [n for n in os.environ if n.startswith("HEADRACE_") and n not in _SETTINGS_KEPT]:
        del os.environ[name]


def check_folder(folder: Path) -> None:
    """Raise `InvalidInput` unless `folder` is empty or does not exist: no mesh with data is ever broken."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        msg = f"{folder} is not empty: chaos runs in a folder of its own, give --dir a new one"
        raise InvalidInput(msg, field="dir")


class LocalMesh:
    """An async context manager: everything runs on entry, nothing does after it.

    `pids` is called with the processes by name whenever they change. What the supervisor says goes to
    `logs/supervisor.log`.
    """

    def __init__(
        self, folder: Path, options: LocalOptions, *, pids: Callable[[dict[str, int]], None] | None = None
    ) -> None:
        self.layout = Layout(folder)
        self.layout.create()
        port = choose_port(self.layout, None)
        self._write_settings(options)
        given = {"url": f"nats://127.0.0.1:{port}", "worker.function": options.function}
        self.settings = load_settings(folder, given)
        flags = ["--engine", options.engine, "--function", options.function]
        flags += ["--model", options.model] if options.model else []
        flags += ["--slots", str(options.slots)] if options.slots else []
        flags += [text for option in options.engine_options for text in ("--engine-option", option)]
        self._ends = os.pipe()
        self._plan = Plan(
            layout=self.layout,
            settings=self.settings,
            port=port,
            workers=options.workers,
            lifeline=self._ends[0],
            worker_flags=tuple(flags),
        )
        self._state = MeshState(
            url=self.settings.url,
            port=port,
            durability=self.settings.durability,
            engine=options.engine,
            function=options.function,
            worker_flags=flags,
            pid=os.getpid(),
        )
        self._observe = pids
        self._lock = DirLock(self.layout.folder)
        self._supervisor = Supervisor(
            say=self._log,
            changed=self._changed,
            backoff=lambda: Backoff(first_s=0.05, longest_s=1.0, stable_s=5.0),
        )

    async def __aenter__(self) -> Self:
        self._lock.acquire()
        try:
            await self._supervisor.start([self._plan.server()])
            async with await Mesh.connect(self.settings, name="chaos-init") as mesh:
                await provision(mesh)
            await self._supervisor.start(self._plan.readers())
            await self._supervisor.start(self._plan.worker_specs())
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        self.resume(self._children())
        try:
            await asyncio.shield(self._supervisor.stop(self._plan.stop_order()))
        finally:
            self._supervisor.kill()
            self._state.pid, self._state.pids = 0, {}
            self.layout.write_state(self._state)
            for end in self._ends:
                os.close(end)
            self._lock.release()

    # --- processes ---------------------------------------------------------------------------------
    def pid(self, victim: str) -> int:
        """Process id; 0 while it does not run."""
        return self._child(victim).pid

    def signal(self, victim: str, number: int) -> int:
        """Send a signal and return the pid that got it; 0 if there was none."""
        pid = self.pid(victim)
        self._child(victim).signal(number)
        return pid

    def resume(self, victims: Iterable[str]) -> None:
        """SIGCONT to all of them, paused or not."""
        for victim in victims:
            self.signal(victim, signal.SIGCONT)

    async def ready(self, victim: str, *, timeout_s: float) -> bool:
        """Wait until the process has started and says so."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.pid(victim):  # noqa: ASYNC110  (the supervisor starts it again when it thinks fit)
                    await asyncio.sleep(0.02)
                await self._child(victim).wait_ready()
        except TimeoutError:
            return False
        return True

    async def all_ready(self, *, timeout_s: float) -> list[str]:
        """Wait for every process; return those that are not back in time."""
        names = self._children()
        found = await asyncio.gather(*(self.ready(name, timeout_s=timeout_s) for name in names))
        return [name for name, is_ready in zip(names, found, strict=True) if not is_ready]

    def _children(self) -> list[str]:
        return [child.name for child in self._supervisor.children]

    def _child(self, victim: str) -> Child:
        name = SERVER if victim == BROKER else victim
        for child in self._supervisor.children:
            if child.name == name:
                return child
        msg = f"{victim} is no process of this mesh"
        raise Unavailable(msg)

    # --- its folder --------------------------------------------------------------------------------
    def _write_settings(self, options: LocalOptions) -> None:
        lines = ["# Written by headrace chaos.", f"ack_wait_s = {options.ack_wait_s}"]
        lines += [f"max_tries = {MAX_TRIES}", f"max_bytes = {options.max_bytes}", f"grace_s = {GRACE_S}"]
        lines += [f'durability = "{options.durability}"'] if options.durability else []
        (self.layout.folder / CONFIG_FILE).write_text("\n".join(lines) + "\n", "utf-8")

    def _log(self, line: str) -> None:
        with (self.layout.logs / "supervisor.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n")

    def _changed(self, pids: dict[str, int]) -> None:
        self._state.pids = pids
        self.layout.write_state(self._state)
        if self._observe is not None:
            self._observe(pids)
