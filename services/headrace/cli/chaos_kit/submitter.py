"""`headrace submit` as a process that may be killed, and is started again with the same command until it exits 0."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from headrace.cli.chaos_kit.load import Load
from headrace.cli.chaos_kit.local import LocalMesh
from headrace.cli.exit_codes import Exit
from headrace.cli.supervisor import tether
from headrace.cli.supervisor.layout import child_environment
from headrace.cli.supervisor.plan import own_command
from headrace.contracts.errors import InvalidInput

AGAIN_S: Final = 0.2


class Submitter:
    """Submits `load` as `job`; `finished` is set once a run has exited 0.

    `pids` is called with its process id whenever it starts, 0 when it has ended.
    """

    def __init__(
        self,
        local: LocalMesh,
        load: Load,
        job: str,
        *,
        patience_s: float,
        pids: Callable[[int], None],
    ) -> None:
        self.finished = asyncio.Event()
        self.runs = 0
        self._log = local.layout.log("submit")
        self._observe = pids
        self._process: asyncio.subprocess.Process | None = None
        command = [*own_command(), "submit", str(load.path), "--job", job]
        command += ["--function", local.settings.worker.function, "--dir", str(local.layout.folder)]
        command += ["--patience", f"{patience_s:g}", "--no-progress"]
        command += ["--rows"] if load.rows else []
        self._command = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]

    async def run(self) -> None:
        """Submit until it is done. Raise `InvalidInput` with what it said if the input is not accepted."""
        try:
            while not self.finished.is_set():
                code = await self._once()
                if code == Exit.OK:
                    self.finished.set()
                elif code == Exit.INVALID:
                    msg = f"the input is not accepted: {self._last_words()}"
                    raise InvalidInput(msg, field="file")
                elif code >= 0:  # it gave up, or came upon a mesh that was down
                    await asyncio.sleep(AGAIN_S)
        finally:
            await self.kill()

    async def kill(self) -> int:
        """SIGKILL; the pid, or 0 if it does not run."""
        process = self._process
        if process is None or process.returncode is not None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        return process.pid

    async def _once(self) -> int:
        self.runs += 1
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment({}),
                start_new_session=True,
            )
        self._observe(self._process.pid)
        try:
            return await self._process.wait()
        finally:
            self._observe(0)

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").splitlines()
        return "; ".join(line.removeprefix("error: ") for line in lines[-5:])
