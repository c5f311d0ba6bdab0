"""Dead letters into the table `dead`, so that SQL finds what no consumer could take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.completion.follower import Follower
from headrace.completion.job_rows import now_us
from headrace.completion.patience import write_patiently
from headrace.completion.store import Connection, Store
from headrace.contracts import codec
from headrace.contracts.errors import Undecodable
from headrace.contracts.messages import DeadLetter
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery
from headrace.mesh.settle import Settler

BATCH = 50
"""Few at a time: each may be as large as a message can be."""

_INSERT = """
INSERT INTO dead (sequence, origin, subject, reason, data, headers, stream, stream_sequence, tries, died_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, make_timestamp($10::BIGINT)) ON CONFLICT DO NOTHING"""


class DeadLetters(Follower):
    """Copies HR_DEAD into the data plane until it is stopped; the stream keeps the originals."""

    what = "dead letters"

    def __init__(self, mesh: Mesh, store: Store, settler: Settler) -> None:
        super().__init__(mesh, store, settler, mesh.topology.dead_consumer(), batch=BATCH)

    async def take(self, batch: Sequence[Delivery]) -> None:
        """Copy a batch."""
        letters = [(d.stream_seq, _read(d)) for d in batch]
        await write_patiently(self._store, self.what, insert, letters)
        await self._settler.ack_all(batch)


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
