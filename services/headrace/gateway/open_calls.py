"""The calls of the ledger that have no end yet, followed as the ledger grows."""

from __future__ import annotations

import asyncio
import logging

from msgspec import Struct

from headrace.contracts.account import CallView, LedgerBroken, advance
from headrace.contracts.errors import Undecodable
from headrace.contracts.ledger import BudgetHead, Failed, Roster
from headrace.contracts.ledger_stream import decode
from headrace.mesh.connection import Mesh
from headrace.mesh.tail import Tailed, read_all, tail

log = logging.getLogger("headrace.gateway")


class OpenCall(Struct, frozen=True):
    """A call without an end, and the sequence of its last record."""

    view: CallView
    seq: int


class OpenCalls:
    """Every call that is open, to be tried again, or in doubt; `caught_up` is set once all that was stored is read.

    Calls that ended for good are forgotten: memory grows with what is open, and not with the ledger.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._resting: dict[tuple[str, str], CallView] = {}
        """Failed calls that their key may try again."""
        self.calls: dict[tuple[str, str], OpenCall] = {}
        self.caught_up = asyncio.Event()

    async def follow(self) -> None:
        """Follow the ledger for ever."""
        at, stream = 1, self._mesh.topology.ledger
        filter_ = f"{self._mesh.subjects.prefix}.ledger.>"
        async for batch in read_all(self._mesh, stream, filter_):
            at = batch[-1].sequence + 1
            self._take_all(batch)
        self.caught_up.set()
        async for batch in tail(self._mesh, stream, filter_, from_seq=at):
            self._take_all(batch)

    def _take_all(self, batch: list[Tailed]) -> None:
        for message in batch:
            if ".ledger.call." not in message.subject:
                continue
            try:
                self._take(message)
            except (LedgerBroken, Undecodable) as e:
                # Nobody decides about such a call any more; `ledger verify` names it, and the others go on.
                log.error("a call's records do not fit together", extra={"reason": str(e)[:300]})  # noqa: TRY400

    def _take(self, message: Tailed) -> None:
        record = decode(message.subject, message.data, message.headers)
        if isinstance(record, BudgetHead | Roster):
            return
        key, seq = (record.tenant, record.call), message.sequence
        before = self.calls.pop(key, None)
        view = advance(before.view if before else self._resting.pop(key, None), record)
        if not view.terminal or any(a.held for a in view.attempts):
            self.calls[key] = OpenCall(view, seq)
        elif isinstance(view.last.end, Failed) and view.last.end.retryable:
            self._resting[key] = view
