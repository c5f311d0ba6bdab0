"""Processes of the demonstration: started, killed with SIGKILL, started again, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

READY_S = 30.0


class Process:
    """One program, again and again. With `ready` its start waits until that file is there."""

    def __init__(self, name: str, command: list[str], log: Path, *, ready: Path | None = None) -> None:
        self.name = name
        self.command = command
        self.log = log
        self.ready = ready
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; raise `RuntimeError` with the end of its log if it does not come up."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        if self.ready is not None:
            self.ready.unlink(missing_ok=True)
            environment["HEADRACE_READY_FILE"] = str(self.ready)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + READY_S
        while self.ready is not None and not self.ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
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


def headrace(service: str, flags: Mapping[str, object], folder: Path) -> Process:
    """`headrace worker` or `headrace completion`, with these flags."""
    command = [sys.executable, str(Path(sys.executable).with_name("headrace")), service]
    for flag, value in flags.items():
        command += [f"--{flag}", str(value)]
    return Process(service, command, folder / f"{service}.log", ready=folder / f"{service}.ready")
