"""How an item leaves the worker: with an outcome, for another try, back to others, or not at all.

Settling goes on behind the items, in group commits; `unsettled` counts what is on its way, and holds up the
pulling when results cannot be stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from headrace.contracts.messages import ItemError
from headrace.inference_worker.engines.protocol import Output
from headrace.inference_worker.intake import Item
from headrace.inference_worker.lanes import LaneState
from headrace.inference_worker.outcomes import Outcomes
from headrace.inference_worker.retries import LAPSED, LastErrors, RetryPolicy
from headrace.mesh.consumer import Delivery
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.settle import Done, Reject, Settler

log = logging.getLogger("headrace.worker")

GIVE_BACK_S = 0.2
"""Delay of an item that goes back unstarted: long enough that the giver's own pull does not take it at once.
"""


class Finisher:
    """Ends items of one worker. `on_settled` is called after each one: the pulling may go on."""

    def __init__(
        self,
        *,
        outcomes: Outcomes,
        settler: Settler,
        leases: LeaseKeeper,
        max_tries: int,
        retries: RetryPolicy,
    ) -> None:
        self._outcomes = outcomes
        self._settler = settler
        self._leases = leases
        self._max_tries = max_tries
        self._retries = retries
        self._errors = LastErrors()
        self._side: set[asyncio.Task[Any]] = set()
        self.unsettled = 0
        self.done = self.prompt_tokens = self.completion_tokens = 0
        self.on_settled: Callable[[], None] = lambda: None
        self.on_given_back: Callable[[LaneState], None] = lambda _: None

    def ok(self, item: Item, output: Output) -> None:
        """The engine's answer."""
        usage = output.usage
        self.done += 1
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self._errors.take(item.delivery.stream_seq)
        self._settle(item, self._outcomes.ok(item, output))

    def failed(self, item: Item, error: ItemError) -> None:
        """The item itself is wrong or refused: final, and its neighbours go on."""
        self._settle(item, self._outcomes.failed(item, error))

    def try_again(self, item: Item, error: str) -> None:
        """Not the item's own fault, as far as anyone knows: once more after a while, or `dead` if that was
        the last.
        """
        tries = item.delivery.delivered
        if tries >= self._max_tries:
            self._errors.take(item.delivery.stream_seq)
            self._settle(item, self._outcomes.dead(item, tries, error))
            return
        self._errors.remember(item.delivery.stream_seq, error)
        item.end_span("try_again")
        self._settler.nak(item.delivery, self._retries.delay_s(tries))

    def exhausted(self, item: Item) -> bool:
        """Whether the item was delivered more often than it may run; it is then `dead` with its last error."""
        if item.delivery.delivered <= self._max_tries:
            return False
        error = self._errors.take(item.delivery.stream_seq) or LAPSED
        self._settle(item, self._outcomes.dead(item, self._max_tries, error))
        return True

    def give_back(self, item: Item) -> None:
        """Unstarted or unfinished, for another worker."""
        item.end_span("given_back")
        self._settler.nak(item.delivery, GIVE_BACK_S)
        self.on_given_back(item.lane)

    def let_go(self, item: Item) -> None:
        """Its job was cancelled: the purge removed the message, and there is nothing left to settle."""
        item.end_span("job_cancelled")
        self._leases.discard(item.delivery)

    def reject(self, delivery: Delivery, reason: str) -> None:
        """No worker can take these bytes: to the dead letters, whole."""
        task = asyncio.get_running_loop().create_task(self._dead_letter(delivery, reason))
        self._side.add(task)
        task.add_done_callback(self._side.discard)

    async def drain(self) -> None:
        """Return when all that was ended is settled."""
        await asyncio.gather(*self._side, return_exceptions=True)
        await self._settler.drain()

    def _settle(self, item: Item, outcome: Done) -> None:
        self.unsettled += 1
        self._settler.begin(item.delivery, outcome).add_done_callback(partial(self._settled, item))

    def _settled(self, item: Item, future: asyncio.Future[None]) -> None:
        self.unsettled -= 1
        error = None if future.cancelled() else future.exception()
        if error is not None:
            # Its message comes again when the lease lapses, and landing tells the second outcome from the
            # first.
            self._leases.discard(item.delivery)
            log.error("an outcome is not settled", extra={"job": item.task.job, "reason": str(error)[:300]})
        if item.span is not None:
            item.end_span("not_settled" if error else None)
        self.on_settled()

    async def _dead_letter(self, delivery: Delivery, reason: str) -> None:
        self.unsettled += 1
        try:
            await self._settler.settle(delivery, Reject(reason))
        except Exception:
            log.exception("a message could not be dead-lettered", extra={"subject": delivery.subject})
            self._settler.nak(delivery, self._retries.delay_s(delivery.delivered))
        finally:
            self.unsettled -= 1
