"""The inference worker as a service: its start and its stop, each a list of steps."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headrace.contracts.messages import FunctionSpec
from headrace.contracts.names import Lane
from headrace.contracts.specs import ConsumerSpec
from headrace.inference_worker.cancellation import CancellationWatch
from headrace.inference_worker.engine_host import EngineHost
from headrace.inference_worker.engines.protocol import Engine
from headrace.inference_worker.engines.registry import EngineOptions, create_engine
from headrace.inference_worker.feeder import Feeder
from headrace.inference_worker.finishing import Finisher
from headrace.inference_worker.flight import FlightRecorder
from headrace.inference_worker.large_results import LargeResults
from headrace.inference_worker.ledger import TokenLedger
from headrace.inference_worker.outcomes import Outcomes
from headrace.inference_worker.prompts import Prompts
from headrace.inference_worker.pulse import Pulse
from headrace.inference_worker.registration import ensure_function, spec_of
from headrace.inference_worker.reports import Reporter
from headrace.inference_worker.retries import RetryPolicy
from headrace.inference_worker.runner import Runner
from headrace.inference_worker.wreckage import take_over
from headrace.mesh.checks.start import check_leases, check_start
from headrace.mesh.connection import Mesh
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.service import Service
from headrace.mesh.settings import Settings, WorkerSettings
from headrace.mesh.settle import Settler
from headrace.mesh.suspects import SuspectBook

EngineFactory = Callable[[WorkerSettings], Engine]
"""Makes the engine of a worker. A function over rows is hosted the same way: an `Engine` whose `run` answers
with `Output(value=...)` and that takes rows only is all that a worker needs to serve it (`engines/functions.py`).
"""

UNSETTLED_PER_SLOT: Final = 4
UNSETTLED: Final = (1_000, 4_000)
"""Finished items on their way to the stream at which pulling stops: four for each slot, within these bounds.
Two to eight group commits are enough to keep the broker busy; more is memory.
"""


class WorkerService(Service):
    """Pulls tasks of one function when its engine has room, runs them, publishes results, then acks.

    Start: connect; record what a dead process left; load the model; register the function, or check the registered
    one; hold leases; bind the consumers and pull. Stop:

    1. stop pulling
    2. give back what has not started
    3. let running items finish within `grace_s`, leases renewed, and hand over those that do not
    4. settle what is finished: results stored, acks confirmed
    5. stop the engine, then the leases, then close the connection and the flight recorder
    """

    name = "worker"

    def __init__(self, settings: Settings, engine_factory: EngineFactory | None = None) -> None:
        super().__init__(settings)
        factory = engine_factory or engine_of
        self.worker = settings.worker.name or worker_name()
        self.host = EngineHost(lambda: factory(settings.worker))
        self.leases = LeaseKeeper(settings, self.worker)
        self.runner: Runner | None = None
        self.feeder: Feeder | None = None
        self.reporter: Reporter | None = None
        self.recorder: FlightRecorder | None = None
        self.pulse = Pulse(settings.worker.token_timeout_s)
        self._unsettled_limit = UNSETTLED[0]

    async def on_start(self) -> None:
        """Load the model, then take work."""
        settings, mesh = self.settings, self.mesh
        await check_start(mesh, (mesh.topology.tasks, mesh.topology.results))
        book = SuspectBook(mesh)
        # Before the model is loaded: what the dead one held goes to others as soon as its leases lapse.
        await take_over(Path(settings.dir), book)
        await self.host.start()
        info = self.host.info
        spec = await ensure_function(mesh, spec_of(settings.worker.function, info))
        await self.leases.start()
        ledger = TokenLedger.of_engine(
            info, high_water=settings.worker.high_water, low_water=settings.worker.low_water
        )
        least, most = UNSETTLED
        self._unsettled_limit = min(most, max(least, UNSETTLED_PER_SLOT * ledger.slot_limit))
        finisher = Finisher(
            outcomes=Outcomes(mesh, self.worker, info),
            settler=Settler(mesh, self.leases),
            leases=self.leases,
            book=book,
            large=LargeResults(mesh),
            worker=self.worker,
            max_tries=settings.max_tries,
            retries=RetryPolicy(),
        )
        self.recorder = FlightRecorder.create(Path(settings.dir), self.worker, seats=2 * ledger.slot_limit)
        runner = self.runner = Runner(
            host=self.host,
            ledger=ledger,
            spec=spec,
            finisher=finisher,
            prompts=Prompts(mesh, finisher),
            leases=self.leases,
            book=book,
            recorder=self.recorder,
            worker=self.worker,
            max_tries=settings.max_tries,
        )
        feeder = self.feeder = Feeder(
            mesh,
            consumers_of(mesh, spec),
            ledger,
            receive=runner.receive,
            may_pull=self._may_pull,
            longest=info.max_model_len or spec.max_model_len,
            row_tokens=info.row_tokens,
        )
        self.reporter = Reporter(
            mesh, worker=self.worker, function=spec.name, host=self.host, ledger=ledger, runner=runner
        )
        runner.on_free = finisher.on_settled = feeder.wake
        finisher.on_given_back = feeder.expect
        self.host.on_up = runner.place_free
        self.host.on_died = runner.trouble.engine_died
        self.pulse.start()
        self.spawn(self.host.keep_alive(), "engine")
        watchdog = self.host.watch_tokens(settings.worker.token_timeout_s, lambda: len(runner.running))
        self.spawn(watchdog, "watchdog")
        self.spawn(CancellationWatch(mesh, runner).run(), "cancellations")
        self.spawn(self.reporter.run(), "reports")
        self.spawn(self.leases.watch(), "leases")
        await feeder.start()
        consumers = [consumer for _, _, consumer in consumers_of(mesh, spec)]
        self.spawn(check_leases(mesh, consumers, ledger.slot_limit, self.worker), "lease check")

    async def on_drain(self) -> None:
        """Steps 1 to 4 of a stop."""
        if self.runner is not None:
            self.runner.draining = True  # what the broker has sent already goes back as well
        if self.feeder is not None:
            await self.feeder.stop()
        if self.runner is not None:
            await self.runner.drain(self.settings.grace_s)
        if self.reporter is not None:
            await self.reporter.send()

    async def on_stop(self) -> None:
        """Step 5 of a stop."""
        self.pulse.stop()
        if self.feeder is not None:
            await self.feeder.stop()
        await self.host.stop()
        await self.leases.stop()
        if self.recorder is not None:
            self.recorder.close()

    def _may_pull(self) -> bool:
        """Results that cannot be stored (a full stream) hold up the pulling, and so the whole worker; so do items
        that run apart.
        """
        return (
            self.host.up
            and self.runner is not None
            and not self.runner.apart.busy
            and self.runner.finisher.unsettled < self._unsettled_limit
            and not self.runner.finisher.large.is_full
        )


def consumers_of(mesh: Mesh, spec: FunctionSpec) -> list[tuple[Lane, int, ConsumerSpec]]:
    """Every consumer of a function with its lane and shape, urgent first."""
    return [
        (lane, shape, mesh.topology.task_consumer(spec.name, lane, shape))
        for lane in Lane
        if lane in spec.lanes
        for shape in spec.shapes()
    ]


def engine_of(settings: WorkerSettings) -> Engine:
    """The engine that the settings name."""
    options = EngineOptions(
        model=settings.model,
        slots=settings.slots or None,
        context=settings.context or None,
        threads=settings.threads or None,
        extra=settings.engine_options,
    )
    return create_engine(settings.engine, options)


def worker_name() -> str:
    """`<host>-<pid>-<random>`: readable, and unique over restarts and containers that share both."""
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:64].strip("-") or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
