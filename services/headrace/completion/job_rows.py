"""The state of jobs, as SQL on the table `jobs`: `open → sealed → completed | completed_with_errors | cancelled`.

A retry brings a job that ended otherwise than `cancelled` back to `sealed`, as its next generation (`retry_rows`).

Each function works inside the caller's transaction, changes nothing when repeated, and does not depend on the order
in which events arrive (a redelivered `opened` may come after `sealed`). `cancelling` stands between a
cancellation's intent and its end, so that a start-up can take it up again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.completion.outcomes import Delta, apply_deltas
from headrace.completion.store import Connection
from headrace.contracts.messages import Cause, JobCancelled, JobCompleted, JobOpened, JobSealed

ENDED: Final = ("completed", "completed_with_errors", "cancelled")
"""States that a job leaves by a retry only."""

FILL_ROWS: Final = 50_000
"""Rows of one transaction when a job of millions is cancelled: what is not committed yet is held in memory."""

_OPENED = """
INSERT INTO jobs (job, tenant, function, model, lane, source, input_fingerprint, opened_at, trace_id, deadline_at,
    max_failed)
VALUES ($job, $tenant, $function, $model, $lane, $source, $fingerprint, make_timestamp($at::BIGINT), $trace_id,
    make_timestamp($deadline::BIGINT), $max_failed)
ON CONFLICT (job) DO UPDATE SET
    tenant = excluded.tenant, function = excluded.function, model = coalesce(excluded.model, jobs.model),
    lane = excluded.lane, source = excluded.source, input_fingerprint = excluded.input_fingerprint,
    opened_at = excluded.opened_at, trace_id = excluded.trace_id, max_failed = excluded.max_failed,
    deadline_at = CASE WHEN coalesce(jobs.generation, 1) = 1 THEN excluded.deadline_at ELSE jobs.deadline_at END"""

_SEALED = """
INSERT INTO jobs (job, state, count, refused, shapes, sealed_at, opened_at)
VALUES ($job, 'sealed', $count, $refused, $shapes, make_timestamp($at::BIGINT), make_timestamp($at::BIGINT))
ON CONFLICT (job) DO UPDATE SET
    count = coalesce(jobs.count, excluded.count), refused = excluded.refused, sealed_at = excluded.sealed_at,
    shapes = coalesce(jobs.shapes, excluded.shapes),
    state = CASE WHEN jobs.state = 'open' THEN 'sealed' ELSE jobs.state END"""

_CANCELLING = """
INSERT INTO jobs (job, state, cancel_reason, cancel_cause, cancelled_at, opened_at)
VALUES ($job, 'cancelling', $reason, $cause, make_timestamp($at::BIGINT), make_timestamp($at::BIGINT))
ON CONFLICT (job) DO UPDATE SET
    state = 'cancelling', cancel_reason = excluded.cancel_reason, cancel_cause = excluded.cancel_cause,
    cancelled_at = excluded.cancelled_at
    WHERE jobs.state IN ('open', 'sealed')"""

_CANCEL_COUNT = """
UPDATE jobs SET count = $count, shapes = coalesce($shapes, shapes) WHERE job = $job AND state = 'cancelling'"""

# The end of an older generation says nothing of the one that runs.
_ANNOUNCED = """
UPDATE jobs SET announced = true WHERE job = $job AND NOT announced AND coalesce(generation, 1) <= $generation"""

_NAMED = "SELECT unnest(from_json($1::VARCHAR, '[\"VARCHAR\"]'))"

_FULL = f"""
SELECT job, count, max_index FROM jobs
WHERE state = 'sealed' AND count IS NOT NULL AND landed >= count AND job IN ({_NAMED})"""  # noqa: S608

# Items that missed the deadline have failed because of it: such a job is the deadline's to end (`policy`), however
# quickly its last item landed.
_MISSED = f"""
SELECT job FROM jobs AS j WHERE deadline_at <= make_timestamp($2::BIGINT) AND job IN ({_NAMED})
    AND EXISTS (SELECT 1 FROM current_outcomes AS o WHERE o.job = j.job AND o.error_type = 'deadline')"""  # noqa: S608

_BELOW = """SELECT count(DISTINCT "index") FROM current_outcomes WHERE job = $1 AND "index" < $2"""

_FINISH = f"""
UPDATE jobs SET ended_at = make_timestamp($2::BIGINT),
    state = CASE WHEN failed + dead + cancelled > 0 THEN 'completed_with_errors' ELSE 'completed' END
