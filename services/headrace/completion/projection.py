"""From the ledger into the data plane: every record once, whatever is delivered how often; and all of it anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from headrace.completion import ledger_rows
from headrace.completion.ledger_rows import Numbered
from headrace.completion.patience import renewed, write_patiently
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, Undecodable
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer, Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.settle import Reject, Settler
from headrace.mesh.tail import read_all

log = logging.getLogger("headrace.completion")

BATCH = 2_000


class Rebuilt(Struct, frozen=True, kw_only=True):
    """What a rebuild found: `identical` if the tables had been exactly what the stream says."""

    records: int
    identical: bool
    tables: dict[str, bool]


class Projection:
    """Projects the ledger until it is stopped."""

    def __init__(self, mesh: Mesh, store: Store, settler: Settler) -> None:
        self._mesh = mesh
        self._store = store
        self._settler = settler
        self._rebuilding = asyncio.Lock()
        self._consumer = BatchConsumer(mesh, mesh.topology.ledger_consumer(), batch=BATCH, wait_s=0.02)

    async def run(self) -> None:
        """Project for ever; after `stop`, project and ack what is in hand, then return."""
        await self._consumer.start()
        async for batch in self._consumer:
            try:
                async with renewed(self._mesh, batch):
                    await self._take(batch)
            except* HeadraceError as e:
                extra = {"records": len(batch), "reason": str(e.exceptions[0])[:300]}
                log.warning("records of the ledger wait", extra=extra)
            finally:
                self._consumer.release(batch)

    async def stop(self) -> None:
        """Pull no more."""
        await self._consumer.stop()

    async def _take(self, batch: Sequence[Delivery]) -> None:
        records: list[Numbered] = []
        taken: list[Delivery] = []
        for delivery in batch:
            try:
                records.append(decode(delivery.subject, delivery.stream_seq, delivery.data, delivery.headers))
                taken.append(delivery)
            except Undecodable as e:
                await self._settler.settle(delivery, Reject(str(e)))
        if taken:
            await write_patiently(self._store, "the ledger", ledger_rows.insert, records)
            crash_point("projection-committed")
            await self._settler.ack_all(taken)

    async def serve_rebuild(self, _request: dict[str, Any], _headers: Mapping[str, str]) -> Rebuilt:
        """`rebuild`, one at a time, while projecting goes on."""
        async with self._rebuilding:
            return await self.rebuild()

    async def rebuild(self) -> Rebuilt:
        """Read the whole ledger into new tables and put them in place of those in use."""
        await self._store.write(ledger_rows.begin_rebuild)
        count = 0
        filter_ = f"{self._mesh.subjects.prefix}.ledger.>"
        async for batch in read_all(self._mesh, self._mesh.topology.ledger, filter_):
            records: list[Numbered] = []
            for m in batch:
                try:
                    records.append(decode(m.subject, m.sequence, m.data, m.headers))
                except Undecodable as e:
                    log.warning(
                        "a record of the ledger is unreadable",
                        extra={"sequence": m.sequence, "reason": str(e)},
                    )
            await self._store.write(ledger_rows.insert, records, suffix="_new")
            count += len(records)
        crash_point("rebuild-read")
        tables = await self._store.write(ledger_rows.end_rebuild)
        return Rebuilt(records=count, identical=all(tables.values()), tables=tables)


def decode(subject: str, sequence: int, data: bytes, headers: dict[str, str] | None) -> Numbered:
    """A record with its sequence, by the kind that its subject names; raise `Undecodable`."""
    kind = subject.split(".")[2] if subject.count(".") > 1 else ""
    if kind == "budget":
        return sequence, codec.BUDGET_HEAD.decode(data, headers)
    if kind == "roster":
        return sequence, codec.ROSTER.decode(data, headers)
    record = codec.CALL_RECORD.decode(data, headers)
    if not subject.endswith(f".{record.tenant}.{record.call}"):
        msg = "the record names another call than its subject"
        raise Undecodable(msg)
    return sequence, record
