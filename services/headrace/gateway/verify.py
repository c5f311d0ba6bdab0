"""Proving the ledger from itself, and from what was seen of it: heads against records, its end against marks of it.

It reads everything and trusts nothing: what is no record, what cannot follow the records before it, and a head that the
records do not make are told by the call or the budget, and the rest is read all the same.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.contracts.account import Fold
from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import CallOutcome, Completed, Roster
from headrace.contracts.ledger_stream import decode
from headrace.gateway.ledger_mark import FILE, MarkFile, losses_of_completion
from headrace.mesh.checks.marks import find_loss
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import stream_info
from headrace.mesh.tail import read_all

log = logging.getLogger("headrace.gateway")

MAX_NAMED: Final = 20
PROVED_FILE: Final = "run/ledger-proved.json"
"""What the last proof read, in the mesh's folder: a digest over every record, which its last message alone is not."""


class Proved(Struct, frozen=True, kw_only=True):
    """A ledger as it was proved: when its stream was made, how far it was read, how many numbers had no record."""

    created: str
    last_seq: int
    digest: str
    missing: int = 0
    wrong: list[int] = []
    """Numbers of records that cannot be what they say, and that an operator has accepted."""


class Verification(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the ledger holds. `digest` covers every record in order: two readings of one ledger agree in it.

    `differences` are there if the heads do not match, `went_back` if something that was seen before is gone.
    """

    records: int
    calls: int
    open: int
    in_doubt: int
    heads_match: bool
    last_seq: int
    digest: str
    differences: list[str] = []
    went_back: str | None = None


async def verify(mesh: Mesh, folder: Path) -> Verification:
    """Read the whole ledger and fold it; compare its end with what gateways of `folder` and completion saw of it."""
    proof = await read_ledger(mesh, _read(folder / PROVED_FILE))
    went_back = await _went_back(mesh, folder, proof)
    if not proof.differences and went_back is None:
        keep(folder, proof.proved())
    return verification(proof, went_back)


def verification(proof: Proof, went_back: str | None) -> Verification:
    """What is said of a reading."""
    states = [view.state for view in proof.fold.calls.values()]
    return Verification(
        records=proof.records,
        calls=len(states),
        open=sum(state in ("open", "retrying") for state in states),
        in_doubt=states.count("in_doubt"),
        heads_match=not proof.differences,
        last_seq=proof.last_seq,
        digest=proof.digest,
        differences=proof.differences[:MAX_NAMED],
        went_back=went_back,
    )


async def read_ledger(mesh: Mesh, before: Proved | None) -> Proof:
    """Read all of it; `before` is what an earlier reading found."""
    stream = mesh.topology.ledger
    info = await stream_info(mesh, stream)
    proof = Proof(str(info["created"]), before)
    async for batch in read_all(mesh, stream, f"{mesh.subjects.prefix}.ledger.>"):
        for message in batch:
            proof.take(message.subject, message.sequence, message.data, message.headers)
    proof.ends(int(info["state"]["last_seq"]))
    return proof


class Proof:
    """One reading of the ledger; `before` is what an earlier one found in the same stream."""

    def __init__(self, created: str, before: Proved | None) -> None:
        self.created = created
        self.before = before if before is not None and before.created == created else None
        self.fold = Fold()
        self.rosters: dict[str, Roster] = {}
        self.records = self.last_seq = self.missing = 0
        self._wrong: dict[int, str] = {}
        self._digest = hashlib.sha256()
        self._then: str | None = None
        """The digest where the earlier reading ended."""

    def take(self, subject: str, sequence: int, data: bytes, headers: dict[str, str]) -> None:
        """One more message."""
        self.missing += sequence - self.last_seq - 1
        self.last_seq = sequence
        self.records += 1
        self._digest.update(b"%d:%s:%d:" % (sequence, subject.encode("utf-8", "replace"), len(data)))
        self._digest.update(data)
        if self.before is not None and sequence == self.before.last_seq:
            self._then = self.digest
        try:
            record = decode(subject, data, headers)
            if isinstance(record, Completed):  # answers are large, and the account is not made of them
                record = replace(record, outcome=CallOutcome())
            if isinstance(record, Roster):
                self.rosters[record.tenant] = record
            self.fold.take(record)
        except HeadraceError as e:
            self._wrong[sequence] = f"record {sequence} on {subject}: {e}"

    def ends(self, last_seq: int) -> None:
        """The stream says that it ends here: what the reading did not come to is damaged."""
        self.missing += max(0, last_seq - self.last_seq)
        self.last_seq = max(self.last_seq, last_seq)

    def proved(self) -> Proved:
        """What of it is kept, taken as it is."""
        return Proved(
            created=self.created,
            last_seq=self.last_seq,
            digest=self.digest,
            missing=self.missing,
            wrong=list(self._wrong),
        )

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def differences(self) -> list[str]:
        known = self.before.wrong if self.before else ()
        unlisted = [
            f"budget {tenant}/{budget} is not on its tenant's list: it bounds nobody"
            for tenant, budget in self.unlisted
        ]
        wrong = [text for seq, text in self._wrong.items() if seq not in known]
        return wrong + unlisted + self.fold.differences()

    @property
    def unlisted(self) -> list[tuple[str, str]]:
        """Tenants and budgets that have a head, and that no call is told of."""
        named = {(r.tenant, b.budget) for r in self.rosters.values() for b in r.budgets}
        return sorted(self.fold.heads.keys() - named)

    @property
    def loss(self) -> str | None:
        """What this reading lacks of itself, or of the earlier one."""
        before = self.before
        if before is not None and before.last_seq and self._then != before.digest:
            return f"the records up to number {before.last_seq:,} are not those that were proved before"
        if self.missing > (before.missing if before else 0):
            return f"{self.missing:,} numbers up to {self.last_seq:,} have no record: the broker's storage lost them"
        return None


async def _went_back(mesh: Mesh, folder: Path, proof: Proof) -> str | None:
    """What is gone that somebody has seen; None if nothing is."""
    mark = MarkFile(folder / FILE).read()
    if mark is not None and (loss := await find_loss(mesh, mark, kept=True)) is not None:
        return f"{loss} (the gateways of {folder} saw it)"
    for lost in await losses_of_completion(mesh) or ():
        return f"{lost.found} (completion saw it)"
    return f"{proof.loss} (the last proof saw it)" if proof.loss else None


def _read(path: Path) -> Proved | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Proved)
    except (OSError, msgspec.MsgspecError):
        return None


def keep(folder: Path, proved: Proved) -> None:
    """Keep a proof where there is a mesh's folder to keep it in."""
    path = folder / PROVED_FILE
    if not path.parent.is_dir():
        return
    try:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(proved))
        temporary.replace(path)
    except OSError as e:
        log.warning("the proof is not kept", extra={"path": str(path), "reason": str(e)[:200]})
