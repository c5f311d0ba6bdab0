"""A message of the ledger's stream as a record: by the kind that its subject names, and only if the two agree."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.contracts import codec
from headrace.contracts.errors import Undecodable
from headrace.contracts.ledger import BudgetHead, CallRecord, Roster


def decode(subject: str, data: bytes, headers: Mapping[str, str] | None) -> CallRecord | BudgetHead | Roster:
    """The record that stands on `subject`; raise `Undecodable` if it is none, or of another thing than its subject."""
    kind = subject.split(".")[2] if subject.count(".") > 1 else ""
    if kind == "budget":
        record = codec.BUDGET_HEAD.decode(data, headers)
        ends = f".{record.tenant}.{record.budget}"
    elif kind == "roster":
        record = codec.ROSTER.decode(data, headers)
        ends = f".{record.tenant}"
    else:
        record = codec.CALL_RECORD.decode(data, headers)
        ends = f".{record.tenant}.{record.call}"
    if not subject.endswith(ends):
        msg = f"the record on {subject} is of another {kind or 'call'}: {ends[1:]}"
        raise Undecodable(msg)
    return record
