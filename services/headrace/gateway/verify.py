"""Proving the ledger from itself: the heads of budgets against the records that moved them."""

from __future__ import annotations

import hashlib

from msgspec import Struct

from headrace.contracts import codec
from headrace.contracts.account import Fold
from headrace.mesh.connection import Mesh
from headrace.mesh.tail import read_all


class Verification(Struct, frozen=True, kw_only=True):
    """What the ledger holds. `digest` covers every record in order: two readings of one ledger agree in it."""

    records: int
    calls: int
    open: int
    in_doubt: int
    heads_match: bool
    last_seq: int
    digest: str
    differences: list[str]


async def verify(mesh: Mesh) -> Verification:
    """Read the whole ledger and fold it; raise `LedgerBroken` where records cannot follow one another."""
    fold = Fold()
    digest = hashlib.sha256()
    last_seq = 0
    async for batch in read_all(mesh, mesh.topology.ledger, f"{mesh.subjects.prefix}.ledger.>"):
        for message in batch:
            digest.update(b"%d:%d:" % (message.sequence, len(message.data)))
            digest.update(message.data)
            last_seq = message.sequence
            kind = message.subject.split(".")[2]
            schema = {"budget": codec.BUDGET_HEAD, "roster": codec.ROSTER}.get(kind, codec.CALL_RECORD)
            fold.take(schema.decode(message.data, message.headers))
    differences = fold.differences()
    states = [view.state for view in fold.calls.values()]
    return Verification(
        records=fold.records,
        calls=len(fold.calls),
        open=sum(state in ("open", "retrying") for state in states),
        in_doubt=states.count("in_doubt"),
        heads_match=not differences,
        last_seq=last_seq,
        digest=digest.hexdigest(),
        differences=differences[:20],
    )
