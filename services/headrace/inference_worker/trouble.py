"""What becomes of an item whose run raised: `engines.protocol` tells the kinds, and this does what it says."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.contracts.messages import ItemError
from headrace.inference_worker.engine_host import EngineHost
from headrace.inference_worker.engines.protocol import Engine, EngineDied, ItemFailed, OutOfMemory
from headrace.inference_worker.finishing import Finisher
from headrace.inference_worker.intake import Item, now_us
from headrace.inference_worker.triage import Triage
from headrace.mesh import tracing

log = logging.getLogger("headrace.worker")


class Trouble:
    """Decides for the items of one worker; `running` are those in the engine. `hold` takes one that stays here to run
    again.
    """

    def __init__(
        self,
        *,
        host: EngineHost,
        finisher: Finisher,
        triage: Triage,
        running: set[Item],
        hold: Callable[[Item], None],
    ) -> None:
        self._host = host
        self._finisher = finisher
        self._triage = triage
        self._running = running
        self._hold = hold

    def engine_died(self, why: str) -> None:
        """What has begun was in the engine, and is suspect."""
        self._triage.engine_died(why, [item for item in self._running if item.started_us])

    def raised(self, item: Item, engine: Engine, error: Exception) -> tuple[str, bool]:
        """End the try of an item that ran in `engine`; return the error's name, for its span, and whether it is a
        suspect, whose end is the triage's.
        """
        if isinstance(error, ItemFailed):
            self._finisher.failed(item, error.error)
            return error.error.type, False
        if isinstance(error, OutOfMemory):
            self._out_of_memory(item, error)
            return "out_of_memory", False
        if isinstance(error, EngineDied):
            return "engine_died", self._in_dead_engine(item, engine, error)
        name = type(error).__name__
        extra = {"job": item.task.job, "index": item.task.index, "reason": repr(error)[:300]}
        log.warning("an item raised", extra=extra | {"trace_id": tracing.trace_id(item.traceparent)})
        if item.incident is not None:
            return name, True  # whatever it says, the engine was dying
        self._finisher.try_again(item, f"{name}: {error}")
        return name, False

    def died_preparing(self, item: Item, engine: Engine, error: EngineDied) -> None:
        """The engine died while it looked at an item, which is inside for that moment; or it was dead before."""
        if engine is self._host.engine and self._host.up:
            item.started_us = now_us()
            self._running.add(item)
            self._host.died(str(error))
            self._running.discard(item)
            self._triage.left(item, suspect=True)
        else:
            self._finisher.give_back(item)

    def _in_dead_engine(self, item: Item, engine: Engine, error: EngineDied) -> bool:
        """Return whether the item was in the engine when it died; one that came later waits for the next."""
        if engine is self._host.engine:
            self._host.died(str(error))
        if item.incident is not None:
            return True
        self._hold(item)
        return False

    def _out_of_memory(self, item: Item, error: OutOfMemory) -> None:
        """Once more with nothing beside it; if that was so, the item is too large."""
        if item.alone:
            message = f"there is no memory for the item, even with nothing beside it: {error}"
            self._finisher.failed(item, ItemError(type="out_of_memory", message=message))
            return
        log.warning("no memory for an item", extra={"job": item.task.job, "index": item.task.index})
        item.alone = True
        self._hold(item)
