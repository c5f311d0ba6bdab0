"""The ledger as tables: one row a record, keyed by its sequence in the stream, and views that answer what people ask.

Nothing here is the truth: the stream is, and everything can be dropped and made again from it, to identical rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

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

NEW: Final = "_new"
"""Suffix of the tables that a rebuild fills."""

Numbered = tuple[int, CallRecord | BudgetHead | Roster]


class Inserted(Struct, frozen=True, kw_only=True):
    """How many records were new; the sequences under which another record stands than the one that came."""

    new: int
    others: list[int]


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


def is_rebuilding(connection: Connection) -> bool:
    """Whether the tables of a rebuild are there."""
    return bool(
        connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'call_records_new'").fetchall()
    )


def insert(connection: Connection, records: Sequence[Numbered]) -> Inserted:
    """Insert records by their sequences; one that is there already stays.

    While the tables are being rebuilt, into the new ones too: so what comes meanwhile is in both.
    """
    rows = [_row(seq, r) for seq, r in records if not isinstance(r, BudgetHead | Roster)]
    heads = [_head(seq, r) for seq, r in records if isinstance(r, BudgetHead)]
    suffixes = ("", NEW) if is_rebuilding(connection) else ("",)
    found = [_insert_into(connection, suffix, rows, heads) for suffix in suffixes]
    return found[0]


def insert_rebuilt(connection: Connection, records: Sequence[Numbered]) -> Inserted:
    """Insert records that a rebuild has read, into the new tables only."""
    rows = [_row(seq, r) for seq, r in records if not isinstance(r, BudgetHead | Roster)]
    heads = [_head(seq, r) for seq, r in records if isinstance(r, BudgetHead)]
    return _insert_into(connection, NEW, rows, heads)


def _insert_into(
    connection: Connection, suffix: str, rows: list[_Row], heads: list[dict[str, Any]]
) -> Inserted:
    new, others = 0, list[int]()
    for table, type_, values, sequences in (
        (f"call_records{suffix}", _ROW_TYPE, rows, [row.sequence for row in rows]),
        (f"budget_heads{suffix}", _HEAD_TYPE, heads, [int(head["sequence"]) for head in heads]),
    ):
        if not values:
            continue
        text = msgspec.json.encode(values).decode()
        # Constants: names of tables and types.
        given = f"SELECT {_AS_TIME} FROM (SELECT unnest(from_json($1::VARCHAR, '{type_}'), max_depth := 2))"  # noqa: S608
        found = connection.execute(f"INSERT INTO {table} {given} ON CONFLICT DO NOTHING", [text]).fetchone()
        fresh = int(found[0]) if found else 0
        new += fresh
        if fresh < len(values):
            there = f"SELECT * FROM {table} WHERE sequence BETWEEN $2 AND $3"  # noqa: S608
            differing = connection.execute(
                f"SELECT sequence FROM ({given} EXCEPT {there}) ORDER BY sequence",  # noqa: S608
                [text, min(sequences), max(sequences)],
            )
            others += [int(row[0]) for row in differing.fetchall()]
    return Inserted(new=new, others=others)


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
