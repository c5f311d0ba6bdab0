"""vLLM by AsyncLLM: the engine in a process of its own, which keeps its CPU work off our loop. The default on a GPU."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from typing import Any, Final

from headrace.inference_worker.engines.background import in_daemon
from headrace.inference_worker.engines.memory import is_out_of_memory
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed, OutOfMemory, Output, Work
from headrace.inference_worker.engines.reaper import Reaper
from headrace.inference_worker.engines.vllm_args import VllmSetup, vllm
from headrace.inference_worker.engines.vllm_common import Prepared, VllmBase, load_failure
from headrace.inference_worker.engines.vllm_params import refusal
from headrace.inference_worker.engines.vllm_stats import logger_factory

CHILD_POLL_S: Final = 0.1


class VllmAsyncEngine(VllmBase):
    """`AsyncLLM`. Its child is spawned: a program that uses it must guard its `__main__`."""

    def __init__(self, setup: VllmSetup) -> None:
        super().__init__(setup)
        self._engine: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaper: Reaper | None = None

    async def start(self) -> None:
        """Load the model in a child process. Raise `HeadraceError` in one sentence if it cannot be loaded."""
        if self._engine is not None and not self._dead:
            return
        await self.stop()
        self._reaper = reaper = Reaper()
        loading = asyncio.get_running_loop().create_task(asyncio.to_thread(self._load))
        try:
            while not loading.done():
                # Loading takes long enough to be killed in: the child is known to the reaper from its first moments.
                await asyncio.wait([loading], timeout=CHILD_POLL_S)
                for child in multiprocessing.active_children():
                    reaper.add(child.pid)
            self._engine = loading.result()
        except Exception as e:
            await self.stop()
            raise load_failure(self._setup.model, e) from e
        self._loaded(self._engine)

    async def stop(self) -> None:
        """End the child; what is pending gets `EngineDied`."""
        engine, self._engine = self._engine, None
        self._die("the engine was stopped")
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if engine is not None:
            await in_daemon(engine.shutdown)
        self._config = self._input = None
        # Its cycles are collected now: at the interpreter's end its finalizer finds its modules gone.
        del engine
        gc.collect()
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.close()

    async def run(self, work: Work) -> Output:
        """Run an item; cancelling it aborts the request in the engine."""
        prepared = self._prepared(work)
        # A task of its own, so that `stop` can end it without cancelling the caller.
        task = asyncio.get_running_loop().create_task(self._result(prepared))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineDied(self._dead or "the engine was stopped") from None
            task.cancel()
            raise
        return self._output(prepared, result)

    async def _result(self, work: Prepared) -> Any:
        tokens_input = vllm("vllm.inputs.engine", "tokens_input")
        dead = vllm("vllm.v1.engine.exceptions", "EngineDeadError")
        result: Any = None
        try:
            async for out in self._engine.generate(
                tokens_input(work.ids),
                work.sampling,
                self._request_id(work),
                lora_request=self._lora(work),
                trace_headers={"traceparent": work.traceparent} if work.traceparent else None,
                priority=work.params.priority,
            ):
                result = out
        except dead as e:
            self._die("vLLM's engine process died")
            raise EngineDied(self._dead) from e
        except ValueError as e:
            raise refusal(e) from e
        except Exception as e:
            if self._engine is None or self._engine.errored:
                self._die(f"vLLM's engine failed: {e!r}")
                raise EngineDied(self._dead) from e
            cause = e.__cause__ or e
            if is_out_of_memory(cause):
                raise OutOfMemory(f"vLLM: {cause}") from e
            raise ItemFailed("engine_error", f"vLLM failed the item: {cause!r}") from e
        if result is None:
            raise EngineDied(self._dead or "vLLM ended the item without an answer")
        return result

    def _in_engine(self) -> int:
        return len(self._tasks)

    def _load(self) -> Any:
        args = self._engine_args()
        return vllm("vllm.v1.engine.async_llm", "AsyncLLM").from_engine_args(
            args, stat_loggers=[logger_factory(self._counts)]
        )

    def _die(self, why: str) -> None:
        self._dead = self._dead or why
