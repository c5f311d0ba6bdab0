"""One child process, as its parent sees it: started, asked, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace.contracts.errors import InvalidInput, Unavailable
from headrace.forge.frames import HEAD, Answer, Ask, Hello, decode_answer, decode_ready, frame
from headrace.forge.function import Function
from headrace.forge.invoke import BatchFailed, RowOutcome

START_S: Final = 300.0
"""Longest import of a function's module: it may load a model."""
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Died(Exception):
    """The process ended, or was ended, with batches in it. `how` is for people; `stopped`: we wanted it so."""

    def __init__(self, how: str, *, timeout: bool = False, stopped: bool = False) -> None:
        super().__init__(how)
        self.timeout = timeout
        self.stopped = stopped


class Child:
    """A process that runs batches of one function; a dead one stays dead."""

    def __init__(self, function: Function[..., Any], options: Mapping[str, str], *, threads: int = 0) -> None:
        self._function = function
        self._options = dict(options)
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._next = 0
        self._why = ""
        self._stopped = False
        self.busy_s = 0.0
        self.memory_mb = 0

    @property
    def pid(self) -> int:
        """The process; 0 before its start."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._listening is not None and not self._listening.done()

    async def start(self) -> None:
        """Start it and let it import the function; `InvalidInput` or `Unavailable` if that is not possible there."""
        if self._function.call.__module__ == "__main__":
            msg = f"function {self._function.name} is defined in the script that runs: put it in a module of its own"
            raise InvalidInput(msg, field="function", code="no_module")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace.forge.child",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what a function prints is no answer of the command
                pass_fds=(theirs.fileno(),),
                env=self._environment(),
            )
        ours.setblocking(False)  # noqa: FBT003  (positional by its nature)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        path = [p or os.getcwd() for p in sys.path]  # noqa: PTH109  (entries of sys.path are strings)
        self._writer.write(frame(Hello(self._function.reference, path, self._options)))
        try:
            async with asyncio.timeout(START_S):
                ready = decode_ready(await self._receive(self._reader))
        except TimeoutError:
            await self.stop()
            raise Unavailable(
                f"function {self._function.name} is not imported within {START_S:g} s"
            ) from None
        except (OSError, EOFError):
            how = await self._ended()
            raise Unavailable(
                f"the process of function {self._function.name} {how} when it was imported"
            ) from None
        except BaseException:
            await self.stop()
            raise
        if ready.error:
            await self.stop()
            raise InvalidInput(
                f"function {self._function.name}, in its own process: {ready.error}", field="function"
            )
        self._listening = asyncio.get_running_loop().create_task(self._listen(self._reader))

    async def ask(self, rows: Sequence[bytes], timeout_s: float) -> list[RowOutcome]:
        """The outcomes of a batch; `BatchFailed` as the function failed, `Died` if the process ended meanwhile."""
        if self._writer is None or not self.alive:
            raise Died(self._why or "had ended before", stopped=self._stopped)
        self._next += 1
        number = self._next
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(frame(Ask(number, list(rows))))
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            self._why = f"took longer than timeout_s, {timeout_s:g} s"
            self.kill()
            raise Died(self._why, timeout=True) from None
        except OSError:
            raise Died(await self._ended()) from None
        finally:
            self._answers.pop(number, None)
        self.busy_s += answer.seconds
        self.memory_mb = answer.memory_mb
        if answer.kind is not None:
            raise BatchFailed(answer.kind, answer.message, passing=answer.passing, done=answer.outcomes)
        return answer.outcomes

    async def _send(self, data: bytes) -> None:
        if self._writer is None or self._writer.is_closing():  # it died, and nobody has noticed yet
            raise BrokenPipeError
        self._writer.write(data)
        await self._writer.drain()

    def kill(self) -> None:
        """End it at once; its batches hear `Died`."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """End it, and wait until it has; idempotent."""
        self._stopped = True
        self.kill()
        if self._process is not None:
            await self._process.wait()
        if self._listening is not None:
            await asyncio.wait([self._listening])
        if self._writer is not None:
            self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                answer = decode_answer(await self._receive(reader))
                future = self._answers.get(answer.id)
                if future is not None and not future.done():
                    future.set_result(answer)
        how = self._why or await self._ended()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(Died(how, stopped=self._stopped))

    async def _ended(self) -> str:
        if self._process is None:
            return "had not begun"
        self.kill()  # one that closed its socket and lives is of no use either
        code = await self._process.wait()
        if code < 0:
            try:
                return f"died of {signal.Signals(-code).name}"
            except ValueError:
                return f"died of signal {-code}"
        return f"ended with exit code {code}"

    @staticmethod
    async def _receive(reader: asyncio.StreamReader) -> bytes:
        head = await reader.readexactly(HEAD)
        return await reader.readexactly(int.from_bytes(head, "big"))

    def _environment(self) -> dict[str, str]:
        """Ours without what makes services of Headrace crash or report; and the threads that fall to each process."""
        own = ("HEADRACE_CRASH_AT", "HEADRACE_READY_FILE", "HEADRACE_LIFELINE")
        found = {k: v for k, v in os.environ.items() if k not in own}
        for name in _THREADS if self._threads else ():
            found.setdefault(name, str(self._threads))
        return found
