"""What happens to each delivery: checked, admitted or held, run, ended.

Each item is one asyncio task from its start in the engine to its outcome. A first delivery waits for nothing but the
engine; a redelivered one is looked up before, in case that an engine died of it, and a large prompt is fetched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.contracts.errors import Undecodable
from headrace.contracts.messages import BlobPrompt, FunctionSpec, ItemError
from headrace.inference_worker.apart import Apart
from headrace.inference_worker.engine_host import EngineHost
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed
from headrace.inference_worker.finishing import Finisher
from headrace.inference_worker.flight import FlightRecorder
from headrace.inference_worker.incidents import is_convicted
from headrace.inference_worker.intake import Aborted, Item, cost_of, decode, now_us, resolve
from headrace.inference_worker.lanes import LaneState
from headrace.inference_worker.ledger import Cost, TokenLedger
from headrace.inference_worker.prompts import Prompts
from headrace.inference_worker.triage import Triage
from headrace.inference_worker.trouble import Trouble
from headrace.inference_worker.waiting import Waiting
from headrace.mesh import spans, tracing
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.suspects import SuspectBook
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
        prompts: Prompts,
        leases: LeaseKeeper,
        book: SuspectBook,
        recorder: FlightRecorder | None,
        worker: str,
        max_tries: int,
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._spec = spec
        self._leases = leases
        self._worker = worker
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._asking: dict[Item, asyncio.Task[None]] = {}
        self.finisher = finisher
        self.prompts = prompts
        self.waiting = Waiting(ledger, start=self._start_held, give_back=self._give_back)
        self.triage = Triage(
            book=book,
            finisher=finisher,
            worker=worker,
            max_tries=max_tries,
            abort=self.abort,
            on_convicted=host.cause_found,
        )
        self.apart = Apart(
            must=lambda item: item.alone or self.triage.must_run_apart(item),
            is_free=self._is_free,
            is_cleared=self.triage.is_cleared,
            release=self._admit,
            run=self._run_alone,
            resume=self.place_free,
        )
        self.running: set[Item] = set()
        self.trouble = Trouble(
            host=host, finisher=finisher, triage=self.triage, running=self.running, hold=self._hold
        )
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
        elif delivery.delivered > 1 or isinstance(task.prompt, BlobPrompt):
            self._asking[item] = self._loop.create_task(self._before_admission(item))
        else:
            self._consider(item)

    async def _before_admission(self, item: Item) -> None:
        """What has to be asked first. The item counts as held meanwhile, by what its shape says."""
        estimate = Cost(item.lane.bound, item.lane.width)
        self._ledger.hold(estimate)
        try:
            if item.delivery.delivered > 1:
                await self._look_up(item)
            stays = is_convicted(item.record) or await self.prompts.fetch(item)
        finally:
            self._ledger.unhold(estimate)
            self._asking.pop(item, None)
            self.on_free()  # while something is held, less is asked for
            self.apart.look()
        if not stays:
            return
        if self.draining:
            self.finisher.give_back(item)
        else:
            self._consider(item)

    async def _look_up(self, item: Item) -> None:
        try:
            await self.triage.look_up(item)
        except Exception:
            # An item that is left here would keep its lease and never run.
            log.exception("looking an item up failed", extra={"job": item.task.job, "index": item.task.index})

    def _consider(self, item: Item) -> None:
        if is_convicted(item.record):
            self.triage.convict(item)
        elif self.finisher.exhausted(item) or self._too_late(item):
            return
        elif self.triage.must_run_apart(item):
            self.apart.add(item)
        else:
            self._admit(item)

    def _too_late(self, item: Item) -> bool:
        deadline_us = item.task.deadline_us
        if deadline_us is None or (late_us := now_us() - deadline_us) <= 0:
            return False
        message = f"the deadline passed {late_us / 1e6:.1f} s before the item could start"
        self.finisher.failed(item, ItemError(type="deadline", message=message))
        return True

    def _admit(self, item: Item) -> None:
        if not self._prepare(item):
            return
        if self._host.up and not self.apart.on_trial and self._ledger.admit(item.cost):
            self._start(item)
        else:
            self.waiting.add(item)

    def _prepare(self, item: Item) -> bool:
        """Fill in work and cost; false if that was the item's end."""
        engine = self._host.engine
        try:
            item.work = resolve(item, engine, self._spec)
            item.cost = cost = cost_of(item.work, self._ledger)
        except ItemFailed as e:
            self.finisher.failed(item, e.error)
            return False
        except EngineDied as e:
            self.trouble.died_preparing(item, engine, e)
            return False
        except Exception as e:
            log.exception("preparing an item failed", extra={"job": item.task.job, "index": item.task.index})
            self.finisher.try_again(item, f"{type(e).__name__}: {e}")
            return False
        lane = item.lane
        if lane.wants_to_learn(cost):
            lane.learn(cost, self._ledger.token_limit)
        return True

    # --- running -----------------------------------------------------------------------------------
    def _start(self, item: Item) -> None:
        item.started_us = 0
        self.running.add(item)
        item.run = self._loop.create_task(self._run(item))

    def _give_back(self, item: Item) -> None:
        self.finisher.give_back(item)
        self.apart.look()

    def _hold(self, item: Item) -> None:
        """Keep an item that was started and has to wait again."""
        if self.draining:
            self.finisher.give_back(item)
        elif item.alone:
            self.apart.add(item)
        else:
            self.waiting.add(item)

    def _start_held(self, item: Item) -> None:
        if self._too_late(item):
            self._ledger.release(item.cost)
            self._loop.call_soon(self.place_free)  # for those that were looked at before the place got free
        else:
            self._start(item)

    def _is_free(self) -> bool:
        return self._host.up and not (self.running or self._ledger.items or self.waiting or self._asking)

    async def _run_alone(self, item: Item) -> None:
        item.alone = True
        if self.draining:
            self.finisher.give_back(item)
        elif not self._too_late(item) and self._prepare(item):
            self._ledger.admit(item.cost)  # the engine is empty, so it fits
            self._start(item)
            if item.run is not None:
                await asyncio.wait([item.run])

    async def _run(self, item: Item) -> None:
        item.started_us = now_us()
        work, engine = item.work, self._host.engine
        span = None if item.span is None else self._chat_span(item)
        error, suspect = "aborted", False
        try:
            if item.aborted is not None or work is None:
                raise asyncio.CancelledError
            if self._recorder is not None:
                delivery = item.delivery
                item.seat = self._recorder.enter(delivery.stream_seq, delivery.timestamp_us, item.started_us)
            output = await engine.run(work)
            crash_point("item-finished")
        except asyncio.CancelledError:
            suspect = self._aborted(item)
        except Exception as e:  # noqa: BLE001  (whatever it is, it ends this item's try and nothing else)
            error, suspect = self.trouble.raised(item, engine, e)
        else:
            if span is not None:
                span.answered(model=self._host.info.model, usage=output.usage, choices=output.choices)
                span = None
            self.finisher.ok(item, output)
        finally:
            if span is not None:
                span.end(error=error)
            if self._recorder is not None:
                self._recorder.leave(item.seat)
                item.seat = -1
            self.running.discard(item)
            self._ledger.release(item.cost)
            if item.incident is not None:
                self.triage.left(item, suspect=suspect)
            self.place_free()

    def place_free(self) -> None:
        """Something may fit now: what is held comes first, then more is pulled."""
        if self._host.up and not self.draining and not self.apart.on_trial:
            self.waiting.start_fitting()
        self.apart.look()
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

    def _aborted(self, item: Item) -> bool:
        """End a stopped item, or return whether it is a suspect."""
        if item.aborted is Aborted.JOB_CANCELLED:
            self.finisher.let_go(item)
        elif item.incident is not None:
            return True
        else:
            self.finisher.give_back(item)
        return False

    # --- stopping ----------------------------------------------------------------------------------
    def held(self) -> list[Item]:
        """Every item that is here and has no outcome yet, in the engine or before it."""
        return [*self.running, *self.waiting.items(), *self.apart.items(), *self._asking]

    def abort(self, item: Item, why: Aborted) -> None:
        """Stop an item that runs or is held. One that has its outcome already keeps it."""
        if item in self.running:
            item.aborted = why
            if item.run is not None and item.started_us:
                item.run.cancel()  # else its task has not begun: cancelling it would skip all of `_run`
            return
        if asking := self._asking.pop(item, None):
            asking.cancel()
        elif item in self.apart:
            self.apart.drop(item)
        elif item in self.waiting:
            self.waiting.drop(item)
        else:
            return
        self.finisher.let_go(item)

    async def drain(self, grace_s: float) -> None:
        """Give back what has not started, let the rest finish within `grace_s`, hand over what has not."""
        self.draining = True
        self.waiting.give_back_all()
        for item in self.apart.take_all():
            self.finisher.give_back(item)
        self.prompts.stop()
        if self._asking:
            await asyncio.wait(list(self._asking.values()))
        runs = [item.run for item in self.running if item.run is not None]
        if runs:
            await asyncio.wait(runs, timeout=grace_s)
        left = list(self.running)
        for item in left:
            self.abort(item, Aborted.HANDED_OVER)
        await asyncio.gather(*(item.run for item in left if item.run is not None), return_exceptions=True)
        await self.triage.settled()
        await self.finisher.drain()
