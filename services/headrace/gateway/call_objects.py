"""Sweeping objects of calls that no record names: what a gateway left that died between an object and its record."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Final

from headrace.contracts.account import CallView, view_of
from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import Completed, Evidence
from headrace.contracts.objects import call_of
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.ledger import Ledger
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh

log = logging.getLogger("headrace.gateway")

SWEEP_S: Final = 600.0


class CallObjects:
    """Sweeps for one gateway; any number may do so at once."""

    def __init__(self, mesh: Mesh, ledger: Ledger, evidence: EvidenceStream) -> None:
        self._objects = BlobStore(mesh)
        self._ledger = ledger
        self._evidence = evidence
        self._named: set[str] = set()
        """Objects that a record names: records stay, and so do these."""
        self._without: set[str] = set()
        """Objects of calls without a record, as the last sweep saw them."""

    async def sweep_for_ever(self) -> None:
        """Sweep at the start, and now and then."""
        while True:
            try:
                await self.sweep()
            except HeadraceError as e:
                log.warning("objects of calls stay for now", extra={"reason": str(e)[:200]})
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> int:
        """Remove the objects that nothing names of calls that have ended; return how many.

        The names are read before the records: what is stored after that is not among them. A call without an end may
        still name what it has stored, and one that waits for approval has no record yet.
        """
        by_call: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name in await self._objects.names():
            key = call_of(name)
            if key is not None and name not in self._named:
                by_call[key].append(name)
        left: list[str] = []
        before, self._without = self._without, set()
        for (tenant, call), names in by_call.items():
            view = view_of((await self._ledger.call(tenant, call)).records)
            if view is not None and not view.terminal:
                continue
            named = named_by(view, await self._evidence.of(tenant, call))
            if view is None:  # it may be about to be made; if it is not by the next sweep, it was refused
                unnamed = {name for name in names if name not in named}
                self._without |= unnamed - before
                left += unnamed & before
                continue
            self._named.update(name for name in names if name in named)
            left += [name for name in names if name not in named]
        await self._objects.delete_all(left)
        if left:
            log.info("objects that no record names are removed", extra={"objects": len(left)})
        return len(left)


def named_by(view: CallView | None, evidence: list[Evidence]) -> set[str]:
    """The objects that a call's records and its evidence name."""
    attempts = view.attempts if view else ()
    blobs = [a.intent.request.body for a in attempts]
    blobs += [a.end.outcome.blob for a in attempts if isinstance(a.end, Completed)]
    blobs += [e.outcome.blob for e in evidence if e.outcome]
    blobs += [e.request.body for e in evidence if e.request]
    return {blob.name for blob in blobs if blob is not None}
