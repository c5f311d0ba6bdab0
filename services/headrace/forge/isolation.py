"""A batch that fails is halved until the guilty row stands alone; each row ends with an answer or an error of its own.

In a batch of n in which rows raise, a row runs at most 1 + log2(n) times, rounded up, and its answer is the last one;
in a batch that does not fail, once. A generator's answers before the failure are kept, so those rows run once.

A row that raises is told so at once. A process that died says nothing about which row it was: the halves run apart,
and a row is guilty when a process died with it alone, and another one died with it before. A batch that took too long
is halved as well, and a row that does so alone is guilty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from headrace.contracts.messages import ItemError
from headrace.forge.children import Died
from headrace.forge.function import Function
from headrace.forge.invoke import BatchFailed, RowOutcome
from headrace.forge.pool import Pool

log = logging.getLogger("headrace.forge")

GUILTY_DEATHS: Final = 2
"""Processes that died with a row, before it is guilty: a first one may have died of anything."""


class _Part(NamedTuple):
    """Rows `first` to `end` of the batch that still have to run; `deaths` of processes that they were in."""

    first: int
    end: int
    deaths: int = 0


class Isolation:
    """Runs batches of one function on a pool. `calls` and `splits` count, for reports and tests."""

    def __init__(self, function: Function[..., Any], pool: Pool) -> None:
        self._function = function
        self._pool = pool
        self.calls = 0
        self.splits = 0

    async def run(self, rows: Sequence[bytes]) -> list[RowOutcome]:
        """One outcome for each row, in order. Raise a `HeadraceError` if no process can be started, `Died` if the
        pool was stopped.
        """
        outcomes: list[RowOutcome] = [RowOutcome()] * len(rows)
        left = [_Part(0, len(rows))] if rows else []
        whole = True
        while left:
            part = left.pop()
            try:
                found = await self._call(rows[part.first : part.end], deaths=part.deaths, retried=whole)
            except BatchFailed as e:
                at = part.first + len(e.done)
                outcomes[part.first : at] = e.done
                self._split(
                    left, outcomes, part._replace(first=at), e.kind, e.message, stands_out=bool(e.done)
                )
            except Died as e:
                if e.stopped:
                    raise
                kind = "timeout" if e.timeout else "crashed"
                died = part._replace(deaths=part.deaths + 1)
                self._split(left, outcomes, died, kind, f"the process that ran it {e}")
            else:
                outcomes[part.first : part.end] = found
            whole = False
        return outcomes

    def _split(
        self,
        left: list[_Part],
        outcomes: list[RowOutcome],
        part: _Part,
        kind: str,
        message: str,
        *,
        stands_out: bool = False,
    ) -> None:
        """Convict a row that stands alone, or put the parts of what failed before what is left. `stands_out`: the
        first row is the one at which it failed.
        """
        count = part.end - part.first
        if count == 1:
            if kind == "crashed" and part.deaths < GUILTY_DEATHS:
                left.append(part)
                return
            outcomes[part.first] = RowOutcome(error=ItemError(type=kind, message=message))
            return
        self.splits += 1
        log.info(
            "a batch failed, and is split",
            extra={"function": self._function.name, "rows": count, "kind": kind, "reason": message[:300]},
        )
        middle = part.first + (1 if stands_out else count // 2)
        left += [part._replace(first=middle), part._replace(end=middle)]

    async def _call(self, rows: Sequence[bytes], *, deaths: int, retried: bool) -> list[RowOutcome]:
        """One call; a whole batch that failed of something passing is called again, before it is split."""
        retry = self._function.retry
        for attempt in range(retry.tries if retried else 1):
            self.calls += 1
            try:
                return await (self._pool.run_apart(rows) if deaths else self._pool.run(rows))
            except BatchFailed as e:
                if not e.passing or not retried or attempt == retry.tries - 1:
                    raise
                log.info(
                    "a batch is tried again",
                    extra={"function": self._function.name, "reason": e.message[:300]},
                )
            await asyncio.sleep(retry.delay_s * 2**attempt)
        raise AssertionError("unreachable: the last try returns or raises")
