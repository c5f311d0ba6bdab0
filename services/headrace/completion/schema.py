"""The tables of the data plane, as numbered steps that are applied once each.

A step is never edited after a release: a change of schema is a further step. All times are TIMESTAMP in UTC.
"""

from __future__ import annotations

import time
from typing import Final

import duckdb

from headrace.completion.capture_schema import CAPTURE_STEP, CAPTURE_TABLES
from headrace.completion.ledger_schema import LEDGER_STEP, LEDGER_TABLES
from headrace.completion.pipeline_schema import PIPELINE_STEP, PIPELINE_TABLES
from headrace.contracts.errors import Conflict

TABLES: Final = (
    "jobs", "outcomes", "current_outcomes", "dead", "queries", "retries", "retry_items", "stream_marks",
    "stream_losses", "large_outcomes", "large_parts", *LEDGER_TABLES, *CAPTURE_TABLES, *PIPELINE_TABLES,
    "schema_version",
)  # fmt: skip
"""What a query may read."""

_JOBS = """
CREATE TABLE jobs (
    job VARCHAR PRIMARY KEY,
    tenant VARCHAR NOT NULL DEFAULT 'default',
    function VARCHAR NOT NULL DEFAULT '',
    model VARCHAR,
    lane VARCHAR NOT NULL DEFAULT 'normal',
    source VARCHAR NOT NULL DEFAULT '',
    input_fingerprint VARCHAR,
    state VARCHAR NOT NULL DEFAULT 'open',
    count BIGINT,
    refused BIGINT NOT NULL DEFAULT 0,
    landed BIGINT NOT NULL DEFAULT 0,
    max_index BIGINT NOT NULL DEFAULT -1,
    max_generation INTEGER NOT NULL DEFAULT 1,
    ok BIGINT NOT NULL DEFAULT 0,
    failed BIGINT NOT NULL DEFAULT 0,
    dead BIGINT NOT NULL DEFAULT 0,
    cancelled BIGINT NOT NULL DEFAULT 0,
    duplicates BIGINT NOT NULL DEFAULT 0,
    tokens_in BIGINT NOT NULL DEFAULT 0,
    tokens_out BIGINT NOT NULL DEFAULT 0,
    cancel_reason VARCHAR,
    opened_at TIMESTAMP,
    sealed_at TIMESTAMP,
    cancelled_at TIMESTAMP,
    ended_at TIMESTAMP,
    announced BOOLEAN NOT NULL DEFAULT false,
    trace_id VARCHAR
)"""

_OUTCOMES = """
CREATE TABLE outcomes (
    job VARCHAR NOT NULL,
    "index" BIGINT NOT NULL,
    generation INTEGER NOT NULL,
    tenant VARCHAR NOT NULL,
    function VARCHAR NOT NULL,
    status VARCHAR NOT NULL,
    custom_id VARCHAR,
    text VARCHAR,
    choices JSON,
    value JSON,
    finish_reason VARCHAR,
    error_type VARCHAR,
    error_message VARCHAR,
    error_field VARCHAR,
    model VARCHAR,
    engine VARCHAR,
    params_fingerprint VARCHAR,
    worker VARCHAR,
    attempt INTEGER NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    submitted_at TIMESTAMP,
    received_at TIMESTAMP,
    started_at TIMESTAMP,
    finished_at TIMESTAMP,
    landed_at TIMESTAMP NOT NULL,
    trace_id VARCHAR,
    chat BOOLEAN NOT NULL,
    task JSON,
    PRIMARY KEY (job, "index", generation)
)"""

_DEAD = """
CREATE TABLE dead (
    sequence BIGINT PRIMARY KEY,
    origin VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    reason VARCHAR NOT NULL,
    data BLOB,
    headers JSON,
    stream VARCHAR,
    stream_sequence BIGINT,
    tries BIGINT,
    died_at TIMESTAMP
)"""

_QUERIES = """
CREATE TABLE queries (
    id BIGINT PRIMARY KEY,
    asked_at TIMESTAMP NOT NULL,
    asked_by VARCHAR NOT NULL,
    sql VARCHAR NOT NULL,
    outcome VARCHAR NOT NULL,
    rows BIGINT,
    took_us BIGINT
)"""

_MORE_COLUMNS = (
    "ALTER TABLE outcomes ADD COLUMN shape INTEGER",
    "ALTER TABLE outcomes ADD COLUMN input_blob VARCHAR",
    "ALTER TABLE jobs ADD COLUMN generation INTEGER DEFAULT 1",
    "ALTER TABLE jobs ADD COLUMN deadline_at TIMESTAMP",
    "ALTER TABLE jobs ADD COLUMN max_failed DOUBLE",
    "ALTER TABLE jobs ADD COLUMN cancel_cause VARCHAR",
    "ALTER TABLE jobs ADD COLUMN shapes JSON",
    "ALTER TABLE dead ADD COLUMN redriven_at TIMESTAMP",
)

