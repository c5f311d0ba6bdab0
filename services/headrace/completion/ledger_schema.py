"""The tables and views of governed calls."""

from __future__ import annotations

from typing import Final

RECORD_COLUMNS: Final = """
    sequence BIGINT PRIMARY KEY,
    tenant VARCHAR NOT NULL,
    call VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    owner VARCHAR NOT NULL,
    epoch BIGINT NOT NULL,
    written_at TIMESTAMP NOT NULL,
    callee VARCHAR,
    effect VARCHAR,
    agent VARCHAR,
    model VARCHAR,
    task VARCHAR,
    conversation VARCHAR,
    max_cost_micro BIGINT NOT NULL,
    cost_micro BIGINT NOT NULL,
    input_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    reasoning_tokens BIGINT NOT NULL,
    usage_source VARCHAR,
    partial BOOLEAN NOT NULL,
    error_type VARCHAR,
    error_message VARCHAR,
    request_sent BOOLEAN,
    resolved_by VARCHAR,
    trace_id VARCHAR,
    record JSON NOT NULL"""

HEAD_COLUMNS: Final = """
    sequence BIGINT PRIMARY KEY,
    tenant VARCHAR NOT NULL,
    budget VARCHAR NOT NULL,
    unit VARCHAR NOT NULL,
    "limit" BIGINT NOT NULL,
    period VARCHAR NOT NULL,
    agent VARCHAR,
    periods JSON NOT NULL,
    written_at TIMESTAMP NOT NULL"""

_CALLS: Final = """
CREATE VIEW calls AS
WITH attempts AS (
    SELECT tenant, call, attempt, arg_max(kind, sequence) AS kind, max(written_at) AS written_at,
        max(max_cost_micro) AS max_cost_micro, sum(cost_micro) AS cost_micro, max(sequence) AS last_sequence,
        sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
        arg_max(error_type, sequence) AS error_type, arg_max(resolved_by, sequence) AS resolved_by
    FROM call_records GROUP BY ALL
), asked AS (
    SELECT tenant, call, callee, effect, agent, model, task, conversation, trace_id, written_at AS asked_at
    FROM call_records WHERE kind = 'intent' AND attempt = 1
)
SELECT a.tenant, a.call, any_value(callee) AS callee, any_value(effect) AS effect, any_value(agent) AS agent,
    any_value(model) AS model, any_value(task) AS task, any_value(conversation) AS conversation,
    CASE
        WHEN arg_max(a.kind, a.attempt) IN ('failed', 'attempt_failed') AND bool_or(a.kind = 'in_doubt') THEN 'in_doubt'
        WHEN arg_max(a.kind, a.attempt) = 'intent' THEN 'open'
        WHEN arg_max(a.kind, a.attempt) = 'attempt_failed' THEN 'retrying'
        ELSE arg_max(a.kind, a.attempt)
    END AS state,
    max(a.attempt) AS attempts, sum(a.cost_micro)::BIGINT AS posted_micro,
    coalesce(sum(a.max_cost_micro) FILTER (a.kind IN ('intent', 'in_doubt')), 0)::BIGINT AS held_micro,
    sum(a.input_tokens)::BIGINT AS input_tokens, sum(a.output_tokens)::BIGINT AS output_tokens,
    arg_max(a.error_type, a.attempt) AS error_type, arg_max(a.resolved_by, a.attempt) AS resolved_by,
    any_value(asked_at) AS asked_at, max(a.written_at) AS last_at, any_value(trace_id) AS trace_id,
    max(a.last_sequence) AS last_sequence
FROM attempts AS a LEFT JOIN asked USING (tenant, call) GROUP BY a.tenant, a.call"""

_VIEWS: Final = (
    _CALLS,
    """
CREATE VIEW spend AS
SELECT tenant, agent, callee, model, task, CAST(asked_at AS DATE) AS day, count(*) AS calls,
    sum(posted_micro)::BIGINT AS posted_micro, sum(held_micro)::BIGINT AS held_micro,
    sum(input_tokens)::BIGINT AS input_tokens, sum(output_tokens)::BIGINT AS output_tokens
FROM calls GROUP BY ALL""",
    """
CREATE VIEW in_doubt AS
SELECT tenant, call, callee, effect, agent, model, held_micro, attempts, last_at AS since, error_type FROM calls
WHERE state = 'in_doubt'""",
    """
CREATE VIEW budgets AS
SELECT tenant, budget, arg_max(unit, sequence) AS unit, arg_max("limit", sequence) AS "limit",
    arg_max(period, sequence) AS period, arg_max(agent, sequence) AS agent, arg_max(periods, sequence) AS periods,
    max(written_at) AS written_at, max(sequence) AS sequence
FROM budget_heads GROUP BY tenant, budget""",
)

LEDGER_STEP: Final[tuple[str, ...]] = (
    f"CREATE TABLE call_records ({RECORD_COLUMNS})",
    f"CREATE TABLE budget_heads ({HEAD_COLUMNS})",
    *_VIEWS,
)
"""The statements of the schema step that makes the ledger's tables."""
