"""What happens to each delivery: checked, admitted or held, run, ended.

Each item is one asyncio task from its start in the engine to its outcome. Nothing here waits for anything but
the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.contracts.errors import Undecodable
from headrace.contracts.messages import FunctionSpec, ItemError
from headrace.inference_worker.engine_host import EngineHost
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed
from headrace.inference_worker.finishing import Finisher
from headrace.inference_worker.intake import Aborted, Item, cost_of, decode, now_us, resolve
from headrace.inference_worker.lanes import LaneState
from headrace.inference_worker.ledger import TokenLedger
from headrace.inference_worker.waiting import Waiting
from headrace.mesh import spans, tracing
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.tracing import TraceSpan

log = logging.getLogger("headrace.worker")


class Runner:
    """Everything between the pulls and the settling. `on_free` is called when a place in the engine gets
    free.
    """

    def __init__(
        self,
        *,
        host: EngineHost,
        ledger: TokenLedger,
        spec: FunctionSpec,
        finisher: Finisher,
        leases: LeaseKeeper,
        worker: str,
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._spec = spec
        self._leases = leases
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self.finisher = finisher
        self.waiting = Waiting(ledger, start=self._start_held, give_back=finisher.give_back)
        self.running: set[Item] = set()
        self.cancelled_jobs: dict[str, None] = {}
        self.draining = False
        self.on_free: Callable[[], None] = lambda: None

    # --- receiving ---------------------------------------------------------------------------------
    def receive(self, lane: LaneState, delivery: Delivery) -> None:
        """Take one delivery: it starts, is held, or is ended without running."""
        self._leases.add(delivery)
        try:
            task = decode(delivery, self._spec.name)
        except Undecodable as e:
            self.finisher.reject(delivery, str(e))
            return
        item = Item(delivery, task, lane)
        if tracing.enabled():
            item.span = spans.process_span(delivery, task, client=self._worker)
            item.traceparent = tracing.carry(delivery.headers, item.span)
        if task.job in self.cancelled_jobs:
            self.finisher.let_go(item)
        elif self.draining:
            self.finisher.give_back(item)
        elif not self.finisher.exhausted(item) and not self._too_late(item):
            self._admit(item)

    def _too_late(self, item: Item) -> bool:
        deadline_us = item.task.deadline_us
        if deadline_us is None or (late_us := now_us() - deadline_us) <= 0:
            return False
        message = f"the deadline passed {late_us / 1e6:.1f} s before the item could start"
        self.finisher.failed(item, ItemError(type="deadline", message=message))
        return True

    def _admit(self, item: Item) -> None:
        try:
            item.work = resolve(item, self._host.engine, self._spec)
            item.cost = cost = cost_of(item.work, self._ledger)
        except ItemFailed as e:
            self.finisher.failed(item, e.error)
            return
        except Exception as e:
            log.exception("preparing an item failed", extra={"job": item.task.job, "index": item.task.index})
            self.finisher.try_again(item, f"{type(e).__name__}: {e}")
            return
        lane = item.lane
        if lane.wants_to_learn(cost):
            lane.learn(cost, self._ledger.token_limit)
        if self._host.up and self._ledger.admit(cost):
            self._start(item)
        else:
            self.waiting.add(item)

    # --- running -----------------------------------------------------------------------------------
    def _start(self, item: Item) -> None:
        self.running.add(item)
        item.run = self._loop.create_task(self._run(item))

    def _start_held(self, item: Item) -> None:
        if self._too_late(item):
            self._ledger.release(item.cost)
            self._loop.call_soon(self.place_free)  # for those that were looked at before the place got free
        else:
            self._start(item)

    async def _run(self, item: Item) -> None:
        item.started_us = now_us()
        work = item.work
        span = None if item.span is None else self._chat_span(item)
        error = "aborted"
        try:
            if item.aborted is not None or work is None:
                raise asyncio.CancelledError
            output = await self._host.engine.run(work)
            crash_point("item-finished")
        except asyncio.CancelledError:
            self._aborted(item)
        except ItemFailed as e:
            error = e.error.type
            self.finisher.failed(item, e.error)
        except EngineDied as e:
            error = "engine_died"
            self._engine_died(item, e)
        except Exception as e:  # noqa: BLE001  (whatever it is, it ends this item's try and nothing else)
            error = type(e).__name__
            extra = {"job": item.task.job, "index": item.task.index, "reason": repr(e)[:300]}
            log.warning("an item raised", extra=extra | {"trace_id": tracing.trace_id(item.traceparent)})
            self.finisher.try_again(item, f"{type(e).__name__}: {e}")
        else:
            if span is not None:
                span.answered(model=self._host.info.model, usage=output.usage, choices=output.choices)
                span = None
            self.finisher.ok(item, output)
        finally:
            if span is not None:
                span.end(error=error)
            self.running.discard(item)
            self._ledger.release(item.cost)
            self.place_free()

    def place_free(self) -> None:
        """Something may fit now: what is held comes first, then more is pulled."""
        if self._host.up and not self.draining:
            self.waiting.start_fitting()
        self.on_free()

    def _chat_span(self, item: Item) -> TraceSpan | None:
        work, info = item.work, self._host.info
        if work is None:
            return None
        return spans.chat_span(
            item.span,
            work.params,
            chat=work.chat,
            engine=info.engine,
            model=info.model,
            max_tokens=work.max_tokens,
        )

    def _aborted(self, item: Item) -> None:
        if item.aborted is Aborted.JOB_CANCELLED:
            self.finisher.let_go(item)
        else:
            self.finisher.give_back(item)

    def _engine_died(self, item: Item, error: EngineDied) -> None:
        """The seam of crash triage: all that was in a dead engine is suspect, and each suspect comes through
        here.

        For now each is tried again with everybody else, and `max_tries` bounds what a poison item can do.
        """
        self._host.died(str(error))
        self.finisher.try_again(item, f"the engine died while the item was in it: {error}")

    # --- stopping ----------------------------------------------------------------------------------
    def abort(self, item: Item, why: Aborted) -> None:
        """Stop an item that runs or is held. One that has its outcome already keeps it."""
        if item.run is None:
            self.waiting.drop(item)
            self.finisher.let_go(item)
        elif item in self.running:
            item.aborted = why
            if item.started_us:  # else its task has not begun: cancelling it now would skip all of `_run`
                item.run.cancel()

    async def drain(self, grace_s: float) -> None:
        """Give back what has not started, let the rest finish within `grace_s`, hand over what has not."""
        self.draining = True
        self.waiting.give_back_all()
        runs = [item.run for item in self.running if item.run is not None]
        if runs:
            await asyncio.wait(runs, timeout=grace_s)
        left = list(self.running)
        for item in left:
            self.abort(item, Aborted.HANDED_OVER)
        await asyncio.gather(*(item.run for item in left if item.run is not None), return_exceptions=True)
        await self.finisher.drain()
