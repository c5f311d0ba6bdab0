"""vLLM by AsyncLLM: the engine in a process of its own, which keeps its CPU work off our loop. The default on a GPU."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed, Output, Work
from headrace.inference_worker.engines.vllm_args import VllmSetup
from headrace.inference_worker.engines.vllm_common import Prepared, VllmBase, load_failure
from headrace.inference_worker.engines.vllm_params import refusal
from headrace.inference_worker.engines.vllm_stats import logger_factory


class VllmAsyncEngine(VllmBase):
    """`AsyncLLM`. Its child is spawned: a program that uses it must guard its `__main__`."""

    def __init__(self, setup: VllmSetup) -> None:
        super().__init__(setup)
        self._engine: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Load the model in a child process. Raise `HeadraceError` in one sentence if it cannot be loaded."""
        if self._engine is not None and not self._dead:
            return
        if self._engine is not None:
            await self.stop()
        try:
            engine = await asyncio.to_thread(self._load)
        except Exception as e:
            raise load_failure(self._setup.model, e) from e
        self._engine = engine
        self._loaded(engine)

    async def stop(self) -> None:
        """End the child; what is pending gets `EngineDied`."""
        engine, self._engine = self._engine, None
        self._die("the engine was stopped")
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        self._config = self._input = None

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
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

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
        except EngineDeadError as e:
            self._die("vLLM's engine process died")
            raise EngineDied(self._dead) from e
        except ValueError as e:
            raise refusal(e) from e
        except Exception as e:
            if self._engine is None or self._engine.errored:
                self._die(f"vLLM's engine failed: {e!r}")
                raise EngineDied(self._dead) from e
            cause = e.__cause__ or e
            raise ItemFailed("engine_error", f"vLLM failed the item: {cause!r}") from e
        if result is None:
            raise EngineDied(self._dead or "vLLM ended the item without an answer")
        return result

    def _in_engine(self) -> int:
        return len(self._tasks)

    def _load(self) -> Any:
        args = self._engine_args()
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(args, stat_loggers=[logger_factory(self._counts)])

    def _die(self, why: str) -> None:
        self._dead = self._dead or why
