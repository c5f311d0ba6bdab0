"""One batch of results becomes rows: one transaction, each outcome once, the job's counters with it.

Rows go in as one JSON parameter for each chunk, unnested by DuckDB: 60,000 rows/s and more on one core,
where a parameter for each value takes several times as long. The text is encoded from decoded messages and not
cut out of the received bytes, so that both parsers agree on what a message says (a repeated key, say).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import Struct

from headrace.completion import generations
from headrace.completion.store import Connection
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import Result

CHUNK_ROWS: Final = 2_000
CHUNK_BYTES: Final = 8 << 20
"""Rows and JSON bytes of one statement: DuckDB parses the parameter as a whole, in memory."""

_encoder = msgspec.json.Encoder()

_SHAPE = """[{
"job": "VARCHAR", "index": "BIGINT", "generation": "INTEGER", "tenant": "VARCHAR", "function": "VARCHAR",
"status": "VARCHAR", "custom_id": "VARCHAR", "choices": "JSON", "value": "JSON",
"error": {"type": "VARCHAR", "message": "VARCHAR", "field": "VARCHAR"}, "model": "VARCHAR", "engine": "VARCHAR",
"params_fingerprint": "VARCHAR", "worker": "VARCHAR", "attempt": "INTEGER",
"usage": {"prompt_tokens": "BIGINT", "completion_tokens": "BIGINT", "cached_tokens": "BIGINT"},
"timings": {"submitted_us": "BIGINT", "received_us": "BIGINT", "started_us": "BIGINT", "finished_us": "BIGINT"},
"trace_id": "VARCHAR", "chat": "BOOLEAN", "task": "JSON", "shape": "INTEGER", "input_blob": "VARCHAR"}]"""

# The messages omit what has its default value, so each default stands here once more (a test compares them).
_INSERT = f"""
INSERT INTO outcomes
SELECT r.job, r."index", coalesce(r.generation, 1), coalesce(r.tenant, 'default'), r.function, r.status, r.custom_id,
    json_extract_string(r.choices, '$[0].text'), r.choices, nullif(r.value, 'null'),
    CASE WHEN r.choices IS NOT NULL THEN coalesce(json_extract_string(r.choices, '$[0].finish_reason'), 'stop') END,
    r.error.type, r.error.message, r.error.field, r.model, coalesce(r.engine, ''),
    coalesce(r.params_fingerprint, '0000000000000000'), coalesce(r.worker, 'unknown'), coalesce(r.attempt, 1),
    coalesce(r.usage.prompt_tokens, 0), coalesce(r.usage.completion_tokens, 0), coalesce(r.usage.cached_tokens, 0),
    make_timestamp(nullif(r.timings.submitted_us, 0)), make_timestamp(nullif(r.timings.received_us, 0)),
    make_timestamp(nullif(r.timings.started_us, 0)), make_timestamp(nullif(r.timings.finished_us, 0)),
    make_timestamp($2::BIGINT), r.trace_id, coalesce(r.chat, false), r.task, r.shape, r.input_blob
