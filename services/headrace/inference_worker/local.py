"""An engine in this process, for `headrace run`: `generate` and `classify` without a mesh.

Each batch is a set of items that run in the engine at once; an engine batches inside as it always does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET

from headrace.client.items import Item
from headrace.contracts.errors import Unavailable
from headrace.contracts.messages import FunctionSpec, ItemError, Result, Timings
from headrace.forge.batching import DEFAULT, parse_batching
from headrace.forge.local import Numbered
from headrace.forge.plans import Plan
from headrace.inference_worker.engines.classifier import ClassifyEngine
from headrace.inference_worker.engines.protocol import (
    Engine,
    EngineDied,
    ItemFailed,
    OutOfMemory,
    Output,
    Work,
)
from headrace.inference_worker.intake import prepared
from headrace.inference_worker.registration import spec_of
from headrace.inference_worker.service import engine_of
from headrace.mesh.settings import Settings

ENGINE_FUNCTIONS: Final = ("generate", "classify")


def engine_plan(name: str, settings: Settings, *, flag: str | None) -> Plan:
    """How `generate` or `classify` are batched: as any function without a decorator of its own."""
    own = settings.functions.get(name)
    texts = [flag, own.batching if own else None, settings.forge.batching]
    batching = next((parse_batching(text) for text in texts if text is not None), DEFAULT)
    return Plan(batching=batching, order="ordered" if settings.forge.order == "ordered" else "free")


class EngineRunner:
    """Runs items of `generate` or `classify` on the engine that the settings of the worker name."""

    def __init__(self, name: str, settings: Settings, *, job: str = "local") -> None:
        engine = engine_of(settings.worker)
        self._engine: Engine = ClassifyEngine(engine) if name == "classify" else engine
        self._name = name
        self._job = job
        self._spec = FunctionSpec(name=name)
        self._room = asyncio.Semaphore(1)

    @property
    def spec(self) -> FunctionSpec:
        """What it would be registered as; exact once started."""
        return self._spec

    @property
    def width(self) -> int:
        """Two batches, so that the engine does not run empty between them."""
        return 2

    async def start(self) -> None:
        """Load the model."""
        await self._engine.start()
        self._spec = spec_of(self._name, self._engine.info)
        self._room = asyncio.Semaphore(self._engine.info.slots or 1_024)

    async def stop(self) -> None:
        """Free it."""
        await self._engine.stop()

    def size(self, item: Item) -> int:
        """Tokens of the prompt, as the client estimates them, and of the longest answer."""
        return max(1, item.prompt_tokens + item.params.new_tokens)

    async def run(self, batch: Sequence[Numbered]) -> list[Result]:
        """The batch's results. Raise `Unavailable` if the engine dies: there is no other to go on with."""
        return list(await asyncio.gather(*(self._one(numbered) for numbered in batch)))

    async def _one(self, numbered: Numbered) -> Result:
        started_us = time.time_ns() // 1_000
        try:
            work = prepared(self._work(numbered), self._engine, self._spec)
            async with self._room:
                started_us = time.time_ns() // 1_000
                output = await self._engine.run(work)
        except ItemFailed as e:
            return self._result(numbered, started_us, error=e.error)
        except OutOfMemory as e:
            return self._result(
                numbered, started_us, error=ItemError(type="out_of_memory", message=str(e)[:2_000])
            )
        except EngineDied as e:
            raise Unavailable(f"the engine died: {e}", code="engine") from e
        return self._result(numbered, started_us, output=output)

    def _work(self, numbered: Numbered) -> Work:
        item = numbered.item
        params = item.params.generation
        return Work(
            id=f"{self._job}/{numbered.index}@1",
            prompt=item.prompt,
            params=params,
            max_tokens=params.max_tokens or max(1, params.min_tokens),
            prompt_tokens=item.prompt_tokens,
            chat=item.chat,
        )

    def _result(
        self,
        numbered: Numbered,
        started_us: int,
        *,
        output: Output | None = None,
        error: ItemError | None = None,
    ) -> Result:
        info = self._engine.info
        common: dict[str, Any] = {
            "job": self._job,
            "index": numbered.index,
            "function": self._name,
            "custom_id": numbered.item.custom_id,
            "model": info.model[:512],
            "engine": info.engine,
            "worker": "local",
            "chat": numbered.item.chat,
            "params_fingerprint": numbered.item.params.fingerprint,
            "timings": Timings(started_us=started_us, finished_us=time.time_ns() // 1_000),
        }
        if output is None:
            return Result(status="failed", error=error, **common)
        value = UNSET if output.value is None else output.value
        return Result(status="ok", choices=output.choices, value=value, usage=output.usage, **common)
