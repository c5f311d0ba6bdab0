"""Noticing cancelled jobs: what of them runs is aborted within two seconds.

The purge of a job's subject removes its waiting and leased messages, so nothing is to be settled; what
remains is to stop the engine's work for it. The `cancelled` event is read from the stream of jobs, twice a
second and only while something runs here: one small request for each job, where a push subscription would
bring every event of every job to every worker.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from headrace.contracts.errors import HeadraceError
from headrace.inference_worker.intake import Aborted, Item
from headrace.inference_worker.runner import Runner
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import last_message

log = logging.getLogger("headrace.worker")

POLL_S: Final = 0.5
JOBS_A_ROUND: Final = 64
"""Asked in one round; with more jobs at once the rounds go on where the last one ended."""
REMEMBERED: Final = 10_000


class CancellationWatch:
    """Side task that asks about the jobs of running and held items, and aborts those of cancelled ones."""

    def __init__(self, mesh: Mesh, runner: Runner) -> None:
        self._mesh = mesh
        self._runner = runner
        self._after = ""

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            jobs = self._by_job()
            if jobs:
                await self._round(jobs)

    def _by_job(self) -> dict[str, list[Item]]:
        jobs: dict[str, list[Item]] = {}
        for item in self._runner.held():
            jobs.setdefault(item.task.job, []).append(item)
        return jobs

    async def _round(self, jobs: dict[str, list[Item]]) -> None:
        names = sorted(jobs)
        first = next((i for i, name in enumerate(names) if name > self._after), 0)
        names = (names[first:] + names[:first])[:JOBS_A_ROUND]
        self._after = names[-1]
        for job, cancelled in zip(names, await asyncio.gather(*map(self._is_cancelled, names)), strict=True):
            if cancelled:
                self._cancel(job)

    async def _is_cancelled(self, job: str) -> bool:
        try:
            subject = self._mesh.subjects.job_event(job, "cancelled")
            return await last_message(self._mesh, self._mesh.topology.jobs, subject) is not None
        except HeadraceError as e:
            # Not known, so it goes on: finishing an item of a cancelled job costs time and nothing else.
            log.debug("cannot ask whether a job is cancelled", extra={"job": job, "reason": str(e)[:200]})
            return False

    def _cancel(self, job: str) -> None:
        known = self._runner.cancelled_jobs
        if len(known) >= REMEMBERED:
            del known[next(iter(known))]
        known[job] = None
        items = self._by_job().get(job, [])
        log.info("job is cancelled", extra={"job": job, "aborted": len(items)})
        for item in items:
            self._runner.abort(item, Aborted.JOB_CANCELLED)
        self._runner.place_free()
