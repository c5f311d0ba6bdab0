"""A ledger in memory with the broker's own rule, compare-and-set on each subject, and the broker's own failures.

Not a stand-in for the broker in tests of services: it lets thousands of histories run where a stream would allow a few.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.contracts.errors import Unavailable
from headrace.contracts.ledger import BudgetHead, CallRecord, Roster
from headrace.gateway.ledger import Entry, Head, Named, Overtaken, Stored

Record = CallRecord | BudgetHead | Roster


def subject_of(record: Record) -> tuple[str, str, str]:
    if isinstance(record, Roster):
        return ("roster", record.tenant, "")
    if isinstance(record, BudgetHead):
        return ("budget", record.tenant, record.budget)
    return ("call", record.tenant, record.call)


class MemoryLedger:
    """Records in one list; `trouble` is asked before and after each append, and may say that the answer is lost."""

    def __init__(self) -> None:
        self.log: list[Record] = []
        self.batches: list[int] = []
        """The length of the log after each batch."""
        self.trouble: Callable[[], str] = lambda: ""
        self._last: dict[tuple[str, str, str], int] = {}

    async def call(self, tenant: str, call: str) -> Stored:
        await asyncio.sleep(0)
        records = [
            r
            for r in self.log
            if not isinstance(r, BudgetHead | Roster) and (r.tenant, r.call) == (tenant, call)
        ]
        return Stored(records, self._last.get(("call", tenant, call), 0))

    async def last(self, tenant: str, call: str) -> tuple[CallRecord, int] | None:
        stored = await self.call(tenant, call)
        return (stored.records[-1], stored.seq) if stored.records else None

    async def head(self, tenant: str, budget: str) -> Head | None:
        await asyncio.sleep(0)
        seq = self._last.get(("budget", tenant, budget), 0)
        found = self.log[seq - 1] if seq else None
        return Head(found, seq) if isinstance(found, BudgetHead) else None

    async def roster(self, tenant: str) -> Named | None:
        await asyncio.sleep(0)
        seq = self._last.get(("roster", tenant, ""), 0)
        found = self.log[seq - 1] if seq else None
        return Named(found, seq) if isinstance(found, Roster) else None

    async def append(self, entries: Sequence[Entry]) -> list[int]:
        trouble = self.trouble()
        await asyncio.sleep(0)
        if trouble == "away":
            msg = "nothing was sent"
            raise Unavailable(msg)
        subjects = [subject_of(e.record) for e in entries]
        # The broker takes a subject once a batch: a second entry comes too late, whatever it expects.
        if len(set(subjects)) < len(subjects) or any(
            self._last.get(s, 0) != e.expected for s, e in zip(subjects, entries, strict=True)
        ):
            msg = "one came too late"
            raise Overtaken(msg)
        for entry in entries:
            self.log.append(entry.record)
            self._last[subject_of(entry.record)] = len(self.log)
        self.batches.append(len(self.log))
        seqs = list(range(len(self.log) - len(entries) + 1, len(self.log) + 1))
        await asyncio.sleep(0)
        if trouble == "ack lost":
            msg = "the answer is lost"
            raise Unavailable(msg)
        return seqs
