"""A function over rows as an engine: rows come one by one, and go through it in batches, in processes of their own.

Nothing that the function does ends the worker. What it may do, and what then becomes of the rows, stands in
`headrace.forge.isolation`; a row's error is that row's alone.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Raw

from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import Row
from headrace.forge.batching import MAX_ROWS
from headrace.forge.children import Died
from headrace.forge.collector import Collector
from headrace.forge.function import Function
from headrace.forge.plans import ENGINE, Plan
from headrace.forge.sizes import size_of
from headrace.inference_worker.engines.protocol import EngineDied, EngineInfo, ItemFailed, Output, Work

AHEAD: Final = 2
"""Batches that a worker holds for each place: the one that runs and the one that follows it, so that none waits for
the broker.
"""
AHEAD_FREE: Final = 4
"""As many where rows of like size are put together: among two batches' rows there is little to choose from. Measured
on skewed texts, it halves the padding.
"""
FIRST_ROWS: Final = 32
"""Rows of a budget that are asked for before their size is known. Too many would be held, and kept from others."""
ROWS_OF_BUDGET: Final = 4_096
"""Rows held for each place at most, where a budget of tokens decides: they may be tiny."""


class FunctionEngine:
    """`prepare` measures a row, `run` puts it into a batch and waits for its outcome."""

    def __init__(self, function: Function[..., Any], plan: Plan) -> None:
        self._function = function
        self._plan = plan
        self._pool, self._isolation = plan.isolated(function)
        self._collector: Collector | None = None
        self._done = 0
        self._looks = 0
        batching, width = plan.batching, self._pool.width
        by_rows = batching.mode == "rows"
        rows = batching.limit if by_rows else min(ROWS_OF_BUDGET, batching.limit)
        ahead = AHEAD if by_rows or plan.order == "ordered" else AHEAD_FREE
        slots = min(MAX_ROWS, ahead * width * rows)
        self._info = EngineInfo(
            engine=ENGINE,
            model=function.identity,
            slots=slots,
            capacity_tokens=0 if by_rows else ahead * width * batching.limit,
            rows=True,
            row_tokens=0 if by_rows else max(1, batching.limit // FIRST_ROWS),
            version=function.version,
        )

    @property
    def info(self) -> EngineInfo:
        """A few batches for each process; tokens count where a budget of them makes the batches."""
        return self._info

    async def start(self) -> None:
        """Start the processes, in which the function's module is imported."""
        await self._pool.start()
        plan = self._plan
        self._collector = Collector(
            self._isolation.run,
            plan.batching,
            order=plan.order,
            width=self._pool.width,
            max_wait_s=plan.max_wait_s,
        )

    async def stop(self) -> None:
        """End the processes; rows in them end with `EngineDied`."""
        if self._collector is not None:
            await self._collector.stop(EngineDied("the engine was stopped"))
        await self._pool.stop()

    def prepare(self, work: Work) -> Work:
        """Measure the row, where a budget counts; what is larger than it counts as much, and runs alone."""
        prompt, batching = work.prompt, self._plan.batching
        if not isinstance(prompt, Row):
            message = f"function {self._function.name} takes rows: submit with --rows"
            raise ItemFailed("invalid_prompt", message, field="prompt")
        tokens = 1
        if batching.mode == "tokens":
            tokens = size_of(self._plan.size, bytes(prompt.value), self._function.codec.decode)
        return Work(
            id=work.id,
            prompt=prompt,
            params=work.params,
            max_tokens=work.max_tokens,
            # The ledger adds what an answer has at least, one token: together they are the row's size.
            prompt_tokens=min(tokens, batching.limit) - 1 if batching.mode == "tokens" else 0,
            chat=False,
            traceparent=work.traceparent,
            attempt=work.attempt,
        )

    async def run(self, work: Work) -> Output:
        """The row's answer; `ItemFailed` for its error, `EngineDied` if the engine was stopped."""
        collector, prompt = self._collector, work.prompt
        if collector is None or not isinstance(prompt, Row):
            raise EngineDied("the engine is not running")
        try:
            outcome = await collector.outcome(bytes(prompt.value), work.prompt_tokens + 1)
        except Died as e:
            raise EngineDied(str(e)) from None
        except HeadraceError as e:
            # The process cannot be started again: nobody's fault as far as the row knows, and tried again later.
            raise RuntimeError(str(e)) from e
        self._done += 1
        if outcome.error is not None:
            raise ItemFailed(outcome.error.type, outcome.error.message, field=outcome.error.field)
        return Output(value=Raw(outcome.value or b"null"))

    def tokens_generated(self) -> int:
        """Never still: a batch that takes too long is this engine's own business (`timeout_s`), and it is seen to here,
        in the same loop that asks.
        """
        self._looks += 1
        return self._done + self._looks

    def stats(self) -> dict[str, Any]:
        """`steps` are batches; `busy_s` is the time that they took, in all processes together."""
        collector = self._collector
        return {
            "steps": collector.batches if collector else 0,
            "running": collector.running if collector else 0,
            "waiting": collector.waiting if collector else 0,
            "busy_s": self._pool.busy_s,
            "splits": self._isolation.splits,
            "pids": self._pool.pids,
        }
