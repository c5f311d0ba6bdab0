"""The calls of the ledger that have no end yet, followed as the ledger grows."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from headrace.contracts import codec
from headrace.contracts.account import CallView, advance
from headrace.contracts.ledger import Failed
from headrace.mesh.connection import Mesh
from headrace.mesh.tail import tail


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

    async def follow(self, last_seq: int) -> None:
        """Follow the ledger for ever; `last_seq` is where it ended when this began."""
        if last_seq == 0:
            self.caught_up.set()
        filter_ = f"{self._mesh.subjects.prefix}.ledger.>"
        async for batch in tail(self._mesh, self._mesh.topology.ledger, filter_):
            for message in batch:
                if ".ledger.call." in message.subject:
                    self._take(message.data, message.headers, message.sequence)
            if batch[-1].sequence >= last_seq:
                self.caught_up.set()

    def _take(self, data: bytes, headers: dict[str, str], seq: int) -> None:
        record = codec.CALL_RECORD.decode(data, headers)
        key = (record.tenant, record.call)
        before = self.calls.pop(key, None)
        view = advance(before.view if before else self._resting.pop(key, None), record)
        if not view.terminal or any(a.held for a in view.attempts):
            self.calls[key] = OpenCall(view, seq)
        elif isinstance(view.last.end, Failed) and view.last.end.retryable:
            self._resting[key] = view
