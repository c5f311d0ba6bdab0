"""A `headrace up` as a child of the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from headrace.cli.supervisor import tether
from headrace.cli.supervisor.layout import child_environment
from headrace.cli.supervisor.plan import own_command
from headrace.contracts.errors import Unavailable

STOP_WITHIN_S = 40.0


class DemoMesh:
    """Starts on entry and returns once it is ready (`url`); on exit it is drained, then killed if it must be.

    What it says goes to standard error as it says it. Should the demo be killed, the mesh ends by itself.
    """

    def __init__(self, folder: Path, *, engine: str, model: str | None) -> None:
        self.url = ""
        self._command = [*own_command(), "up", "--dir", str(folder), "--engine", engine, "--grace", "5"]
        self._command += ["--model", model] if model else []
        self._process: subprocess.Popen[str] | None = None
        self._writing_end = -1

    def __enter__(self) -> Self:
        reading_end, self._writing_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env=child_environment({tether.LIFELINE: str(reading_end)}),
                pass_fds=(reading_end,),
                start_new_session=True,
            )
        finally:
            os.close(reading_end)
        try:
            self.url = self._wait_ready(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_ready(self, process: subprocess.Popen[str]) -> str:
        output: IO[str] = process.stdout  # pyright: ignore[reportAssignmentType]  # stdout=PIPE
        for line in output:
            if line.startswith("ready "):
                threading.Thread(target=_drain, args=(output,), daemon=True).start()
                return line.removeprefix("ready ").strip()
        code = process.wait()
        raise Unavailable(
            f"the demo's mesh did not start (exit code {code}): the reason is above", code="start_failed"
        )

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_WITHIN_S)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            # The second signal ends everything at once.
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()
        finally:
            os.close(self._writing_end)
            self._process = None


def _drain(output: IO[str]) -> None:
    for _ in output:
        pass
