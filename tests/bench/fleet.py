"""The processes of one run: broker and services as `headrace up` runs them, bare loops, and their memory.

`Plan` of the supervisor gives the command lines, so what is measured here is what users start. Nothing outlives
the run: each process is ended in reverse order, and dies with this one if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psutil

from headrace.cli.supervisor import tether
from headrace.cli.supervisor.child import Child, ChildSpec
from headrace.cli.supervisor.layout import Layout, MeshState
from headrace.cli.supervisor.plan import Plan, own_command
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision
from headrace.mesh.server import free_port
from headrace.mesh.settings import Settings

Durability = Literal["relaxed", "safe"]
READY_S: Final = 60.0
SAMPLE_S: Final = 0.2
ROOT: Final = Path(__file__).resolve().parents[2]


class Fleet:
    """One broker with its streams, and the services that are started on it. An async context manager."""

    def __init__(
        self, folder: Path, durability: Durability, *, worker_flags: Iterable[str] = (), gateways: int = 1
    ) -> None:
        self.layout = Layout(folder)
        port = free_port()
        self.settings = Settings(url=f"nats://127.0.0.1:{port}", dir=str(folder), durability=durability)
        self._ends = os.pipe()
        self.plan = Plan(
            layout=self.layout,
            settings=self.settings,
            port=port,
            lifeline=self._ends[0],
            gateways=gateways,
            worker_flags=tuple(worker_flags),
        )
        self.children: dict[str, Child] = {}
        self.mesh: Mesh

    async def __aenter__(self) -> Self:
        try:
            self.layout.create()
            await self._start(self.plan.server())
            self.layout.write_state(
                MeshState(url=self.settings.url, port=self.plan.port, durability=self.settings.durability)
            )
            self.mesh = await Mesh.connect(self.settings, name="bench")
            await provision(self.mesh)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        with contextlib.suppress(AttributeError):
            await self.mesh.close()
        for name in reversed(list(self.children)):
            await self.stop(name)
        for end in self._ends:
            os.close(end)

    # --- services ----------------------------------------------------------------------------------
    async def start(self, name: str) -> None:
        """Start `worker-1`, `completion` or `gateway`, and wait until it says that it is ready."""
        specs = {spec.name: spec for spec in [*self.plan.readers(), *self.plan.worker_specs()]}
        await self._start(specs[name])

    async def _start(self, spec: ChildSpec) -> None:
        child = self.children[spec.name] = Child(spec)
        await child.start()
        ready = asyncio.ensure_future(child.wait_ready())
        ended = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({ready, ended}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise RuntimeError(f"{spec.name} did not start: {child.last_words()} (see {spec.log})")
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def stop(self, name: str) -> None:
        """Drain it and wait for its end; it is killed if that takes too long."""
        child = self.children.pop(name, None)
        if child is not None and not await child.stop():
            print(f"{name} did not stop in good order", file=sys.stderr)

    def pid(self, name: str) -> int:
        """Process id of a running service."""
        return self.children[name].pid


def tied(*command: str) -> list[str]:
    """`command`, to be ended by the kernel if this process dies."""
    return [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]


class Loop:
    """One bare loop of `tests.bench.raw` in its own process. `go` starts it, `result` is what it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: str, **options: Any) -> Self:
        command = tied(sys.executable, "-m", "tests.bench.raw", name, json.dumps(options))
        pipe = asyncio.subprocess.PIPE
        loop = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT))
        try:
            await loop._line("ready")
        except BaseException:
            await loop.end()
            raise
        return loop

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def result(self) -> dict[str, float]:
        return json.loads(await self._line("a result"))

    async def end(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()

    async def _line(self, what: str) -> bytes:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a bare loop ended without {what}")
        return line


@contextlib.asynccontextmanager
async def loops(*wanted: tuple[str, dict[str, Any]]) -> AsyncIterator[list[Loop]]:
    """Bare loops that are ready, ended when the block is left."""
    running: list[Loop] = []
    try:
        for name, options in wanted:
            running.append(await Loop.start(name, **options))
        yield running
    finally:
        for loop in running:
            await loop.end()


class Command:
    """A `headrace` command in its own process, as a user types it; `output` is what it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, *arguments: str) -> Self:
        command = tied(*own_command(), *arguments)
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe)
        )

    async def output(self) -> bytes:
        try:
            output, _ = await self._process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            raise
        if self._process.returncode != 0:
            raise RuntimeError(
                f"a headrace command failed with {self._process.returncode}: {output[-2_000:]!r}"
            )
        return output


class Watch:
    """Memory and CPU time of some processes, looked at five times a second while the block runs.

    `peak` is resident memory in MB. Where the kernel keeps a high-water mark of its own (Linux: VmHWM), that is what is
    read, so a short peak between two looks still counts. `cpu` is seconds since `add`; what a process does after
    the last look at it is missing.
    """

    def __init__(self) -> None:
        self.peak: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._watched: dict[str, psutil.Process] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, pid: int, *, new: bool = False) -> None:
        """Watch a process; of a `new` one, what it has used already counts."""
        self._watched[name] = process = psutil.Process(pid)
        self._before[name] = 0.0 if new else _cpu_s(process)

    def __enter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._sample())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        self.look()

    def look(self) -> None:
        for name, process in self._watched.items():
            with contextlib.suppress(psutil.Error, OSError):
                self.peak[name] = max(self.peak.get(name, 0.0), _resident_mb(process))
                self.cpu[name] = _cpu_s(process) - self._before[name]

    async def _sample(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_S)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _resident_mb(process: psutil.Process) -> float:
    resident = process.memory_info().rss
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                resident = max(resident, int(line.split()[1]) << 10)
    return resident / 1e6