WHERE state = 'sealed' AND job IN ({_NAMED})"""  # noqa: S608

# What the outcome of an item that did not run has as its error's type, by what ended the job.
_WHY = "CASE j.cancel_cause WHEN 'deadline' THEN 'deadline' WHEN 'failures' THEN 'stopped_early' ELSE 'cancelled' END"

_FILL = f"""
INSERT INTO outcomes (job, "index", generation, tenant, function, status, attempt, prompt_tokens, completion_tokens,
    cached_tokens, landed_at, chat, model, error_type, error_message)
SELECT $job, i, 1, j.tenant, j.function, 'cancelled', 0, 0, 0, 0, make_timestamp($at::BIGINT), false, j.model,
    {_WHY}, nullif(j.cancel_reason, '')
FROM range($first::BIGINT, $end::BIGINT) AS r(i), (SELECT * FROM jobs WHERE job = $job) AS j
WHERE NOT EXISTS (
    SELECT 1 FROM outcomes AS o
    WHERE o.job = $job AND o."index" = r.i AND o."index" >= $first::BIGINT AND o."index" < $end::BIGINT)"""  # noqa: S608  (constants)

# What a retry had not brought to an outcome is cancelled in its own generation, beside the outcome that it was to mend.
_FILL_RETRIES = f"""
INSERT INTO outcomes (job, "index", generation, tenant, function, status, attempt, prompt_tokens, completion_tokens,
    cached_tokens, landed_at, chat, model, error_type, error_message, custom_id, params_fingerprint, shape)
SELECT r.job, r."index", r.generation, o.tenant, o.function, 'cancelled', 0, 0, 0, 0, make_timestamp($at::BIGINT),
    o.chat, o.model, {_WHY}, nullif(j.cancel_reason, ''), o.custom_id, o.params_fingerprint, o.shape
FROM retry_items AS r JOIN jobs AS j ON j.job = r.job
    JOIN outcomes AS o ON o.job = r.job AND o."index" = r."index" AND o.generation < r.generation
WHERE r.job = $job AND r."index" >= $first::BIGINT AND r."index" < $end::BIGINT
    AND NOT EXISTS (
        SELECT 1 FROM outcomes AS done
        WHERE done.job = r.job AND done."index" = r."index" AND done.generation >= r.generation)
QUALIFY row_number() OVER (PARTITION BY r."index" ORDER BY r.generation DESC, o.generation DESC) = 1"""  # noqa: S608  (constants)

_COUNT_AND_GENERATION = """
SELECT count, coalesce((SELECT max(r.generation) FROM retries AS r WHERE r.job = jobs.job), 1)
FROM jobs WHERE job = ?"""

_CANCELLED = """
UPDATE jobs SET state = 'cancelled', ended_at = make_timestamp($at::BIGINT) WHERE job = $job"""


def opened(connection: Connection, event: JobOpened) -> None:
    """Note who opened the job and for what."""
    parts = (event.traceparent or "").split("-")
    connection.execute(
        _OPENED,
        {
            "job": event.job,
            "tenant": event.tenant,
            "function": event.function,
            "model": event.model,
            "lane": event.lane.value,
            "source": event.source,
            "fingerprint": event.input_fingerprint,
            "at": event.at_us or now_us(),
            "deadline": event.deadline_us,
            "max_failed": event.max_failed,
            "trace_id": parts[1] if len(parts) == 4 else None,  # noqa: PLR2004  (W3C trace context)
        },
    )


def sealed(connection: Connection, event: JobSealed) -> None:
    """Note how many items the job has; a job that is being cancelled keeps the count it was cancelled with."""
    values = {
        "job": event.job,
        "count": event.count,
        "refused": event.refused,
        "shapes": _shapes(event.shapes),
        "at": event.at_us or now_us(),
    }
    connection.execute(_SEALED, values)


def cancelling(
    connection: Connection, job: str, reason: str, *, cause: Cause = "requested", at_us: int = 0
) -> str:
    """Note the intent to cancel, and why, unless the job has ended; return its state now."""
    values = {"job": job, "reason": reason, "cause": cause, "at": at_us or now_us()}
    connection.execute(_CANCELLING, values)
    return state_of(connection, job) or "cancelling"


def cancelled_event(connection: Connection, event: JobCancelled) -> str:
    """Note the event that says how many items the cancelled job has; return the job's state now."""
    state = cancelling(connection, event.job, event.reason, cause=event.cause, at_us=event.at_us)
    connection.execute(
        _CANCEL_COUNT, {"job": event.job, "count": event.count, "shapes": _shapes(event.shapes)}
    )
    return state


def completed(connection: Connection, event: JobCompleted) -> None:
    """Note that the last event of the job, as far as that generation goes, is stored."""
    connection.execute(_ANNOUNCED, {"job": event.job, "generation": event.generation})


