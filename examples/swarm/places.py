"""The swarm's mesh: a broker, a gateway, a model's worker, and each agent in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.mesh.server import NatsServer

HERE = Path(__file__).parent
AGENTS = ("planner", "worker-1", "worker-2", "reviewer", "reporter")
OTHERS = ("gateway", "model")
BROKER = "broker"
READY_S = 120.0
SETTINGS = """url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0                 # what a killed process held comes again after a second
grace_s = 5.0
[agent]
message_tries = 1000             # a message whose agents are killed again and again is no poison
[gateway]
name = "gateway"
[worker]
engine = "{engine}"
{model}{options}"""
OPTIONS = {"sim": '[worker.engine_options]\noutput_median = "24"\n'}


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


class Part:
    """One process, again and again. It is started when it says so by the file `ready`."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = command
        self._ready = folder / f"{name}.ready"
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, crash_at: str = "") -> None:
        """Start it and return at once; with `crash_at` it dies at that point."""
        self._ready.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        environment |= {"HEADRACE_READY_FILE": str(self._ready)}
        environment |= {"HEADRACE_CRASH_AT": crash_at} if crash_at else {}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=HERE
            )

    def wait_ready(self) -> None:
        """Return when it is started; raise `RuntimeError` with the end of its log if that takes too long."""
        deadline = time.monotonic() + READY_S
        while not self._ready.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start; its log ends with:\n{self.tail()}")
            self.revive()
            time.sleep(0.01)

    def revive(self) -> int | None:
        """Start it again if it is dead, whatever it died of: its exit code then."""
        with self._lock:
            code = None if self.process is None else self.process.poll()
            if code is not None:
                self.start()
            return code

    def kill(self, *, again: bool = False) -> None:
        """SIGKILL: no handler, no clean-up; with `again` it is started again at once."""
        with self._lock:
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            if again:
                self.start()

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text("utf-8", "replace")[-2_000:] if self.log.exists() else ""


class Places:
    """All of them; `parts` are the ones that can be killed, the broker apart."""

    def __init__(self, folder: Path, engine: str, model: str | None) -> None:
        self.folder = folder
        self.server = NatsServer(folder / "nats", durability="relaxed")
        path = f'model = "{model}"\n' if model else ""
        settings = SETTINGS.format(
            url=self.server.url, engine=engine, model=path, options=OPTIONS.get(engine, "")
        )
        (folder / "headrace.toml").write_text(settings, "utf-8")
        headrace = [sys.executable, str(Path(sys.executable).with_name("headrace"))]
        own = ["--dir", str(folder)]
        self.parts = {
            "gateway": Part("gateway", [*headrace, "gateway", *own], folder),
            "model": Part("model", [*headrace, "worker", *own, "--name", "model"], folder),
        }
        for name in AGENTS:
            where = f"swarm:{name.replace('-', '_')}"
            self.parts[name] = Part(name, [*headrace, "agent", "run", where, *own], folder)

    def start(self, crash_at: dict[str, str]) -> None:
        """Start all that is to run on the broker, and return when it does; `crash_at` says who dies where."""
        for name, part in self.parts.items():
            part.start(crash_at=crash_at.get(name, ""))
        for part in self.parts.values():
            part.wait_ready()

    def kill(self, name: str) -> None:
        """SIGKILL, and start again; of an agent or another part that is just starting, when it is there."""
        if name == BROKER:
            self.server.kill()
            self.server.restart()
        else:
            self.parts[name].wait_ready()
            self.parts[name].kill(again=True)


@contextlib.contextmanager
def places(folder: Path, engine: str, model: str | None) -> Iterator[Places]:
    """A broker that runs, and parts that do not yet; none is left behind."""
    made = Places(folder, engine, model)
    made.server.start()
    try:
        yield made
    finally:
        for part in made.parts.values():
            part.kill()
        made.server.stop()
