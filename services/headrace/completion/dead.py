"""Dead letters into the table `dead`, so that SQL finds what no consumer could take."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from headrace.completion.job_rows import now_us
from headrace.completion.patience import renewed, write_patiently
from headrace.completion.store import Connection, Store
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, Undecodable
from headrace.contracts.messages import DeadLetter
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer, Delivery
from headrace.mesh.settle import Settler

log = logging.getLogger("headrace.completion")

BATCH = 50
"""Few at a time: each may be as large as a message can be."""

_INSERT = """
INSERT INTO dead (sequence, origin, subject, reason, data, headers, stream, stream_sequence, tries, died_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, make_timestamp($10::BIGINT)) ON CONFLICT DO NOTHING"""


class DeadLetters:
    """Copies HR_DEAD into the data plane until it is stopped; the stream keeps the originals."""

    def __init__(self, mesh: Mesh, store: Store, settler: Settler) -> None:
        self._mesh = mesh
        self._store = store
        self._settler = settler
        self._consumer = BatchConsumer(mesh, mesh.topology.dead_consumer(), batch=BATCH, wait_s=0.0)

    async def run(self) -> None:
        """Copy for ever; after `stop`, finish what is in hand, then return."""
        await self._consumer.start()
        async for batch in self._consumer:
            try:
                async with renewed(self._mesh, batch):
                    letters = [(d.stream_seq, _read(d)) for d in batch]
                    await write_patiently(self._store, "dead letters", insert, letters)
                    await self._settler.ack_all(batch)
            except HeadraceError as e:
                log.warning("dead letters wait", extra={"reason": str(e)[:300]})
            finally:
                self._consumer.release(batch)

    async def stop(self) -> None:
        """Pull no more."""
        await self._consumer.stop()


def insert(connection: Connection, letters: Sequence[tuple[int, DeadLetter]]) -> None:
    """Insert letters keyed by their sequence in the stream; one that is there already stays."""
    for sequence, letter in letters:
        connection.execute(
            _INSERT,
            [
                sequence,
                letter.origin,
                letter.subject,
                letter.reason,
                letter.data,
                msgspec.json.encode(letter.headers).decode(),
                letter.stream,
                letter.sequence,
                letter.tries,
                letter.at_us,
            ],
        )


def _read(delivery: Delivery) -> DeadLetter:
    """The letter; what is none (somebody published by hand) is kept as it stands, since there is no further stage."""
    try:
        return codec.DEAD_LETTER.decode(delivery.data, delivery.headers)
    except Undecodable as e:
        return DeadLetter(
            origin="unreadable",
            subject=delivery.subject,
            reason=str(e)[:2_048],
            data=delivery.data,
            headers=dict(delivery.headers or {}),
            stream=delivery.stream,
            sequence=delivery.stream_seq,
            at_us=now_us(),
        )