FROM (SELECT unnest(from_json($1::VARCHAR, '{_SHAPE}')) AS r)
ON CONFLICT DO NOTHING
RETURNING job, status, "index", generation, prompt_tokens, completion_tokens"""  # noqa: S608  (a constant)

_DELTAS = """(SELECT unnest(from_json($1::VARCHAR, '[{"job": "VARCHAR", "tenant": "VARCHAR", "function": "VARCHAR",
"model": "VARCHAR", "landed": "BIGINT", "ok": "BIGINT", "failed": "BIGINT", "dead": "BIGINT", "cancelled": "BIGINT",
"duplicates": "BIGINT", "tokens_in": "BIGINT", "tokens_out": "BIGINT", "max_index": "BIGINT",
"max_generation": "INTEGER"}]')) AS d)"""

_MAKE_JOBS = f"""
INSERT INTO jobs (job, tenant, function, model, opened_at)
SELECT d.job, d.tenant, d.function, d.model, make_timestamp($2::BIGINT) FROM {_DELTAS}
ON CONFLICT DO NOTHING"""  # noqa: S608

_COUNT = f"""
UPDATE jobs SET
    landed = landed + d.landed, ok = ok + d.ok, failed = failed + d.failed, dead = dead + d.dead,
    cancelled = cancelled + d.cancelled, duplicates = duplicates + d.duplicates,
    tokens_in = tokens_in + d.tokens_in, tokens_out = tokens_out + d.tokens_out,
    max_index = greatest(max_index, d.max_index), max_generation = greatest(max_generation, d.max_generation),
    generation = greatest(coalesce(generation, 1), d.max_generation), model = coalesce(jobs.model, d.model)
FROM {_DELTAS} WHERE jobs.job = d.job
RETURNING jobs.job, jobs.generation"""  # noqa: S608


class Delta(Struct, kw_only=True):
    """What one batch changes of one job: rows really inserted, by status, and repeats that changed nothing."""

    job: str
    tenant: str
    function: str
    model: str | None
    landed: int = 0
    ok: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    duplicates: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    max_index: int = -1
    max_generation: int = 1


def insert_results(connection: Connection, results: Sequence[Result], now_us: int) -> list[str]:
    """Insert `results` and move the counters of their jobs; return the jobs. Call it inside a transaction.

    The first outcome of a (job, index, generation) wins, whether the repeat comes in a later batch or in this one.
    Raise `InvalidInput` if a result's text is not UTF-8.
    """
    deltas: dict[str, Delta] = {}
    later: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    received = Counter([r.job for r in results])
    for r in results:
        if r.job not in deltas:
            deltas[r.job] = Delta(job=r.job, tenant=r.tenant, function=r.function, model=r.model)
    for text in encode_chunks(results):
        for job, status, index, generation, tokens_in, tokens_out in connection.execute(
            _INSERT, [text, now_us]
        ).fetchall():
            delta = deltas[job]
            delta.landed += 1
            if status == "ok":
                delta.ok += 1
            else:
                setattr(delta, status, getattr(delta, status) + 1)
            delta.tokens_in += tokens_in
            delta.tokens_out += tokens_out
            delta.max_index = max(delta.max_index, index)
            if generation > 1:
                delta.max_generation = max(delta.max_generation, generation)
                later[job].append((index, generation))
    for job, delta in deltas.items():
        delta.duplicates = received[job] - delta.landed
    apply_deltas(connection, list(deltas.values()), now_us, later)
    return list(deltas)


def apply_deltas(
    connection: Connection,
    deltas: list[Delta],
    now_us: int,
    later: Mapping[str, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> None:
    """Add `deltas` to the counters of their jobs; a job that is not known yet (its `opened` comes later) is made.

    `later` are the (index, generation) of new outcomes that are not of the first generation, by job.
    """
    known = _count(connection, deltas)
    if new := [d for d in deltas if d.job not in known]:
        connection.execute(_MAKE_JOBS, [_encoder.encode(new).decode(), now_us])
        known |= _count(connection, new)
    for delta in deltas:
        if known.get(delta.job, 1) > 1 and delta.landed:
            generations.settle(connection, delta.job, delta.landed, later.get(delta.job, ()))


def _count(connection: Connection, deltas: list[Delta]) -> dict[str, int]:
    """Move the counters of the jobs that are known; return those with their latest generation."""
    return dict(connection.execute(_COUNT, [_encoder.encode(deltas).decode()]).fetchall())


def encode_chunks(results: Sequence[Result]) -> Iterator[str]:
    """JSON arrays of at most `CHUNK_ROWS` results and about `CHUNK_BYTES` each."""
    for start in range(0, len(results), CHUNK_ROWS):
        yield from _halved(results[start : start + CHUNK_ROWS])


def _halved(results: Sequence[Result]) -> Iterator[str]:
    data = _encoder.encode(results)
    if len(data) > CHUNK_BYTES and len(results) > 1:
        middle = len(results) // 2
        del data
        yield from _halved(results[:middle])
        yield from _halved(results[middle:])
        return
    try:
        yield data.decode()
    except UnicodeDecodeError:
        msg = "a result holds bytes that are not UTF-8"
        raise InvalidInput(msg) from None
