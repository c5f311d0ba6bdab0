"""How an item leaves the worker: with an outcome, for another try, back to others, or not at all.

Settling goes on behind the items, in group commits; `unsettled` counts what is on its way, and holds up the
pulling when results cannot be stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from msgspec import structs

from headrace.contracts.errors import Refused
from headrace.contracts.messages import ItemError
from headrace.contracts.suspects import Suspect
from headrace.inference_worker.engines.protocol import Output
from headrace.inference_worker.incidents import is_suspect, storable
from headrace.inference_worker.intake import Item, now_us
from headrace.inference_worker.lanes import LaneState
from headrace.inference_worker.large_results import LargeResults
from headrace.inference_worker.outcomes import LargeResult, Outcomes
from headrace.inference_worker.retries import LAPSED, RetryPolicy
from headrace.mesh.consumer import Delivery
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.settle import Done, Reject, Settler
from headrace.mesh.suspects import SuspectBook

log = logging.getLogger("headrace.worker")

GIVE_BACK_S = 0.2
"""Delay of an item that goes back unstarted: long enough that the giver's own pull does not take it at once.
"""
PATIENCE: Final = 4
"""How many times more often than others a suspect may be delivered before it is given up without a run."""


class Finisher:
    """Ends items of one worker. `on_settled` is called after each one: the pulling may go on."""

    def __init__(
        self,
        *,
        outcomes: Outcomes,
        settler: Settler,
        leases: LeaseKeeper,
        book: SuspectBook,
        large: LargeResults,
        worker: str,
        max_tries: int,
        retries: RetryPolicy,
    ) -> None:
        self._outcomes = outcomes
        self._settler = settler
        self._leases = leases
        self._book = book
        self.large = large
        self._worker = worker
        self._max_tries = max_tries
        self._retries = retries
        self._side: set[asyncio.Task[Any]] = set()
        self.unsettled = 0
        self.done = self.prompt_tokens = self.completion_tokens = 0
        self.on_settled: Callable[[], None] = lambda: None
        self.on_given_back: Callable[[LaneState], None] = lambda _: None
        self.on_left: Callable[[Item], None] = lambda _: None
        """Called with each item that is settled or gone: its prompt is needed no more."""

    def ok(self, item: Item, output: Output) -> None:
        """The engine's answer."""
        usage = output.usage
        self.done += 1
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        outcome = self._outcomes.ok(item, output)
        if isinstance(outcome, LargeResult):
            self.on_left(item)
            self._aside(self._settle_large(item, outcome))
        else:
            self._settle(item, outcome)

    def failed(self, item: Item, error: ItemError) -> None:
        """The item itself is wrong or refused: final, and its neighbours go on."""
        self._settle(item, self._outcomes.failed(item, error))

    def poison(self, item: Item, record: Suspect) -> None:
        """Engines died of it, as its record says: final."""
        self._settle(item, self._outcomes.poison(item, record))

    def try_again(self, item: Item, error: str) -> None:
        """Not the item's own fault, as far as anyone knows: once more after a while, or `dead` if that was
        the last. The error is kept where the worker that ends the item finds it.
        """
        if self._was_last_try(item, error):
            return
        known = item.record or Suspect(stored_us=item.delivery.timestamp_us)
        noted = structs.replace(known, error=storable(error), worker=self._worker, at_us=now_us())
        self._book.note(item.delivery.stream_seq, noted)
        item.end_span("try_again")
        self.on_left(item)
        self._settler.nak(item.delivery, self.delay_s(item))

    def back_as_suspect(self, item: Item, error: str, delay_s: float) -> None:
        """Its engine died, as its record says: delivered again after `delay_s`, or `dead` if that was its last try."""
        if self._was_last_try(item, error):
            return
        item.end_span("engine_died")
        self.on_left(item)
        self._settler.nak(item.delivery, delay_s)
        self.on_given_back(item.lane)

    def delay_s(self, item: Item) -> float:
        """Seconds until the item's next try."""
        return self._retries.delay_s(item.delivery.delivered)

    def _was_last_try(self, item: Item, error: str) -> bool:
        tries = item.delivery.delivered
        if tries < self._max_tries:
            return False
        self._settle(item, self._outcomes.dead(item, tries, error))
        return True

    def exhausted(self, item: Item) -> bool:
        """Whether the item was delivered more often than it may run; it is then `dead` with its last error.

        A suspect may wait for its turn while others end the process around it, which costs it deliveries and no run.
        """
        limit = self._max_tries * (PATIENCE if is_suspect(item.record) else 1)
        if item.delivery.delivered <= limit:
            return False
        error = item.record.error if item.record is not None else ""
        self._settle(item, self._outcomes.dead(item, item.delivery.delivered - 1, error or LAPSED))
        return True

    def give_back(self, item: Item) -> None:
        """Unstarted or unfinished, for another worker."""
        item.end_span("given_back")
        self.on_left(item)
        self._settler.nak(item.delivery, GIVE_BACK_S)
        self.on_given_back(item.lane)

    def let_go(self, item: Item) -> None:
        """Its job was cancelled: the purge removed the message, and there is nothing left to settle."""
        item.end_span("job_cancelled")
        self.on_left(item)
        self._leases.discard(item.delivery)

    def reject(self, delivery: Delivery, reason: str) -> None:
        """No worker can take these bytes: to the dead letters, whole."""
        self._aside(self._dead_letter(delivery, reason))

    async def drain(self) -> None:
        """Return when all that was ended is settled."""
        await asyncio.gather(*self._side, return_exceptions=True)
        await self._settler.drain()

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._side.add(task)
        task.add_done_callback(self._side.discard)

    async def _settle_large(self, item: Item, result: LargeResult) -> None:
        """The object first: whoever reads the message finds it."""
        self.unsettled += 1
        try:
            blob = await self.large.store(item.task.key, result.data)
            self._settle(item, self._outcomes.by_reference(item, result, blob))
        except Refused as e:
            self.failed(item, ItemError(type="result_too_large", message=str(e)))
        except Exception:
            self._leases.discard(
                item.delivery
            )  # the connection is closed for good: the item comes again elsewhere
            log.exception("a large result is not stored", extra={"job": item.task.job})
        finally:
            self.unsettled -= 1

    def _settle(self, item: Item, outcome: Done) -> None:
        self.on_left(item)
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
