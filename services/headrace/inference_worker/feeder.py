"""The pulling side of a worker: one consumer for each lane and shape, asked as `lanes.plan` decides.

What finishes calls `wake`, and one plan is made for each turn of the loop however many finished in it. The
feeder also keeps what it believes of each backlog from going stale: a consumer that is said to have work and
delivers none for two sweeps has been emptied by others (a pull on a backlog is answered within a round trip),
so its pulls no longer count in the budget, and other consumers are asked. The same sweep fits the depth of the
engine's queue to its pace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from headrace.contracts.names import Lane
from headrace.contracts.specs import ConsumerSpec
from headrace.inference_worker.lanes import LaneState, plan
from headrace.inference_worker.ledger import TokenLedger
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer

log = logging.getLogger("headrace.worker")

SWEEP_S: Final = 0.1
"""Far longer than a round trip, far shorter than anything that a person waits for."""

Receive = Callable[[LaneState, Delivery], None]


MOST_LAPSED: Final = 256
"""Redelivered work that is believed to wait behind some that came, at most."""


class _Source:
    __slots__ = ("consumer", "heard", "lapsed", "state")

    def __init__(self, state: LaneState) -> None:
        self.state = state
        self.consumer: PullConsumer | None = None
        self.heard = False
        self.lapsed = 0


class Feeder:
    """Owns the pulls. `may_pull` is asked before each plan: false while the engine is down or settling lags."""

    def __init__(
        self,
        mesh: Mesh,
        specs: Sequence[tuple[Lane, int, ConsumerSpec]],
        ledger: TokenLedger,
        *,
        receive: Receive,
        may_pull: Callable[[], bool],
        longest: int = 0,
        row_tokens: int = 0,
    ) -> None:
        self._mesh = mesh
        self._specs = [spec for _, _, spec in specs]
        self._ledger = ledger
        self._receive = receive
        self._may_pull = may_pull
        self._sources = [
            _Source(_lane_state(lane, shape, ledger, longest, row_tokens)) for lane, shape, _ in specs
        ]
        self._states = [source.state for source in self._sources]
        self._clock = 0.0
        self._planned = False
        self._stopped = True
        self._sweep: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Bind the consumers and open the first pulls."""
        self._stopped = False
        for source, spec in zip(self._sources, self._specs, strict=True):
            received, lost = partial(self._received, source), partial(self._lost, source)
            source.consumer = PullConsumer(self._mesh, spec, received, on_demand_lost=lost)
            await source.consumer.start()
        self.wake()

    async def stop(self) -> None:
        """Ask for nothing more. What the broker sent before it heard of this still arrives; idempotent."""
        self._stopped = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for source in self._sources:
            if source.consumer is not None:
                await source.consumer.stop()

    def wake(self) -> None:
        """Plan once, at the end of this turn of the loop."""
        if not self._planned and not self._stopped:
            self._planned = True
            self._loop.call_soon(self._plan)

    def expect(self, state: LaneState) -> None:
        """A delivery of this consumer went back: work waits, though the broker counts it as delivered."""
        state.pending = max(state.pending, 1 + state.outstanding)
        self.wake()

    def _received(self, source: _Source, delivery: Delivery) -> None:
        source.heard = True
        source.state.pending = delivery.pending
        if delivery.delivered > 1:
            # The broker's count leaves out what goes back to the queue, and leases lapse together: when a worker dies.
            source.lapsed = min(2 * source.lapsed + 1, MOST_LAPSED)
            source.state.pending = max(delivery.pending, source.lapsed)
        else:
            source.lapsed = 0
        self._receive(source.state, delivery)
        self.wake()

    def _lost(self, source: _Source) -> None:
        """Pulls ended without work: expired, so there is none, or gone with a connection, so that nothing is
        known; a probe tells within a round trip.
        """
        source.state.pending = 0
        self.wake()

    def _plan(self) -> None:
        self._planned = False
        if self._stopped or not self._may_pull():
            return
        for source in self._sources:
            if source.consumer is not None:
                source.state.outstanding = source.consumer.outstanding
        decided = plan(self._states, self._ledger, clock=self._clock)
        self._clock = decided.clock
        for i, passed in decided.passes.items():
            self._states[i].passed = passed
        for i, n in decided.asks:
            source = self._sources[i]
            if source.consumer is not None:
                source.heard = True
                source.consumer.ask(n)
        if self._sweep is None and any(state.pending for state in self._states):
            self._sweep = self._loop.call_later(SWEEP_S, self._sweep_once)

    def _sweep_once(self) -> None:
        self._sweep = None
        self._ledger.pace(SWEEP_S)
        emptied = False
        for source in self._sources:
            if source.heard:
                source.heard = False
            elif source.state.pending and source.consumer is not None and source.consumer.outstanding:
                source.state.pending = source.lapsed = 0
                emptied = True
        if emptied:
            self.wake()
        if not self._stopped and any(state.pending for state in self._states):
            self._sweep = self._loop.call_later(SWEEP_S, self._sweep_once)


def _lane_state(lane: Lane, shape: int, ledger: TokenLedger, longest: int, row_tokens: int) -> LaneState:
    """An item of a shape is counted as 2^shape tokens, or as the longest that can run at all; a row as `row_tokens`."""
    upper = min(1 << shape, longest or 1 << shape, ledger.token_limit)
    bound = 0 if shape else min(row_tokens, ledger.token_limit)
    return LaneState(lane=lane, shape=shape, upper=upper, bound=bound)
