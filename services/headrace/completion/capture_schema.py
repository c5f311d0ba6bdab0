"""The tables and views of what agents did."""

from __future__ import annotations

from typing import Final

_CAPTURE = """
CREATE TABLE capture (
    agent VARCHAR NOT NULL,
    life VARCHAR NOT NULL,
    seq BIGINT NOT NULL,
    run VARCHAR NOT NULL,
    tenant VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    name VARCHAR,
    message VARCHAR,
    peer VARCHAR,
    hop INTEGER NOT NULL,
    data JSON,
    recorded_at TIMESTAMP NOT NULL,
    trace_id VARCHAR,
    stream_sequence BIGINT NOT NULL,
    PRIMARY KEY (agent, life, seq)
)"""

_COUNTS = """
CREATE TABLE capture_counts (
    agent VARCHAR NOT NULL,
    life VARCHAR NOT NULL,
    number BIGINT NOT NULL,
    tenant VARCHAR NOT NULL,
    recorded BIGINT NOT NULL,
    captured BIGINT NOT NULL,
    dropped BIGINT NOT NULL,
    waiting BIGINT NOT NULL,
    final BOOLEAN NOT NULL,
    counted_at TIMESTAMP NOT NULL,
    PRIMARY KEY (agent, life)
)"""

# A message that is handled again, after a lapsed lease, has a row for each time.
_MESSAGES = """
CREATE VIEW messages AS
SELECT message, agent, run, tenant, name AS kind, peer AS sender, hop, kind AS outcome,
    TRY_CAST(data->>'attempt' AS INTEGER) AS attempt,
    data->'body' AS body, coalesce(data->>'error', data->>'code') AS error, recorded_at AS ended_at, trace_id
FROM capture WHERE kind IN ('handled', 'failed', 'dead', 'expired', 'hop_limit', 'cancelled', 'undelivered')"""

# What a life took for dropped at its very end may be here all the same: its ack was not waited for.
_ACCOUNT = """
CREATE VIEW capture_account AS
WITH landed AS (
    SELECT agent, life, count(*) AS landed, max(seq) AS last_seq, max(recorded_at) AS last_at
    FROM capture GROUP BY agent, life
), both_sides AS (
    SELECT coalesce(c.agent, l.agent) AS agent, coalesce(c.life, l.life) AS life,
        greatest(coalesce(c.recorded, 0), coalesce(l.last_seq, 0)) AS recorded, coalesce(l.landed, 0) AS landed,
        coalesce(c.dropped, 0) AS said, coalesce(c.final, false) AS final,
        greatest(coalesce(c.counted_at, l.last_at), coalesce(l.last_at, c.counted_at)) AS last_at
    FROM capture_counts AS c FULL OUTER JOIN landed AS l ON c.agent = l.agent AND c.life = l.life
)
SELECT agent, life, recorded, landed, least(said, recorded - landed) AS dropped,
    recorded - landed - least(said, recorded - landed) AS missing, final, last_at
FROM both_sides"""

CAPTURE_STEP: Final[tuple[str, ...]] = (_CAPTURE, _COUNTS, _MESSAGES, _ACCOUNT)
"""The statements of the schema step that makes the tables of what agents did."""

CAPTURE_TABLES: Final = ("capture", "capture_counts", "messages", "capture_account")
