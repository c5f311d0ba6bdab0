"""What is learned of calls beside their records: anybody may write it, and it is read when something is decided."""

from __future__ import annotations

import logging

from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import Evidence
from headrace.gateway.ledger import Overtaken
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import (
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SUBJECT_SEQUENCE,
    JetStreamError,
    next_message,
)
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.gateway")


class EvidenceStream:
    """The stream of evidence of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def testify(self, evidence: Evidence) -> None:
        """Store one piece. What cannot be stored is logged: it changes no state of any call."""
        try:
            await self.store(evidence)
        except HeadraceError as e:
            log.warning(
                "evidence is not stored",
                extra={"call": evidence.call, "kind": evidence.kind, "reason": str(e)[:200]},
            )

    async def store(self, evidence: Evidence, *, expected: int | None = None) -> int:
        """Store one piece and return its sequence; raise if it is not stored.

        With `expected`, the last sequence of the call's evidence, raise `Overtaken` if there is more by now.
        """
        try:
            ack = await publish(
                self._mesh,
                self._mesh.topology.evidence,
                self._mesh.subjects.evidence(evidence.tenant, evidence.call),
                codec.EVIDENCE.encode(evidence),
                headers={codec.SCHEMA_HEADER: codec.EVIDENCE.name},
                expected_last_subject_seq=expected,
            )
        except JetStreamError as e:
            if e.err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE):
                raise Overtaken(f"more is known of call {evidence.call} by now") from None
            raise
        return ack.seq

    async def of(self, tenant: str, call: str) -> list[Evidence]:
        """All that is known of a call, oldest first."""
        return [evidence for evidence, _ in await self.read(tenant, call)]

    async def read(self, tenant: str, call: str) -> list[tuple[Evidence, int]]:
        """`of`, each piece with its sequence."""
        subject = self._mesh.subjects.evidence(tenant, call)
        found: list[tuple[Evidence, int]] = []
        seq = 0
        while (
            message := await next_message(self._mesh, self._mesh.topology.evidence, subject, seq + 1)
        ) is not None:
            seq = message.sequence
            found.append((codec.EVIDENCE.decode(message.data, message.headers), seq))
        return found
