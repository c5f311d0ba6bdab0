"""A mesh whose parts are processes of their own: each can be told where to die, be killed, and be started again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.mesh.server import NatsServer
from tests.cli.harness import HEADRACE, clean_environment

READY_S = 40.0


class Part:
    """`headrace NAME --dir FOLDER`, again and again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [*HEADRACE, name, "--dir", str(folder)]
        self._ready = folder / f"{name}.ready"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, crash_at: str = "") -> None:
        """Start it and return at once; with `crash_at` it dies there."""
        self._ready.unlink(missing_ok=True)
        env = clean_environment(HEADRACE_READY_FILE=str(self._ready))
        if crash_at:
            env["HEADRACE_CRASH_AT"] = crash_at
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    async def ready(self) -> None:
        """Return when it is started, or dead."""
        deadline = time.monotonic() + READY_S
        while not self._ready.exists() and self.code is None:
            assert time.monotonic() < deadline, f"{self.name} does not start: {self.tail()}"
            await asyncio.sleep(0.01)

    async def died(self, timeout_s: float) -> int | None:
        """Its exit code, None if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.code is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return self.code

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text("utf-8", "replace")[-3_000:] if self.log.exists() else ""


class ProcessMesh:
    """A broker, a worker and completion in `folder`; `settings` are lines of its headrace.toml."""

    def __init__(self, server: NatsServer, folder: Path, settings: Mapping[str, Any], worker: str) -> None:
        self.server = server
        self.folder = folder
        self.parts = {name: Part(name, folder) for name in ("worker", "completion")}
        lines = [f'url = "{server.url}"', 'durability = "relaxed"']
        lines += [f"{key} = {_toml(value)}" for key, value in settings.items()]
        (folder / "headrace.toml").write_text("\n".join([*lines, worker]), "utf-8")

    async def start(self, *, crash: Mapping[str, str] | None = None) -> None:
        """Start both; `crash` names where a part dies."""
        for name, part in self.parts.items():
            part.start(crash_at=(crash or {}).get(name, ""))
        await asyncio.gather(*(part.ready() for part in self.parts.values()))

    async def mend(self) -> None:
        """Start again what is dead, as `headrace up` does; return when it is ready."""
        if not self.server.pid:
            await asyncio.to_thread(self.server.restart)
        for part in self.parts.values():
            if part.code is not None:
                part.start()
                await part.ready()

    def kill(self, name: str) -> None:
        """SIGKILL `worker`, `completion` or `broker`."""
        (self.server if name == "broker" else self.parts[name]).kill()

    def submit(self, path: Path, job: str, *, crash_at: str = "") -> subprocess.CompletedProcess[str]:
        """`headrace submit`, to its end."""
        env = clean_environment(**({"HEADRACE_CRASH_AT": crash_at} if crash_at else {}))
        return subprocess.run(
            [*HEADRACE, "submit", str(path), "--job", job, "--dir", str(self.folder), "--json"],
            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def stop(self) -> None:
        """Kill everything but the broker, which is the fixture's."""
        for part in self.parts.values():
            part.kill()

    def logs(self) -> str:
        """What the parts said last."""
        return "\n".join(f"--- {name}\n{part.tail()}" for name, part in self.parts.items())


@contextlib.contextmanager
def process_mesh(
    server: NatsServer, folder: Path, settings: Mapping[str, Any], worker: str
) -> Iterator[ProcessMesh]:
    """A mesh that leaves no process behind, and whose logs are printed if the block fails."""
    folder.mkdir(parents=True, exist_ok=True)
    mesh = ProcessMesh(server, folder, settings, worker)
    try:
        yield mesh
    except BaseException:
        print(mesh.logs())
        raise
    finally:
        mesh.stop()


@contextlib.asynccontextmanager
async def kept_alive(mesh: ProcessMesh) -> AsyncIterator[None]:
    """Whatever dies within the block is started again."""

    async def watch() -> None:
        while True:
            await mesh.mend()
            await asyncio.sleep(0.05)

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
