"""What a worker says of itself every second, for `status` and `watch`: never work, never waited for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final, Literal

from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import WorkerReport
from headrace.inference_worker.engine_host import EngineHost
from headrace.inference_worker.intake import now_us
from headrace.inference_worker.ledger import TokenLedger
from headrace.inference_worker.runner import Runner
from headrace.mesh.connection import Mesh
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.worker")

REPORT_S: Final = 1.0
LARGEST: Final = 64

State = Literal["starting", "running", "draining"]


class Reporter:
    """Publishes `WorkerReport`s of one worker under its own key of the workers' bucket."""

    def __init__(
        self, mesh: Mesh, *, worker: str, function: str, host: EngineHost, ledger: TokenLedger, runner: Runner
    ) -> None:
        self._mesh = mesh
        self._worker = worker
        self._function = function
        self._host = host
        self._ledger = ledger
        self._runner = runner
        self._subject = f"$KV.{mesh.topology.workers_bucket}.{worker}"

    async def run(self) -> None:
        """Report for ever."""
        while True:
            await self.send()
            await asyncio.sleep(REPORT_S)

    async def send(self) -> None:
        """One report, now. Without an ack: the next one comes in a second, and old ones expire."""
        if not self._mesh.connected:
            return
        try:
            await self._mesh.publish(OutMessage(self._subject, codec.WORKER_REPORT.encode(self.report())))
        except HeadraceError as e:
            log.debug("report is not sent", extra={"reason": str(e)[:200]})

    def report(self) -> WorkerReport:
        """The figures of this moment; of the jobs the 64 with most items."""
        runner, ledger, info = self._runner, self._ledger, self._host.info
        finisher = runner.finisher
        counts = Counter(item.task.job for item in runner.running)
        largest = dict(counts.most_common(LARGEST))
        oldest: dict[str, int] = {}
        for item in runner.running:
            job = item.task.job
            if job in largest and item.started_us and item.started_us < oldest.get(job, 1 << 62):
                oldest[job] = item.started_us
        state: State = "draining" if runner.draining else "running" if self._host.up else "starting"
        return WorkerReport(
            worker=self._worker,
            function=self._function,
            engine=info.engine,
            model=info.model[:512],
            state=state,
            running=largest,
            oldest=oldest,
            in_flight=ledger.items,
            tokens_in_flight=ledger.tokens,
            capacity_tokens=info.capacity_tokens,
            slots=info.slots,
            done=finisher.done,
            prompt_tokens=finisher.prompt_tokens,
            completion_tokens=finisher.completion_tokens,
            at_us=now_us(),
        )
