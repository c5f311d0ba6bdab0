"""From the ledger into the data plane: every record once, whatever is delivered how often; and all of it anew.

The ledger is the truth. What a batch brings is committed, then acked, so a crash anywhere brings it again, and a record
that is there already changes nothing. A rebuild reads the ledger from its first record into new tables while projecting
goes on into both, and puts them in place in one transaction: whenever it is killed, the tables in use are whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from headrace.completion import ledger_rebuild, ledger_rows
from headrace.completion.follower import Follower
from headrace.completion.ledger_rows import Inserted, Numbered
from headrace.completion.patience import write_patiently
from headrace.completion.store import Connection, Store
from headrace.contracts.errors import HeadraceError, InvalidInput, Undecodable
from headrace.contracts.ledger_stream import decode
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import consumer_info, next_message
from headrace.mesh.settle import Reject, Settler
from headrace.mesh.tail import read_all

log = logging.getLogger("headrace.completion")

BATCH = 2_000
NAMED = 10
"""Sequences that a log line names at most."""


class Rebuilt(Struct, frozen=True, kw_only=True):
    """What a rebuild found: `identical` if the tables had been exactly what the ledger says.

    `tables` has for each how many of its rows had not been right, `unreadable` how many messages are no records.
    """

    records: int
    identical: bool
    tables: dict[str, int]
    unreadable: int


class Projection(Follower):
    """Projects the ledger until it is stopped."""

    what = "the ledger"

    def __init__(self, mesh: Mesh, store: Store, settler: Settler) -> None:
        super().__init__(mesh, store, settler, mesh.topology.ledger_consumer(), batch=BATCH, wait_s=0.02)
        self._rebuilding = asyncio.Lock()

    async def run(self) -> None:
        """Project for ever; after `stop`, project and ack what is in hand, then return."""
        await write_patiently(self._store, self.what, ledger_rebuild.drop)
        await super().run()

    async def take(self, batch: Sequence[Delivery]) -> None:
        """Project a batch; what is no record, or cannot be stored, goes to the dead letters."""
        records: list[Numbered] = []
        taken: list[Delivery] = []
        for delivery in batch:
            try:
                record = decode(delivery.subject, delivery.data, delivery.headers)
                records.append((delivery.stream_seq, record))
                taken.append(delivery)
            except Undecodable as e:
                await self._settler.settle(delivery, Reject(str(e)))
        if records:
            stored = await self._project(records)
            crash_point("projection-committed")
            refused = {seq for seq, _ in records} - stored
            for delivery in taken:
                if delivery.stream_seq in refused:
                    await self._settler.settle(delivery, Reject("the data plane cannot take this record"))
            await self._settler.ack_all([d for d in taken if d.stream_seq in stored])

    async def _project(self, records: list[Numbered]) -> set[int]:
        """Commit records, and return the sequences of those that are; halved until what is refused stands alone."""
        try:
            found = await write_patiently(self._store, "the ledger", project, records)
        except InvalidInput as e:
            if len(records) == 1:
                extra = {"sequence": records[0][0], "reason": str(e)[:300]}
                log.error("a record of the ledger is not projected", extra=extra)  # noqa: TRY400  (it says all)
                return set()
            middle = len(records) // 2
            return await self._project(records[:middle]) | await self._project(records[middle:])
        if found.others:
            # They stay: they may be all that is left of what the broker lost, until somebody has looked.
            log.error(
                "the ledger has other records under numbers that it gave before: see `headrace ledger verify`, "
                "then `headrace rebuild`",
                extra={"count": len(found.others), "sequences": found.others[:NAMED]},
            )
        return {seq for seq, _ in records}

    # --- anew --------------------------------------------------------------------------------------
    async def mend(self) -> None:
        """Rebuild if the tables lack what was acked: the file was removed, or an older one put in its place."""
        attempt = 0
        while True:
            try:
                if await self._lacks_records():
                    log.warning("the data plane lacks records that it once had: made again from the ledger")
                    async with self._rebuilding:
                        await self.rebuild()
            except HeadraceError as e:
                delay = backoff_s(attempt, cap=60.0)
                attempt += 1
                log.warning("the ledger's tables are looked at later", extra={"reason": str(e)[:300]})
                await asyncio.sleep(delay)
            else:
                return

    async def _lacks_records(self) -> bool:
        settled, last = await self._settled_seq(), await self._store.read(ledger_rebuild.last_sequence)
        prefix, stream = self._mesh.subjects.prefix, self._mesh.topology.ledger
        for kind in ("call", "budget"):
            found = await next_message(self._mesh, stream, f"{prefix}.ledger.{kind}.>", last + 1)
            if found is not None and found.sequence <= settled:
                return True
        return False

    async def _settled_seq(self) -> int:
        """Up to here every record was acked, and so committed before."""
        spec = self._mesh.topology.ledger_consumer()
        return int((await consumer_info(self._mesh, spec.stream, spec.durable))["ack_floor"]["stream_seq"])

    async def serve_rebuild(self, _request: dict[str, Any], _headers: Mapping[str, str]) -> Rebuilt:
        """`rebuild`, one at a time, while projecting goes on."""
        async with self._rebuilding:
            return await self.rebuild()

    async def rebuild(self) -> Rebuilt:
        """Read the whole ledger into new tables and put them in place of those in use."""
        settled = await self._settled_seq()
        await self._store.write(ledger_rebuild.begin)
        crash_point("rebuild-begun")
        try:
            records, unreadable = await self._read_all()
            crash_point("rebuild-read")
            wrong = await self._store.write(put_in_place, settled)
        except BaseException:
            # Or every record would be written twice from here on; a store that is closed drops them when it is opened.
            with contextlib.suppress(HeadraceError, RuntimeError):
                await asyncio.shield(self._store.write(ledger_rebuild.drop))
            raise
        crash_point("rebuild-committed")
        identical = not any(wrong.values())
        log.info(
            "the ledger's tables are rebuilt", extra={"records": records, "identical": identical, **wrong}
        )
        return Rebuilt(records=records, identical=identical, tables=wrong, unreadable=unreadable)

    async def _read_all(self) -> tuple[int, int]:
        """Read the ledger into the new tables; return how many records it has, and how many messages that are none."""
        count = unreadable = 0
        filter_ = f"{self._mesh.subjects.prefix}.ledger.>"
        async for batch in read_all(self._mesh, self._mesh.topology.ledger, filter_):
            records: list[Numbered] = []
            for m in batch:
                try:
                    records.append((m.sequence, decode(m.subject, m.data, m.headers)))
                except Undecodable as e:
                    unreadable += 1
                    extra = {"sequence": m.sequence, "reason": str(e)}
                    log.warning("a record of the ledger is unreadable", extra=extra)
            await write_patiently(self._store, "a rebuild", ledger_rows.insert_rebuilt, records)
            count += len(records)
        return count, unreadable


def project(connection: Connection, records: Sequence[Numbered]) -> Inserted:
    """Insert `records` (inside the writer's transaction)."""
    found = ledger_rows.insert(connection, records)
    crash_point("projection-before-commit")
    return found


def put_in_place(connection: Connection, settled_seq: int) -> dict[str, int]:
    """End a rebuild (inside the writer's transaction)."""
    wrong = ledger_rebuild.end(connection, settled_seq)
    crash_point("rebuild-before-commit")
    return wrong
