"""The ledger as a gateway reads and writes it: a call's records, a budget's head, and all-or-nothing appends.

Each entry of an append carries the last sequence that its subject must have. So whoever writes second is refused by
the broker, and a gateway that was thought dead cannot end a call that another one has taken over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from headrace.contracts import codec
from headrace.contracts.errors import Conflict
from headrace.contracts.ledger import (
    AttemptFailed,
    BudgetHead,
    CallRecord,
    Completed,
    Failed,
    InDoubt,
    Intent,
    Roster,
)
from headrace.gateway.ledger_mark import LedgerMark
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import (
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SUBJECT_SEQUENCE,
    JetStreamError,
    last_message,
    next_message,
)
from headrace.mesh.publisher import MAX_BATCH, store_expecting
from headrace.mesh.wire import OutMessage, header_block

MAX_ENTRIES = MAX_BATCH
"""Entries of one append at most."""
_ENDS = frozenset({Completed, Failed, AttemptFailed, InDoubt})


class Entry(Struct, frozen=True):
    """One record to append, if `expected` is its subject's last sequence (0: there is none)."""

    record: CallRecord | BudgetHead | Roster
    expected: int


class Stored(Struct, frozen=True):
    """The records of one call in their order, and the sequence of the last (0 if there are none)."""

    records: list[CallRecord]
    seq: int


class Head(Struct, frozen=True):
    """A budget's head and its sequence."""

    head: BudgetHead
    seq: int


class Named(Struct, frozen=True):
    """A tenant's list of budgets and its sequence."""

    roster: Roster
    seq: int


class Overtaken(Conflict):
    """An append was refused whole: the subject of one of its entries has a newer record."""

    code = "overtaken"


class Ledger(Protocol):
    """What holds the records. Every method may raise `Unavailable`; of an append that says: not known."""

    async def call(self, tenant: str, call: str) -> Stored:
        """All records of a call."""
        ...

    async def last(self, tenant: str, call: str) -> tuple[CallRecord, int] | None:
        """The last record of a call with its sequence."""
        ...

    async def head(self, tenant: str, budget: str) -> Head | None:
        """A budget as it stands."""
        ...

    async def roster(self, tenant: str) -> Named | None:
        """The budgets of a tenant."""
        ...

    async def append(self, entries: Sequence[Entry]) -> list[int]:
        """Append all entries or none; return their sequences. Raise `Overtaken` if one came too late."""
        ...


class StreamLedger:
    """The ledger in JetStream: one stream, atomic batches.

    With a `mark` nothing is appended to a ledger that went back: `append` raises `WentBack` then.
    """

    def __init__(self, mesh: Mesh, mark: LedgerMark | None = None) -> None:
        self._mesh = mesh
        self._mark = mark
        self._stream = mesh.topology.ledger
        self._headers = {
            schema.name: header_block({codec.SCHEMA_HEADER: schema.name})
            for schema in (codec.CALL_RECORD, codec.BUDGET_HEAD, codec.ROSTER)
        }

    async def call(self, tenant: str, call: str) -> Stored:
        """All records of a call, read one by one: a call has a few."""
        subject = self._mesh.subjects.ledger_call(tenant, call)
        records: list[CallRecord] = []
        seq = 0
        while (found := await next_message(self._mesh, self._stream, subject, seq + 1)) is not None:
            records.append(codec.CALL_RECORD.decode(found.data, found.headers))
            seq = found.sequence
        return Stored(records, seq)

    async def last(self, tenant: str, call: str) -> tuple[CallRecord, int] | None:
        """The last record of a call with its sequence."""
        found = await last_message(self._mesh, self._stream, self._mesh.subjects.ledger_call(tenant, call))
        if found is None:
            return None
        return codec.CALL_RECORD.decode(found.data, found.headers), found.sequence

    async def head(self, tenant: str, budget: str) -> Head | None:
        """A budget as it stands."""
        subject = self._mesh.subjects.ledger_budget(tenant, budget)
        found = await last_message(self._mesh, self._stream, subject)
        if found is None:
            return None
        return Head(codec.BUDGET_HEAD.decode(found.data, found.headers), found.sequence)

    async def roster(self, tenant: str) -> Named | None:
        """The budgets of a tenant."""
        subject = self._mesh.subjects.ledger_roster(tenant)
        found = await last_message(self._mesh, self._stream, subject)
        return (
            None if found is None else Named(codec.ROSTER.decode(found.data, found.headers), found.sequence)
        )

    async def append(self, entries: Sequence[Entry]) -> list[int]:
        """One atomic batch; its messages have sequences that follow one another."""
        if self._mark is not None:
            await self._mark.sure()
        members = [(self._message(e), e.expected) for e in entries]
        try:
            ack = await store_expecting(self._mesh, self._stream, members)
        except JetStreamError as e:
            if e.err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE):
                msg = f"{len(entries)} records are not written: one of them came too late"
                raise Overtaken(msg) from None
            raise
        if self._mark is not None:
            self._mark.wrote(ack.seq)
        kinds = {type(e.record) for e in entries}
        if Intent in kinds:
            crash_point("intent-stored")
        if kinds & _ENDS:
            crash_point("end-stored")
        return list(range(ack.seq - len(entries) + 1, ack.seq + 1))

    def _message(self, entry: Entry) -> OutMessage:
        record, subjects = entry.record, self._mesh.subjects
        if isinstance(record, BudgetHead):
            subject = subjects.ledger_budget(record.tenant, record.budget)
            return OutMessage(
                subject, codec.BUDGET_HEAD.encode(record), self._headers[codec.BUDGET_HEAD.name]
            )
        if isinstance(record, Roster):
            subject = subjects.ledger_roster(record.tenant)
            return OutMessage(subject, codec.ROSTER.encode(record), self._headers[codec.ROSTER.name])
        subject = subjects.ledger_call(record.tenant, record.call)
        return OutMessage(subject, codec.CALL_RECORD.encode(record), self._headers[codec.CALL_RECORD.name])
