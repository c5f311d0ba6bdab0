"""What agents did, as rows: each record once by its number in its life, each life's newest count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.completion.store import Connection
from headrace.contracts.capture import CaptureCount, CaptureMessage, CaptureRecord, CaptureRecords

_ROW_TYPE: Final = """[{"agent": "VARCHAR", "life": "VARCHAR", "seq": "BIGINT", "run": "VARCHAR", "tenant": "VARCHAR",
"kind": "VARCHAR", "name": "VARCHAR", "message": "VARCHAR", "peer": "VARCHAR", "hop": "INTEGER", "data": "JSON",
"recorded_at": "BIGINT", "trace_id": "VARCHAR", "stream_sequence": "BIGINT"}]"""

_INSERT: Final = f"""
INSERT INTO capture SELECT * REPLACE (make_timestamp(recorded_at) AS recorded_at) FROM
(SELECT unnest(from_json($1::VARCHAR, '{_ROW_TYPE}'), max_depth := 2)) ON CONFLICT DO NOTHING"""  # noqa: S608  (a constant)

_COUNT: Final = """
INSERT INTO capture_counts VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, make_timestamp($10::BIGINT))
ON CONFLICT (agent, life) DO UPDATE SET number = excluded.number, recorded = excluded.recorded,
    captured = excluded.captured, dropped = excluded.dropped, waiting = excluded.waiting, final = excluded.final,
    counted_at = excluded.counted_at
WHERE excluded.number > capture_counts.number"""


def insert(connection: Connection, messages: Sequence[tuple[int, CaptureMessage]]) -> None:
    """Insert messages with their sequences in the stream; what is there already stays."""
    rows: list[dict[str, Any]] = []
    for sequence, message in messages:
        if isinstance(message, CaptureCount):
            c = message
            values = [
                c.agent,
                c.life,
                c.number,
                c.tenant,
                c.recorded,
                c.captured,
                c.dropped,
                c.waiting,
                c.final,
            ]
            connection.execute(_COUNT, [*values, c.at_us])
            continue
        rows += [_row(sequence, message, record) for record in message.records]
    if rows:
        connection.execute(_INSERT, [msgspec.json.encode(rows).decode()])


def _row(sequence: int, message: CaptureRecords, record: CaptureRecord) -> dict[str, Any]:
    return {
        "agent": message.agent, "life": message.life, "seq": record.seq, "run": message.run, "tenant": message.tenant,
        "kind": record.kind, "name": record.name, "message": record.message, "peer": record.peer, "hop": record.hop,
        "data": None if bytes(record.data) == b"null" else record.data, "recorded_at": record.at_us,
        "trace_id": message.trace_id, "stream_sequence": sequence,
    }  # fmt: skip
