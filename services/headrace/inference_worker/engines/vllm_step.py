"""vLLM by `LLMEngine.step()` in a thread of this process: no child, every step ours. The default without a GPU."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from headrace.inference_worker.engines.background import in_daemon
from headrace.inference_worker.engines.memory import is_out_of_memory
from headrace.inference_worker.engines.protocol import EngineDied, OutOfMemory, Output, Work
from headrace.inference_worker.engines.vllm_args import VllmSetup, set_environment, vllm
from headrace.inference_worker.engines.vllm_common import Prepared, VllmBase, load_failure
from headrace.inference_worker.engines.vllm_params import refusal
from headrace.inference_worker.engines.vllm_stats import logger_factory

DELIVER_S: Final = 0.02
"""Seconds between two deliveries while the engine works. What finishes together is settled, and its places are filled,
in one turn of the event loop: each turn takes the interpreter from the steps, and the engine has a tenth of a second of
work in its queue.
"""
_log = logging.getLogger(__name__)


class _Add(Struct, frozen=True):
    """Ask the loop to take an item in."""

    id: str
    work: Prepared
    lora: Any


class _Abort(Struct, frozen=True):
    """Ask the loop to drop an item."""

    id: str


class _Stop(Struct, frozen=True):
    """Ask the loop to end."""


Deliver = Callable[[list[tuple[str, Any]]], None]


class StepLoop:
    """The thread: loads the engine, then takes commands and steps for as long as there is work.

    All of vLLM is used from this thread alone. Finished items go out once for each step, through `deliver`; an
    exception there is that item's refusal. `died` is called once if a step fails.
    """

    def __init__(self, load: Callable[[], Any], deliver: Deliver, died: Callable[[str], None]) -> None:
        self._load = load
        self._deliver = deliver
        self._died = died
        self._commands: deque[_Add | _Abort | _Stop] = deque()
        self._wake = threading.Event()
        self._ready = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._main, name="vllm-steps", daemon=True)

    def start_and_wait(self) -> None:
        """Start the thread and block until the engine is loaded; raise what loading raised."""
        self.thread.start()
        self._ready.wait()
        if self.error is not None:
            raise self.error

    def send(self, command: _Add | _Abort | _Stop) -> None:
        """Hand a command over; it is taken at the next step boundary."""
        self._commands.append(command)
        self._wake.set()

    def _main(self) -> None:
        try:
            engine = self._load()
        except BaseException as e:  # noqa: BLE001 -- it is raised again in the thread that waits
            self.error = e
            self._ready.set()
            return
        self._ready.set()
        try:
            self._steps(engine)
        except Exception as e:  # noqa: BLE001 -- whatever ends the steps ends the engine
            _log.exception("vLLM's step failed")
            self._died(f"vLLM's step failed: {type(e).__name__}: {e}")
        finally:
            _close(engine)

    def _steps(self, engine: Any) -> None:
        finished: list[tuple[str, Any]] = []
        delivered_at = 0.0
        while True:
            if not self._commands and not engine.has_unfinished_requests():
                self._wake.wait()
            self._wake.clear()
            if not self._take(engine, finished):
                return
            if engine.has_unfinished_requests():
                finished += [(out.request_id, out) for out in engine.step() if out.finished]
            now = time.monotonic()
            if finished and (now - delivered_at >= DELIVER_S or not engine.has_unfinished_requests()):
                self._deliver(finished)
                finished, delivered_at = [], now

    def _take(self, engine: Any, refused: list[tuple[str, Any]]) -> bool:
        tokens_input = vllm("vllm.inputs.engine", "tokens_input")
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Abort):
                engine.abort_request([command.id])
                continue
            work = command.work
            try:
                engine.add_request(
                    command.id,
                    tokens_input(work.ids),
                    work.sampling,
                    lora_request=command.lora,
                    trace_headers={"traceparent": work.traceparent} if work.traceparent else None,
                    priority=work.params.priority,
                )
            except (ValueError, TypeError, RuntimeError) as e:
                refused.append((command.id, OutOfMemory(str(e)) if is_out_of_memory(e) else refusal(e)))
        return True


class VllmStepEngine(VllmBase):
    """`LLMEngine` stepped in a thread; results come back to the event loop once for each step."""

    def __init__(self, setup: VllmSetup) -> None:
        super().__init__(setup)
        self._loop: StepLoop | None = None
        self._pending: dict[str, asyncio.Future[Any]] = {}

    async def start(self) -> None:
        """Load the model in the loop's thread. Raise `HeadraceError` in one sentence if it cannot be loaded."""
        if self._loop is not None and self._loop.thread.is_alive():
            return
        home = asyncio.get_running_loop()
        loaded: list[Any] = []

        def load() -> Any:
            args = self._engine_args()
            cls = vllm("vllm.v1.engine.llm_engine", "LLMEngine")
            engine = cls.from_engine_args(args, stat_loggers=[logger_factory(self._counts)])
            loaded.append(engine)
            return engine

        def deliver(results: list[tuple[str, Any]]) -> None:
            _call(home, self._on_results, results)

        def died(why: str) -> None:
            _call(home, self._on_death, why)

        # The environment must stand before anything imports torch, in whichever thread that happens.
        set_environment(self._setup)
        loop = StepLoop(load, deliver, died)
        try:
            await asyncio.to_thread(loop.start_and_wait)
        except Exception as e:
            raise load_failure(self._setup.model, e) from e
        self._loop = loop
        self._loaded(loaded.pop())

    async def stop(self) -> None:
        """End the thread and free the model; what is pending gets `EngineDied`."""
        loop, self._loop = self._loop, None
        self._on_death("the engine was stopped")
        if loop is not None:
            loop.send(_Stop())
            await in_daemon(loop.thread.join)
        self._config = self._input = None

    async def run(self, work: Work) -> Output:
        """Run an item; a cancelled one leaves the engine at the next step."""
        prepared = self._prepared(work)
        loop = self._loop
        if loop is None:
            raise EngineDied(self._dead)
        request = self._request_id(work)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[request] = done
        loop.send(_Add(request, prepared, self._lora(work)))
        try:
            result = await done
        except asyncio.CancelledError:
            loop.send(_Abort(request))
            raise
        finally:
            self._pending.pop(request, None)
        return self._output(prepared, result)

    def _in_engine(self) -> int:
        return len(self._pending)

    def _on_results(self, results: list[tuple[str, Any]]) -> None:
        for request, result in results:
            done = self._pending.get(request)
            if done is None or done.done():
                continue
            if isinstance(result, BaseException):
                done.set_exception(result)
            else:
                done.set_result(result)

    def _on_death(self, why: str) -> None:
        self._dead = self._dead or why
        pending, self._pending = self._pending, {}
        for done in pending.values():
            if not done.done():
                done.set_exception(EngineDied(why))


def _call(home: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    try:
        home.call_soon_threadsafe(function, *args)
    except RuntimeError:
        # The event loop is closed: nobody is left to hear of it.
        _log.debug("vLLM finished something after its event loop had ended")


def _close(engine: Any) -> None:
    """Give memory back as far as vLLM can within a process that lives on."""
    try:
        engine.engine_core.shutdown()
    except Exception:  # noqa: BLE001 -- nothing depends on it, and the thread must end
        _log.warning("vLLM did not shut down cleanly", exc_info=True)
    gc.collect()
