"""High-water marks of the broker's streams, in the data plane: what the broker lost is found, and kept until accepted.

Marks are written seldom (a row for each stream that moved, every few seconds while there is work, and at the stop), and
compared before they are written, after a reconnect, and at the start. Work goes on after a loss: landing what is there
loses nothing more. An operator who has seen to it accepts it by its number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from headrace.completion.store import Connection, Store
from headrace.contracts.api import Finding
from headrace.contracts.errors import HeadraceError, NotFound
from headrace.mesh.checks.findings import fail, ok
from headrace.mesh.checks.marks import Mark, find_loss, read_mark
from headrace.mesh.connection import Mesh

log = logging.getLogger("headrace.completion")

PERIOD_S: Final = 15.0
CHECK: Final = "stream history"


class Loss(Struct, frozen=True):
    """Something that a stream lost, until it is accepted."""

    id: int
    stream: str
    found: str


class Marks:
    """Watches every stream that is meant to keep what it has; buckets whose values expire are left out."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._mesh = mesh
        self._store = store
        self._streams = [spec.name for spec in mesh.topology.streams() if not spec.max_age]
        self._looking = asyncio.Lock()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Look now and then, and after each reconnect, for ever."""
        self._mesh.on_reconnect(self._wake.set)
        try:
            while True:
                try:
                    async with asyncio.timeout(PERIOD_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                await self.look()
        finally:
            self._mesh.off_reconnect(self._wake.set)

    async def look(self) -> None:
        """Compare each stream with its mark, note what it lost, and mark it anew. Never raises: work goes on."""
        if not self._mesh.connected:
            return  # said by the connection already; the reconnect looks
        async with self._looking:
            try:
                known = {mark.stream: mark for mark in await self._store.read(_marks)}
                losses: list[tuple[str, str]] = []
                marks: list[Mark] = []
                for stream in self._streams:
                    before = known.get(stream)
                    if before is not None and (found := await self._loss(before)) is not None:
                        losses.append((stream, found))
                    now = await read_mark(self._mesh, stream)
                    if now is not None and now != before:
                        marks.append(now)
                if losses or marks:
                    await self._store.write(_note, marks, losses)
            except HeadraceError as e:
                log.info("streams are not compared with their marks", extra={"reason": str(e)[:200]})
                return
        for stream, found in losses:
            log.error("the broker lost data", extra={"stream": stream, "found": found})

    async def _loss(self, before: Mark) -> str | None:
        return await find_loss(self._mesh, before, kept=before.stream == self._mesh.topology.ledger)

    async def losses(self) -> list[Loss]:
        """What was lost and is not accepted yet."""
        return await self._store.read(_open_losses)

    async def accept(self, numbers: Sequence[int]) -> list[int]:
        """Tell these losses no more; return those that were open. `NotFound` if one never was."""
        return await self._store.write(_accept, numbers)

    async def findings(self) -> list[Finding]:
        """One for each loss that is not accepted."""
        mend = (
            "headrace audit names the items of each job that are missing: submit or retry them; then "
            "headrace doctor --accept-loss {id}"
        )
        of_ledger = "headrace ledger verify tells more; see docs/ledger.md, then headrace ledger accept"
        found = [
            fail(
                CHECK,
                loss.found,
                of_ledger if loss.stream == self._mesh.topology.ledger else mend.format(id=loss.id),
            )
            for loss in await self.losses()
        ]
        return found or [ok(CHECK, f"{len(self._streams)} streams have gone forward only")]


def _marks(connection: Connection) -> list[Mark]:
    rows = connection.execute(
        "SELECT stream, created, last_sequence, messages, digest FROM stream_marks"
    ).fetchall()
    return [Mark(stream=s, created=c, last_seq=n, messages=m, digest=d) for s, c, n, m, d in rows]


def _note(connection: Connection, marks: Sequence[Mark], losses: Sequence[tuple[str, str]]) -> None:
    """Write new marks and new losses as one: a crash between the two would forget the loss."""
    now = time.time_ns() // 1_000
    for mark in marks:
        connection.execute(
            "INSERT OR REPLACE INTO stream_marks VALUES (?, ?, ?, ?, ?, make_timestamp(?::BIGINT))",
            [mark.stream, mark.created, mark.last_seq, mark.messages, mark.digest, now],
        )
    for stream, found in losses:
        connection.execute(
            "INSERT INTO stream_losses SELECT coalesce(max(id), 0) + 1, ?, ?, make_timestamp(?::BIGINT), NULL "
            "FROM stream_losses",
            [stream, found, now],
        )


def _open_losses(connection: Connection) -> list[Loss]:
    rows = connection.execute(
        "SELECT id, stream, found FROM stream_losses WHERE accepted_at IS NULL ORDER BY id"
    )
    return [Loss(number, stream, found) for number, stream, found in rows.fetchall()]


def _accept(connection: Connection, numbers: Sequence[int]) -> list[int]:
    accepted: list[int] = []
    for number in numbers:
        row = connection.execute("SELECT accepted_at FROM stream_losses WHERE id = ?", [number]).fetchone()
        if row is None:
            raise NotFound(f"there is no loss {number}: `headrace doctor` names those that are not accepted")
        if row[0] is None:
            connection.execute(
                "UPDATE stream_losses SET accepted_at = make_timestamp(?::BIGINT) WHERE id = ?",
                [time.time_ns() // 1_000, number],
            )
            accepted.append(number)
    return accepted