def finish_full(connection: Connection, jobs: Sequence[str]) -> list[JobCompleted]:
    """End those of `jobs` that are sealed and have an outcome for each index; return their last events."""
    names = _json(jobs)
    found = connection.execute(_FULL, [names]).fetchall()
    full = [job for job, count, max_index in found if max_index < count or _has_all(connection, job, count)]
    if full:
        missed = {job for (job,) in connection.execute(_MISSED, [_json(full), now_us()]).fetchall()}
        full = [job for job in full if job not in missed]
    if not full:
        return []
    connection.execute(_FINISH, [_json(full), now_us()])
    return endings(connection, full)


def _has_all(connection: Connection, job: str, count: int) -> bool:
    # Only a job with an outcome beyond its last index comes here: the number of outcomes alone proves nothing then.
    row = connection.execute(_BELOW, [job, count]).fetchone()
    return row is not None and row[0] == count


def fill_cancelled(connection: Connection, job: str, first: int) -> tuple[int, JobCompleted | None]:
    """Give what has no current outcome from index `first` on a `cancelled` one, as many as one transaction should hold.

    Return where to go on, and at the end the job's last event. A job that is not being cancelled is left alone.
    """
    found = connection.execute(
        "SELECT count, tenant, function FROM jobs WHERE job = ? AND state = 'cancelling'", [job]
    ).fetchone()
    if found is None or found[0] is None:
        return -1, None
    count, tenant, function = found
    now, end = now_us(), min(count, first + FILL_ROWS)
    part = {"job": job, "first": first, "end": end, "at": now}
    added = sum(int(connection.execute(s, part).fetchall()[0][0]) for s in (_FILL, _FILL_RETRIES))
    delta = Delta(
        job=job,
        tenant=tenant,
        function=function,
        model=None,
        landed=added,
        cancelled=added,
        max_index=end - 1,
    )
    apply_deltas(connection, [delta], now)
    if end < count:
        return end, None
    connection.execute(_CANCELLED, {"job": job, "at": now})
    return -1, endings(connection, [job])[0]


def endings(connection: Connection, jobs: Sequence[str] | None = None) -> list[JobCompleted]:
    """The last event of each ended job: of `jobs`, or of all whose event is not known to be stored."""
    condition = "NOT announced" if jobs is None else f"job IN ({_NAMED})"
    rows = connection.execute(
        f"""SELECT job, state, coalesce(count, landed), ok, failed, dead, cancelled, epoch_us(ended_at),
            coalesce(generation, 1), coalesce(cancel_cause, 'requested'), coalesce(cancel_reason, '')
        FROM jobs WHERE state IN ('completed', 'completed_with_errors', 'cancelled') AND {condition}""",  # noqa: S608
        [] if jobs is None else [_json(jobs)],
    ).fetchall()
    return [
        JobCompleted(
            job=r[0],
            state=r[1],
            count=r[2],
            ok=r[3],
            failed=r[4],
            dead=r[5],
            cancelled=r[6],
            at_us=r[7] or 0,
            generation=r[8],
            cause=r[9] if r[1] == "cancelled" else None,
            reason=r[10] if r[1] == "cancelled" else "",
        )
        for r in rows
    ]


def being_cancelled(connection: Connection) -> list[tuple[str, str, Cause]]:
    """Each job whose cancellation has begun and not ended, with its reason and cause."""
    rows = connection.execute(
        "SELECT job, coalesce(cancel_reason, ''), coalesce(cancel_cause, 'requested') FROM jobs "
        "WHERE state = 'cancelling'"
    )
    return [(job, reason, cause) for job, reason, cause in rows.fetchall()]


def state_of(connection: Connection, job: str) -> str | None:
    """The job's state, None if the data plane does not know it."""
    row = connection.execute("SELECT state FROM jobs WHERE job = ?", [job]).fetchone()
    return None if row is None else str(row[0])


def count_and_generation(connection: Connection, job: str) -> tuple[int | None, int]:
    """How many items the job has (None while its intake is open), and the generation of its last retry, else 1."""
    row = connection.execute(_COUNT_AND_GENERATION, [job]).fetchone()
    return (None, 1) if row is None else (row[0], int(row[1]))


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1_000


def _shapes(counts: dict[str, int]) -> str | None:
    """Items by shape as the column `shapes` has them; None where they are not known."""
    return msgspec.json.encode(counts).decode() if counts else None


def _json(names: Sequence[str]) -> str:
    return "[" + ",".join(f'"{name}"' for name in names) + "]"
