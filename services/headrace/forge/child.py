"""The process in which a function runs: `python -m headrace.forge.child FD`, started by `children`, by nobody else.

It can hold the interpreter for as long as it likes, crash or grow: its parent renews the leases and talks to the
broker. It ends with its parent, whatever that died of: the kernel sees to it on Linux, the closed socket elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from headrace.contracts.errors import HeadraceError
from headrace.forge.frames import HEAD, Answer, Ask, Hello, Ready, TooLong, decode_ask, decode_hello, frame
from headrace.forge.function import Function, set_options
from headrace.forge.invoke import BatchFailed, RowOutcome, invoke, invoke_async
from headrace.forge.locate import find_function

_PR_SET_PDEATHSIG: Final = 1
_KIB_A_MB: Final = 1024


def main() -> None:
    """Serve one parent until it hangs up."""
    parent = os.getppid()
    _die_with_parent(parent)
    # A signal for the whole group (Ctrl-C, a unit that stops) is the parent's to act on: batches are finished.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    link = socket.socket(fileno=int(sys.argv[1]))
    hello = decode_hello(_receive(link) or os._exit(0))
    function = _load(link, hello)
    if function is None:
        return
    server = _AsyncServer(link, function) if function.is_async else _Server(link, function)
    server.run()


def _load(link: socket.socket, hello: Hello) -> Function[..., Any] | None:
    sys.path[:] = hello.path
    set_options(hello.options)
    try:
        function = find_function(hello.reference)
    except HeadraceError as e:
        link.sendall(frame(Ready(error=str(e))))
        return None
    link.sendall(frame(Ready(identity=function.identity)))
    return function


class _Server:
    """Batches one after the other, in the main thread; another one reads, so that the parent's end is seen."""

    def __init__(self, link: socket.socket, function: Function[..., Any]) -> None:
        self.link = link
        self.function = function
        self._asked: queue.SimpleQueue[Ask] = queue.SimpleQueue()

    def run(self) -> None:
        _read_in_thread(self.link, self._asked.put)
        while True:
            ask = self._asked.get()
            began = time.perf_counter()
            try:
                answer = _ok(ask, invoke(self.function, ask.rows))
            except BatchFailed as e:
                answer = _failed(ask, e)
            except Exception as e:  # noqa: BLE001  (our own fault or the interpreter's: the batch must hear of it)
                answer = _failed(ask, BatchFailed("raised", f"{type(e).__name__}: {e}"))
            _send(self.link, answer, began)


class _AsyncServer(_Server):
    """Batches beside one another, in one event loop."""

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()

        def start(ask: Ask) -> None:
            task = loop.create_task(self._answer(ask))
            running.add(task)
            task.add_done_callback(running.discard)

        def asked(ask: Ask) -> None:
            loop.call_soon_threadsafe(start, ask)

        _read_in_thread(self.link, asked)
        await asyncio.Event().wait()

    async def _answer(self, ask: Ask) -> None:
        began = time.perf_counter()
        try:
            answer = _ok(ask, await invoke_async(self.function, ask.rows))
        except BatchFailed as e:
            answer = _failed(ask, e)
        except Exception as e:  # noqa: BLE001  (as above)
            answer = _failed(ask, BatchFailed("raised", f"{type(e).__name__}: {e}"))
        _send(self.link, answer, began)


def _ok(ask: Ask, outcomes: list[RowOutcome]) -> Answer:
    return Answer(ask.id, outcomes)


def _failed(ask: Ask, error: BatchFailed) -> Answer:
    return Answer(ask.id, error.done, error.kind, error.message, error.passing)


def _send(link: socket.socket, answer: Answer, began: float) -> None:
    answer.seconds = time.perf_counter() - began
    answer.memory_mb = _memory_mb()
    try:
        data = frame(answer)
    except TooLong as e:
        data = frame(Answer(answer.id, kind="raised", message=str(e), seconds=answer.seconds))
    # The parent may hang up at any time: it has what it wants, or it is dead.
    with contextlib.suppress(OSError):
        link.sendall(data)


def _read_in_thread(link: socket.socket, put: Callable[[Ask], None]) -> None:
    def read() -> None:
        while (data := _receive(link)) is not None:
            put(decode_ask(data))
        os._exit(0)

    threading.Thread(target=read, name="parent", daemon=True).start()


def _receive(link: socket.socket) -> bytes | None:
    head = _exactly(link, HEAD)
    return None if head is None else _exactly(link, int.from_bytes(head, "big"))


def _exactly(link: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            got = link.recv_into(view[at:])
        except OSError:
            return None
        if not got:
            return None
        at += got
    return bytes(data)


def _memory_mb() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (_KIB_A_MB if sys.platform != "darwin" else _KIB_A_MB * 1024)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(0)


if __name__ == "__main__":
    main()
