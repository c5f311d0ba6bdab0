"""The ledger as tables: one row a record, keyed by its sequence in the stream, and views that answer what people ask.

Nothing here is the truth: the stream is, and everything can be dropped and made again from it, to identical rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.completion.ledger_schema import HEAD_COLUMNS, RECORD_COLUMNS
from headrace.completion.store import Connection
from headrace.contracts.ledger import (
    AttemptFailed,
    BudgetHead,
    CallRecord,
    Completed,
    Failed,
    InDoubt,
    Intent,
    Roster,
)

_ROW_TYPE: Final = """[{"sequence": "BIGINT", "tenant": "VARCHAR", "call": "VARCHAR", "kind": "VARCHAR",
"attempt": "INTEGER", "owner": "VARCHAR", "epoch": "BIGINT", "written_at": "BIGINT", "callee": "VARCHAR",
"effect": "VARCHAR", "agent": "VARCHAR", "model": "VARCHAR", "task": "VARCHAR", "conversation": "VARCHAR",
"max_cost_micro": "BIGINT", "cost_micro": "BIGINT",
"input_tokens": "BIGINT", "output_tokens": "BIGINT", "cached_tokens": "BIGINT",
"reasoning_tokens": "BIGINT", "usage_source": "VARCHAR", "partial": "BOOLEAN", "error_type": "VARCHAR",
"error_message": "VARCHAR", "request_sent": "BOOLEAN", "resolved_by": "VARCHAR", "trace_id": "VARCHAR",
"record": "JSON"}]"""

_HEAD_TYPE: Final = """[{"sequence": "BIGINT", "tenant": "VARCHAR", "budget": "VARCHAR", "unit": "VARCHAR",
"limit": "BIGINT", "period": "VARCHAR", "agent": "VARCHAR", "periods": "JSON", "written_at": "BIGINT"}]"""

_AS_TIME: Final = "* REPLACE (make_timestamp(written_at) AS written_at)"

Numbered = tuple[int, CallRecord | BudgetHead | Roster]


class _Row(Struct, kw_only=True):
    sequence: int
    tenant: str
    call: str
    kind: str
    attempt: int
    owner: str
    epoch: int
    written_at: int
    callee: str | None = None
    effect: str | None = None
    agent: str | None = None
    model: str | None = None
    task: str | None = None
    conversation: str | None = None
    max_cost_micro: int = 0
    cost_micro: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    usage_source: str | None = None
    partial: bool = False
    error_type: str | None = None
    error_message: str | None = None
    request_sent: bool | None = None
    resolved_by: str | None = None
    trace_id: str | None = None
    record: msgspec.Raw


def insert(connection: Connection, records: Sequence[Numbered], *, suffix: str = "") -> int:
    """Insert records by their sequences; one that is there already stays. Return how many are new.

    `suffix` names other tables of the same form, for a rebuild beside the ones in use.
    """
    rows = [_row(seq, r) for seq, r in records if not isinstance(r, BudgetHead | Roster)]
    heads = [_head(seq, r) for seq, r in records if isinstance(r, BudgetHead)]
    new = 0
    for table, type_, values in (
        (f"call_records{suffix}", _ROW_TYPE, rows),
        (f"budget_heads{suffix}", _HEAD_TYPE, heads),
    ):
        if values:
            text = msgspec.json.encode(values).decode()
            found = connection.execute(
                f"INSERT INTO {table} SELECT {_AS_TIME} FROM "  # noqa: S608  (constants)
                f"(SELECT unnest(from_json($1::VARCHAR, '{type_}'), max_depth := 2)) ON CONFLICT DO NOTHING",
                [text],
            ).fetchone()
            new += int(found[0]) if found else 0
    return new


def _row(sequence: int, record: CallRecord) -> _Row:
    row = _Row(
        sequence=sequence,
        tenant=record.tenant,
        call=record.call,
        kind=_KINDS[type(record)],
        attempt=record.attempt,
        owner=record.owner,
        epoch=record.epoch,
        written_at=record.at_us,
        record=msgspec.Raw(msgspec.json.encode(record)),
    )
    if isinstance(record, Intent):
        request = record.request
        row.callee, row.effect, row.agent = request.callee, request.effect, request.principal
        row.model, row.task, row.conversation = request.model, request.task, request.conversation
        row.max_cost_micro = record.max_cost_micro
        parts = (request.traceparent or "").split("-")
        row.trace_id = parts[1] if len(parts) == 4 else None  # noqa: PLR2004  (W3C trace context)
        return row
    if isinstance(record, Completed):
        usage = record.usage
        row.cost_micro, row.partial, row.request_sent = record.cost_micro, record.outcome.partial, True
        row.input_tokens, row.output_tokens = usage.input_tokens, usage.output_tokens
        row.cached_tokens, row.reasoning_tokens = usage.cached_tokens, usage.reasoning_tokens
        row.usage_source, row.resolved_by = usage.source, record.resolved_by
        return row
    row.error_type, row.error_message = record.error.type, record.error.message
    row.request_sent = record.request_sent
    if isinstance(record, Failed):
        row.cost_micro, row.resolved_by = record.cost_micro, record.resolved_by
    return row


_KINDS: Final[dict[type, str]] = {
    Intent: "intent",
    Completed: "completed",
    Failed: "failed",
    AttemptFailed: "attempt_failed",
    InDoubt: "in_doubt",
}


def _head(sequence: int, head: BudgetHead) -> dict[str, Any]:
    return {
        "sequence": sequence, "tenant": head.tenant, "budget": head.budget, "unit": head.unit, "limit": head.limit,
        "period": head.period, "agent": head.agent, "periods": msgspec.to_builtins(head.periods),
        "written_at": head.at_us,
    }  # fmt: skip


# --- rebuilding -------------------------------------------------------------------------------------
def begin_rebuild(connection: Connection) -> None:
    """Make the empty tables of a rebuild."""
    for table, columns in (("call_records", RECORD_COLUMNS), ("budget_heads", HEAD_COLUMNS)):
        connection.execute(f"CREATE OR REPLACE TABLE {table}_new ({columns})")


def end_rebuild(connection: Connection) -> dict[str, bool]:
    """Put the rebuilt tables in place of those in use; say of each whether it was identical up to its last record."""
    same: dict[str, bool] = {}
    for table in ("call_records", "budget_heads"):
        bound = f"WHERE sequence <= (SELECT coalesce(max(sequence), 0) FROM {table})"  # noqa: S608
        before, after = (
            connection.execute(f"SELECT count(*), bit_xor(hash(t)) FROM {name} AS t {where}").fetchone()  # noqa: S608
            for name, where in ((table, ""), (f"{table}_new", bound))
        )
        same[table] = before == after
        connection.execute(f"DELETE FROM {table}")  # noqa: S608
        connection.execute(f"INSERT INTO {table} SELECT * FROM {table}_new")  # noqa: S608
        connection.execute(f"DROP TABLE {table}_new")
    return same
