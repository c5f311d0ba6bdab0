"""What completion finds of its own part: the broker's history, room for the database, leases, jobs that stand still.

`hr.api.checks` answers with it, and `headrace doctor` shows it: no other process may open the database, or need be on
its machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

from headrace.completion.marks import Marks
from headrace.completion.store import Connection, Store
from headrace.contracts.api import ChecksReply, ChecksRequest, Finding, LossesReply, LossesRequest, LostData
from headrace.contracts.errors import HeadraceError
from headrace.mesh.checks.consumers import lease_findings
from headrace.mesh.checks.findings import Unread, attempt, ok, some, warn
from headrace.mesh.checks.host import check_files, check_volume
from headrace.mesh.checks.start import log_findings
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import consumer_info

log = logging.getLogger("headrace.completion")

PERIOD_S: Final = 60.0
LAST_LOOK_S: Final = 2.0
STILL_S: Final = 6 * 3_600
"""A job that has not ended and had no outcome for this long is told."""
BATCHES_IN_HAND: Final = 3
"""Batches of results that landing holds at once: one being written, one being acked, one arriving."""

_STILL = """
SELECT job FROM jobs
WHERE ended_at IS NULL AND opened_at < make_timestamp($since)
    AND NOT EXISTS (SELECT 1 FROM outcomes WHERE outcomes.job = jobs.job AND landed_at >= make_timestamp($since))
ORDER BY opened_at"""


class SelfCheck:
    """Completion's own checks, at its start, in its log when they turn, and for who asks."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._mesh = mesh
        self._store = store
        self.marks = Marks(mesh, store)

    async def at_start(self) -> None:
        """Compare the streams with what the last run saw of them, before anything is pulled; log what is not right."""
        await self.marks.look()
        lost = [finding for finding in await self.marks.findings() if finding.state != "ok"]
        log_findings([*lost, *self._volume(), *await self._leases()])

    async def at_stop(self) -> None:
        """Mark the streams as they are left, if the broker is there; within two seconds."""
        if self._mesh.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_LOOK_S):
                    await self.marks.look()

    async def run(self) -> None:
        """Say once when the room for the database becomes little, and once when there is enough again."""
        last = self._volume()[0].state
        while True:
            await asyncio.sleep(PERIOD_S)
            volume = self._volume()
            if volume[0].state != last:
                last = volume[0].state
                log_findings(volume)
                if last == "ok":
                    log.info("there is room again", extra={"found": volume[0].found})

    async def answer(self, request: ChecksRequest) -> ChecksReply:
        """Every finding, after a fresh look at the streams; first the losses that the request accepts."""
        accepted = await self.marks.accept(request.accept_losses) if request.accept_losses else []
        await self.marks.look()
        findings = [
            *await self.marks.findings(),
            *self._volume(),
            *await self._leases(),
            *await self._still(),
        ]
        return ChecksReply(findings=[*findings, check_files("open files of completion")], accepted=accepted)

    async def losses(self, request: LossesRequest) -> LossesReply:
        """What a stream lost and nobody has accepted, after a fresh look."""
        await self.marks.look()
        found = [
            LostData(id=loss.id, stream=loss.stream, found=loss.found)
            for loss in await self.marks.losses()
            if request.stream in (None, loss.stream)
        ]
        return LossesReply(losses=found)

    def _volume(self) -> list[Finding]:
        return [
            check_volume("disk of the data plane", self._store.path, "nothing lands, and then nothing runs")
        ]

    async def _leases(self) -> Sequence[Finding]:
        spec, check = self._mesh.topology.results_consumer(), "leases of completion"
        window = BATCHES_IN_HAND * self._mesh.settings.completion.batch_rows
        try:
            info = await attempt(consumer_info(self._mesh, spec.stream, spec.durable))
        except HeadraceError as e:
            return [warn(check, str(e), "headrace init")]
        if isinstance(info, Unread):
            return [info.finding(check)]
        why = f"landing holds {window:,} (completion.batch_rows × {BATCHES_IN_HAND})"
        return lease_findings(check, [info], window, why) or [ok(check, f"{window:,} results may be in hand")]

    async def _still(self) -> list[Finding]:
        since = time.time_ns() // 1_000 - STILL_S * 1_000_000
        jobs = await self._store.read(_jobs_without_progress, since)
        if not jobs:
            return [ok("jobs that stand still", "none")]
        text = f"{len(jobs):,} have had no outcome for {STILL_S // 3_600} hours: {some(jobs)}"
        return [
            warn("jobs that stand still", text, f"headrace audit {jobs[0]}, or headrace cancel {jobs[0]}")
        ]


def _jobs_without_progress(connection: Connection, since_us: int) -> list[str]:
    return [str(row[0]) for row in connection.execute(_STILL, {"since": since_us}).fetchall()]
