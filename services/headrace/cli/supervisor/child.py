"""One process of the mesh: started in a session of its own, known to be ready, ended without leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.cli.supervisor.layout import child_environment


class ChildSpec(Struct, frozen=True, kw_only=True):
    """How to start one process: its name, command line, log, environment, and how long its stop may take."""

    name: str
    command: list[str]
    log: Path
    environment: Mapping[str, str] = {}
    pass_fds: tuple[int, ...] = ()
    grace_s: float = 10.0
    ready_file: Path | None = None
    probe: Callable[[], Awaitable[bool]] | None = None
    """Asked again and again until it says yes, for a program that writes no ready file."""


class Child:
    """A running process by its spec. `start` again after its end starts a new one."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.started_at = 0.0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        """The name in logs and messages."""
        return self.spec.name

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def start(self) -> None:
        """Start the process; its output goes to its log. In its own session, so that Ctrl-C does not reach it."""
        if self.spec.ready_file:
            self.spec.ready_file.unlink(missing_ok=True)
        self.started_at = time.monotonic()
        with self.spec.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(self.spec.environment),
                pass_fds=self.spec.pass_fds,
                start_new_session=True,
            )

    async def wait_ready(self) -> None:
        """Return once the process says that it has started. Never returns for one that ends before."""
        while not await self._is_ready():  # noqa: ASYNC110  (another process says it, in a file)
            await asyncio.sleep(0.02)

    async def wait(self) -> int:
        """The exit status; below zero, the signal that ended it. What it started and left behind is ended too."""
        if self._process is None:
            return 0
        pid = self._process.pid
        status = await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the process itself, if it runs."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process and its whole group at once."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> bool:
        """SIGTERM, then SIGKILL after the grace. True if it ended by itself."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True

    def last_words(self) -> str:
        """The line of the log that says best why the process ended."""
        try:
            with self.spec.log.open("rb") as f:
                f.seek(max(0, self.spec.log.stat().st_size - 8_192))
                lines = f.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        lines = [line.strip() for line in lines if line.strip()]
        said = [line for line in lines if line.startswith("error: ")]
        if said:
            return said[-1].removeprefix("error: ")
        failed = [line for line in map(_message_of_failure, lines) if line]
        return (failed or lines or [""])[-1][:500]

    async def _is_ready(self) -> bool:
        if self.spec.probe:
            return await self.spec.probe()
        if self.spec.ready_file is None:
            return True
        with contextlib.suppress(OSError, ValueError):
            return int(self.spec.ready_file.read_text("utf-8").strip() or 0) == self.pid
        return False


def how_it_ended(status: int) -> str:
    """An exit status for people."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _message_of_failure(line: str) -> str:
    """The message of a JSON log line of level error, else nothing."""
    with contextlib.suppress(msgspec.MsgspecError):
        entry = msgspec.json.decode(line, type=dict[str, object])
        if entry.get("level") in {"error", "critical"}:
            return str(entry.get("message", ""))
    return ""