_RETRIES = """
CREATE TABLE retries (
    job VARCHAR NOT NULL,
    generation INTEGER NOT NULL,
    count BIGINT NOT NULL,
    condition VARCHAR NOT NULL,
    asked_at TIMESTAMP NOT NULL,
    stored BOOLEAN NOT NULL DEFAULT false,
    PRIMARY KEY (job, generation)
)"""

_RETRY_ITEMS = """
CREATE TABLE retry_items (
    job VARCHAR NOT NULL,
    "index" BIGINT NOT NULL,
    generation INTEGER NOT NULL,
    PRIMARY KEY (job, "index", generation)
)"""

# Each outcome of a generation above 1 has its row in retry_items, so an index has one current outcome, or none while
# its latest generation is under way.
_CURRENT = """
CREATE VIEW current_outcomes AS
SELECT o.* FROM outcomes AS o
WHERE NOT EXISTS (
    SELECT 1 FROM retry_items AS r WHERE r.job = o.job AND r."index" = o."index" AND r.generation > o.generation)"""

_STREAM_MARKS = """
CREATE TABLE stream_marks (
    stream VARCHAR PRIMARY KEY,
    created VARCHAR NOT NULL,
    last_sequence BIGINT NOT NULL,
    messages BIGINT NOT NULL,
    digest VARCHAR,
    noted_at TIMESTAMP NOT NULL
)"""

_STREAM_LOSSES = """
CREATE TABLE stream_losses (
    id BIGINT PRIMARY KEY,
    stream VARCHAR NOT NULL,
    found VARCHAR NOT NULL,
    found_at TIMESTAMP NOT NULL,
    accepted_at TIMESTAMP
)"""

_LARGE = """
CREATE TABLE large_outcomes (
    job VARCHAR NOT NULL,
    "index" BIGINT NOT NULL,
    generation INTEGER NOT NULL,
    size BIGINT NOT NULL,
    digest VARCHAR NOT NULL,
    PRIMARY KEY (job, "index", generation)
)"""

# Compressed, every reading of one part would decompress 2,048 of them (measured: 350 ms against 20).
_LARGE_PARTS = """
CREATE TABLE large_parts (
    job VARCHAR NOT NULL,
    "index" BIGINT NOT NULL,
    generation INTEGER NOT NULL,
    part INTEGER NOT NULL,
    data VARCHAR NOT NULL USING COMPRESSION uncompressed
)"""

STEPS: Final[tuple[tuple[int, str, tuple[str, ...]], ...]] = (
    (1, "jobs, outcomes, dead letters and the log of queries", (_JOBS, _OUTCOMES, _DEAD, _QUERIES)),
    (2, "retries, shapes, deadlines and failure limits", (*_MORE_COLUMNS, _RETRIES, _RETRY_ITEMS, _CURRENT)),
    (3, "marks of the streams, and what the broker lost", (_STREAM_MARKS, _STREAM_LOSSES)),
    (4, "results that were too large for a message", (_LARGE, _LARGE_PARTS)),
    (5, "the ledger of governed calls", LEDGER_STEP),
    (6, "what agents did", CAPTURE_STEP),
    (7, "pipelines, and what fed each stage", PIPELINE_STEP),
)
"""Each step: number, what it does, its statements."""


def migrate(connection: duckdb.DuckDBPyConnection) -> int:
    """Apply the steps that the file lacks, each in its own transaction; return the version it has now.

    Raise `Conflict` if a newer Headrace wrote the file: its tables may mean what this one does not know.
    """
    connection.execute(
        "CREATE TABLE IF NOT EXISTS schema_version "
        "(version INTEGER PRIMARY KEY, description VARCHAR NOT NULL, applied_at TIMESTAMP NOT NULL)"
    )
    found = connection.execute("SELECT coalesce(max(version), 0) FROM schema_version").fetchone()
    version, newest = int(found[0]) if found else 0, STEPS[-1][0]
    if version > newest:
        msg = f"the database has schema version {version}, this Headrace knows {newest}: use a newer Headrace"
        raise Conflict(msg, code="newer_schema")
    for number, description, statements in STEPS:
        if number <= version:
            continue
        connection.execute("BEGIN TRANSACTION")
        for statement in statements:
            connection.execute(statement)
        connection.execute(
            "INSERT INTO schema_version VALUES (?, ?, make_timestamp(?::BIGINT))",
            [number, description, time.time_ns() // 1_000],
        )
        connection.execute("COMMIT")
        version = number
    return version
