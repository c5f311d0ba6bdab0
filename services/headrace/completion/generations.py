"""Attempt generations in the data plane: which outcome of an index counts, and the counters that follow from it.

The invariant: each outcome of a generation above 1 has its row in `retry_items`. A retry makes the rows before its
tasks are stored; landing makes those that are missing (somebody published by hand). So the view `current_outcomes` has
one outcome of an index, or none while its latest generation is under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.completion.store import Connection

_PAIRS = """(SELECT p[1] AS "index", p[2]::INTEGER AS generation FROM (
    SELECT unnest(from_json($2::VARCHAR, '[["BIGINT"]]')) AS p))"""

_EXPECTED = f"""
SELECT count(*) FROM {_PAIRS} AS l
WHERE EXISTS (
    SELECT 1 FROM retry_items AS r WHERE r.job = $1 AND r."index" = l."index" AND r.generation = l.generation)
AND NOT EXISTS (
    SELECT 1 FROM retry_items AS r WHERE r.job = $1 AND r."index" = l."index" AND r.generation > l.generation)
"""  # noqa: S608  (constants)

_ADD_MISSING = f"""
INSERT INTO retry_items SELECT $1, l."index", l.generation FROM {_PAIRS} AS l ON CONFLICT DO NOTHING"""  # noqa: S608

_RECOUNT = """
UPDATE jobs SET landed = c.landed, ok = c.ok, failed = c.failed, dead = c.dead, cancelled = c.cancelled
FROM (
    SELECT count(*) AS landed, count(*) FILTER (status = 'ok') AS ok, count(*) FILTER (status = 'failed') AS failed,
        count(*) FILTER (status = 'dead') AS dead, count(*) FILTER (status = 'cancelled') AS cancelled
    FROM current_outcomes WHERE job = $1
) AS c WHERE jobs.job = $1"""


def settle(connection: Connection, job: str, landed: int, later: Sequence[tuple[int, int]]) -> None:
    """Put the counters of a retried job right after `landed` new outcomes, `later` (index, generation) among them.

    Outcomes that a retry waits for have been counted rightly, since the ones before them left the counters when it
    began. Anything else (an outcome of an older generation that comes late, one that nobody asked for) is counted anew.
    """
    pairs = msgspec.json.encode(later).decode()
    if later and len(later) == landed:
        row = connection.execute(_EXPECTED, [job, pairs]).fetchone()
        if row is not None and row[0] == landed:
            return
    if later:
        connection.execute(_ADD_MISSING, [job, pairs])
    recount(connection, job)


def recount(connection: Connection, job: str) -> None:
    """Count the job's current outcomes anew."""
    connection.execute(_RECOUNT, [job])
