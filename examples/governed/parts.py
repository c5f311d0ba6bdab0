"""Processes of the demonstration: started, killed with SIGKILL, started again, and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

READY_S = 60.0
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Plan:
    """What is to be done on each side; the kills come when so many calls are done as the seed says."""

    calls: int
    kills: int
    callers: int
    seed: int

    def marks(self, count: int) -> list[int]:
        """When to kill, `count` times: after so many calls."""
        rng = random.Random(self.seed)
        return sorted(int(self.calls * rng.uniform(0.02, 0.9)) for _ in range(count))


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


class Part:
    """One program, again and again. Its start waits until the file `ready` is there."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self.command = command
        self.log = folder / f"{name}.log"
        self.ready = folder / f"{name}.ready"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start it; raise `RuntimeError` with the end of its log if it does not come up."""
        self.ready.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        environment["HEADRACE_READY_FILE"] = str(self.ready)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Return when it is started."""
        deadline = time.monotonic() + READY_S
        while not self.ready.exists():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                msg = f"{self.name} did not start; its log ends with:\n{self.log.read_text()[-2_000:]}"
                raise RuntimeError(msg)
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL: no handler, no clean-up, as when the machine takes the memory back or goes away."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Callee(Part):
    """The callee, and the log in which it notes what it did."""

    def __init__(self, folder: Path) -> None:
        self.done = folder / "callee.jsonl"
        command = [sys.executable, str(HERE / "callee.py"), str(self.done), str(folder / "callee.ready")]
        super().__init__("callee", command, folder)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.ready.read_text()}"

    async def has_done(self, calls: int, over: asyncio.Event) -> bool:
        """Return when it has done so many, or when all is over: a call in doubt may never have been done."""
        while self.count() < calls and not over.is_set():  # noqa: ASYNC110  (another process does them)
            await asyncio.sleep(0.002)
        return not over.is_set()

    def count(self) -> int:
        """How many calls it has done."""
        return self.done.read_bytes().count(b"\n") if self.done.exists() else 0

    def entries(self) -> dict[str, list[float]]:
        """When it did each call, in seconds since the epoch."""
        found: dict[str, list[float]] = {}
        for line in self.done.read_text("utf-8").splitlines() if self.done.exists() else ():
            entry = json.loads(line)
            found.setdefault(entry["call"], []).append(entry["at"])
        return found

    def times(self) -> Counter[str]:
        """How often it did each call."""
        return Counter({name: len(at) for name, at in self.entries().items()})


def gateway(name: str, folder: Path) -> Part:
    """`headrace gateway` with a name that it keeps, so that it takes its own open calls up again."""
    headrace = str(Path(sys.executable).with_name("headrace"))
    return Part(name, [sys.executable, headrace, "gateway", "--dir", str(folder), "--name", name], folder)
