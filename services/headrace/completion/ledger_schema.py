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

# An attempt holds its money while nothing has ended it: a record of doubt after an end holds nothing any more.
_ATTEMPTS: Final = """
CREATE VIEW call_attempts AS
SELECT tenant, call, attempt, any_value(callee) AS callee, any_value(effect) AS effect, any_value(agent) AS agent,
    any_value(model) AS model, any_value(task) AS task, any_value(conversation) AS conversation,
    CASE arg_max(kind, sequence) WHEN 'intent' THEN 'open' ELSE arg_max(kind, sequence) END AS state,
    any_value(owner) FILTER (kind = 'intent') AS owner,
    any_value(written_at) FILTER (kind = 'intent') AS asked_at, max(written_at) AS last_at,
    any_value(written_at) FILTER (kind = 'in_doubt') AS doubted_at,
    max(max_cost_micro)::BIGINT AS max_cost_micro, sum(cost_micro)::BIGINT AS posted_micro,
    CASE WHEN bool_or(kind IN ('completed', 'failed', 'attempt_failed')) THEN 0 ELSE max(max_cost_micro) END::BIGINT
        AS held_micro,
    greatest(0, sum(cost_micro) - max(max_cost_micro))::BIGINT AS overrun_micro,
    sum(input_tokens)::BIGINT AS input_tokens, sum(output_tokens)::BIGINT AS output_tokens,
    sum(cached_tokens)::BIGINT AS cached_tokens, sum(reasoning_tokens)::BIGINT AS reasoning_tokens,
    any_value(usage_source) AS usage_source, bool_or(partial) AS partial,
    arg_max_null(error_type, sequence) AS error_type, arg_max_null(error_message, sequence) AS error_message,
    arg_max_null(resolved_by, sequence) AS resolved_by, any_value(trace_id) AS trace_id,
    min(sequence) AS first_sequence, max(sequence) AS last_sequence
FROM call_records GROUP BY tenant, call, attempt"""

_CALLS: Final = """
CREATE VIEW calls AS
SELECT tenant, call, arg_min(callee, attempt) AS callee, arg_min(effect, attempt) AS effect,
    arg_min(agent, attempt) AS agent, arg_min(model, attempt) AS model, arg_min(task, attempt) AS task,
    arg_min(conversation, attempt) AS conversation,
    CASE
        WHEN arg_max(state, attempt) IN ('failed', 'attempt_failed') AND bool_or(state = 'in_doubt') THEN 'in_doubt'
        WHEN arg_max(state, attempt) = 'attempt_failed' THEN 'retrying'
        ELSE arg_max(state, attempt)
    END AS state,
    max(attempt) AS attempts, sum(posted_micro)::BIGINT AS posted_micro, sum(held_micro)::BIGINT AS held_micro,
    sum(overrun_micro)::BIGINT AS overrun_micro,
    sum(input_tokens)::BIGINT AS input_tokens, sum(output_tokens)::BIGINT AS output_tokens,
    arg_max_null(error_type, last_sequence) AS error_type, arg_max_null(resolved_by, last_sequence) AS resolved_by,
    min(asked_at) AS asked_at, max(last_at) AS last_at, arg_min(trace_id, attempt) AS trace_id,
    max(last_sequence) AS last_sequence
FROM call_attempts GROUP BY tenant, call"""

# By attempts, as budgets are charged: each in the period of its own intent.
_SPEND: Final = """
CREATE VIEW spend AS
SELECT tenant, agent, callee, model, task, CAST(asked_at AS DATE) AS day,
    count(*) FILTER (attempt = 1) AS calls, count(*) AS attempts,
    sum(posted_micro)::BIGINT AS posted_micro, sum(held_micro)::BIGINT AS held_micro,
    coalesce(sum(held_micro) FILTER (state = 'in_doubt'), 0)::BIGINT AS in_doubt_micro,
    sum(overrun_micro)::BIGINT AS overrun_micro,
    sum(input_tokens)::BIGINT AS input_tokens, sum(output_tokens)::BIGINT AS output_tokens
FROM call_attempts GROUP BY ALL"""

_IN_DOUBT: Final = """
CREATE VIEW in_doubt AS
SELECT tenant, call, attempt, callee, effect, agent, model, task, held_micro, doubted_at AS since, error_type,
    error_message, owner, trace_id
FROM call_attempts WHERE state = 'in_doubt'"""

_HISTORY: Final = """
CREATE VIEW call_history AS
SELECT tenant, call, sequence, written_at, attempt, kind, owner, epoch,
    CASE kind WHEN 'intent' THEN max_cost_micro END AS reserved_micro,
    CASE WHEN kind IN ('completed', 'failed') THEN cost_micro END AS cost_micro,
    request_sent, usage_source, error_type, error_message, resolved_by,
    nullif(json_extract_string(record, '$.why'), '') AS why
FROM call_records"""

_BUDGETS: Final = """
CREATE VIEW budgets AS
SELECT tenant, budget, arg_max(unit, sequence) AS unit, arg_max("limit", sequence) AS "limit",
    arg_max(period, sequence) AS period, arg_max_null(agent, sequence) AS agent,
    arg_max(periods, sequence) AS periods, max(written_at) AS written_at, max(sequence) AS sequence
FROM budget_heads GROUP BY tenant, budget"""

# A head forgets old periods: the last head that names a period has its account.
_PERIODS: Final = """
CREATE VIEW budget_periods AS
WITH named AS (
    SELECT tenant, budget, unit, "limit", period, agent, sequence,
        unnest(map_entries(periods::MAP(VARCHAR, MAP(VARCHAR, BIGINT)))) AS entry
    FROM budget_heads
)
SELECT tenant, budget, arg_max(unit, sequence) AS unit, arg_max("limit", sequence) AS "limit",
    arg_max(period, sequence) AS period, arg_max_null(agent, sequence) AS agent, entry.key AS name,
    coalesce(arg_max_null(entry.value['posted'], sequence), 0) AS posted,
    coalesce(arg_max_null(entry.value['held'], sequence), 0) AS held,
    coalesce(arg_max_null(entry.value['in_doubt'], sequence), 0) AS in_doubt,
    coalesce(arg_max_null(entry.value['overrun'], sequence), 0) AS overrun, max(sequence) AS sequence
FROM named GROUP BY tenant, budget, entry.key"""

LEDGER_STEP: Final[tuple[str, ...]] = (
    f"CREATE TABLE call_records ({RECORD_COLUMNS})",
    f"CREATE TABLE budget_heads ({HEAD_COLUMNS})",
    _ATTEMPTS,
    _CALLS,
    _SPEND,
    _IN_DOUBT,
    _HISTORY,
    _BUDGETS,
    _PERIODS,
)
"""The statements of the schema step that makes the ledger's tables."""

LEDGER_TABLES: Final = (
    "call_records", "budget_heads", "call_attempts", "calls", "spend", "in_doubt", "call_history", "budgets",
    "budget_periods",
)  # fmt: skip
"""What of it a query may read."""
