"""One life cycle for every service: start, run, stop; safe against double stop, stop before start, failed start."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from headrace.contracts.errors import HeadraceError
from headrace.mesh.connection import Mesh
from headrace.mesh.logs import setup_logging
from headrace.mesh.settings import Settings

log = logging.getLogger("headrace.service")

GC_THRESHOLD = (20_000, 20, 50)
"""Messages are many small objects that reference counting frees. Python's own 700 walks the thousands that are
in flight over and over: measured, a quarter of a worker's time for each item.
"""
EXIT_OK, EXIT_FAILED, EXIT_BAD_START = 0, 1, 2


class Service:
    """Base of the services. Subclasses fill in `on_start`, `on_drain` and `on_stop`.

    A stop goes in this order:

    1. `on_drain`: stop pulling, give back what has not started, let running work finish within the
       grace (leases are still renewed), flush results and acks
    2. side tasks are cancelled
    3. `on_stop`: free engines, files, threads
    4. the connection is closed

    The first SIGTERM or SIGINT begins a stop, the second ends the process at once.
    """

    name = "service"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.mesh: Mesh
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = False
        self._stopped = False

    # --- for subclasses ----------------------------------------------------------------------------
    async def on_start(self) -> None:
        """Check what is needed and begin; raise a `HeadraceError` of one sentence if it cannot."""

    async def on_drain(self) -> None:
        """Bring running work to its end within `settings.grace_s`."""

    async def on_stop(self) -> None:
        """Free what `on_start` took."""

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a side task; if it dies, the service stops and says so."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("side task died", extra={"task": task.get_name()}, exc_info=task.exception())
            self.failure = self.failure or task.exception()
            self.stopping.set()

    # --- life --------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Connect and start; on failure everything taken is freed again and the error raised."""
        self.mesh = await Mesh.connect(self.settings, name=self.name)
        self._started = True
        try:
            await self.on_start()
        except BaseException:
            await self._free()
            raise
        self.spawn(self._watch_connection(), "connection")

    async def _watch_connection(self) -> None:
        await self.mesh.closed.wait()
        if not self.stopping.is_set():
            msg = "the connection to the broker is closed for good"
            raise HeadraceError(msg)

    def request_stop(self) -> None:
        """Begin a stop; returns at once."""
        self.stopping.set()

    async def run_until_stopped(self) -> None:
        """Return when a stop was asked for, or a side task died (then `failure` is set)."""
        await self.stopping.wait()

    async def stop(self) -> None:
        """Stop in order; safe to call twice, and before `start`."""
        if self._stopped or not self._started:
            return
        self._stopped = True
        self.stopping.set()
        try:
            async with asyncio.timeout(self.settings.grace_s + 5.0):
                await self.on_drain()
        except TimeoutError:
            log.warning("grace is over; the rest goes back by lapse of its lease")
        except Exception:
            log.exception("draining failed")
        await self._free()

    async def _free(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.remove_done_callback(self._on_task_done)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self.on_stop()
        except Exception:
            log.exception("stopping failed")
        await self.mesh.close()


def run_service(factory: Callable[[Settings], Service], settings: Settings) -> int:
    """Run one service in this process until it is told to stop; return its exit code.

    0 = drained; 1 = a part of it died; 2 = it could not start (one sentence in the log says why).
    `HEADRACE_READY_FILE` names a file that gets the process id once the service is started.
    """
    service_name = getattr(factory, "name", "service")
    setup_logging(service_name, settings.log_level)
    # The tracing room is imported here since it needs the SDK, which most tests of services do without.
    from headrace.mesh import metrics, tracing

    tracing.setup_tracing(service_name)
    metrics.setup_metrics(service_name)
    gc.set_threshold(*GC_THRESHOLD)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(factory, settings))
    finally:
        tracing.shutdown_tracing()
        metrics.shutdown_metrics()


def write_ready_file(path: Path) -> None:
    """Say that this process is started: its id, written whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(str(os.getpid()))
    partial.replace(path)


async def _run(factory: Callable[[Settings], Service], settings: Settings) -> int:
    service = factory(settings)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if service.stopping.is_set():
            log.warning("second signal: ending at once")
            os._exit(EXIT_FAILED)
        log.info("draining", extra={"grace_s": settings.grace_s})
        service.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.ensure_future(service.start())
    stop_early = asyncio.ensure_future(service.stopping.wait())
    await asyncio.wait((starting, stop_early), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    try:
        await starting
    except asyncio.CancelledError:
        return EXIT_OK
    except HeadraceError as e:
        log.error("cannot start", extra={"reason": str(e), "code": e.code})  # noqa: TRY400  (one sentence, no traceback)
        print(f"error: {e}", file=sys.stderr, flush=True)  # noqa: T201
        return EXIT_BAD_START
    finally:
        stop_early.cancel()
    ready = os.environ.get("HEADRACE_READY_FILE")
    if ready:
        write_ready_file(Path(ready))
    gc.collect()
    gc.freeze()  # modules and settings live as long as the process: no collection needs to walk them
    log.info("ready")
    await service.run_until_stopped()
    with contextlib.suppress(asyncio.CancelledError):
        await service.stop()
    log.info("stopped")
    return EXIT_FAILED if service.failure else EXIT_OK
