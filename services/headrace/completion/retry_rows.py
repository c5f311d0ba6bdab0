"""Retries in the data plane: the tables `retries` and `retry_items`, and what a retry does to its job.

Each function works inside the caller's transaction and changes nothing when it is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from headrace.completion import generations
from headrace.completion.job_rows import ENDED, now_us
from headrace.completion.store import Connection
from headrace.contracts.errors import Conflict, NotFound, Refused
from headrace.contracts.messages import JobRetried
from headrace.mesh.crash import crash_point

MAX_GENERATION: Final = 10_000
"""The contracts' bound of an attempt generation."""

_JOB = """
SELECT state, coalesce(generation, 1), count, landed, coalesce(count - landed, 0) FROM jobs WHERE job = ?"""

_EXISTING = "SELECT count, condition FROM retries WHERE job = ? AND generation = ?"

# An item beyond the job's last index is nobody's: it was published by hand.
_CANDIDATES = """
FROM current_outcomes AS o
WHERE o.job = $job AND o.status IN ('failed', 'dead') AND o."index" < $count"""

_CHOSEN = """ AND o."index" IN (SELECT unnest(from_json($chosen::VARCHAR, '["BIGINT"]')))"""

_BEGIN = """
INSERT INTO retries (job, generation, count, condition, asked_at)
VALUES ($job, $generation, $count, $condition, make_timestamp($at::BIGINT))"""

# A deadline that has passed would end the retry before it began.
_REOPEN = """
UPDATE jobs SET generation = $generation, state = 'sealed', announced = false, ended_at = NULL,
    deadline_at = CASE WHEN deadline_at > make_timestamp($at::BIGINT) THEN deadline_at END
WHERE job = $job"""

_OPEN = """
SELECT r.job, r.generation, r.count, r.condition, epoch_us(r.asked_at), j.lane, j.input_fingerprint
FROM retries AS r JOIN jobs AS j ON j.job = r.job
WHERE NOT r.stored AND j.state = 'sealed' AND r.generation = j.generation"""

_RETRIED = """
INSERT INTO retries (job, generation, count, condition, asked_at, stored)
SELECT job, $generation, $count, $condition, make_timestamp($at::BIGINT), true FROM jobs
WHERE job = $job AND count IS NOT NULL
ON CONFLICT DO NOTHING"""

_MOVE_GENERATION = """
UPDATE jobs SET generation = greatest(coalesce(generation, 1), $generation) WHERE job = $job AND count IS NOT NULL"""


class Begun(Struct, frozen=True, kw_only=True):
    """What `begin` did. `again`: this retry had begun before. `left_out` items fit, but do not carry their task."""

    job: str
    generation: int
    resubmitted: int
    again: bool = False
    left_out: int = 0


class Retry(Struct, frozen=True):
    """A retry whose items are not all known to be stored."""

    job: str
    generation: int
    count: int
    condition: str
    asked_us: int
    lane: str = "normal"
    input_fingerprint: str | None = None


def existing(connection: Connection, job: str, generation: int | None, condition: str) -> Begun | None:
    """The retry that began as `generation` before, None if there is none; `Conflict` if it had another condition."""
    row = None if generation is None else connection.execute(_EXISTING, [job, generation]).fetchone()
    if row is None or generation is None:
        return None
    if row[1] != condition:
        msg = f"generation {generation} of job {job} is another retry, of the items where {row[1] or 'true'}"
        raise Conflict(msg, code="other_retry")
    return Begun(job=job, generation=generation, resubmitted=row[0], again=True)


def check(connection: Connection, job: str, generation: int | None) -> tuple[int, int]:
    """How many items `job` has and the generation that a retry of it now is.

    Raise `NotFound`; `Refused` if it runs, was cancelled, or ran too often; `Conflict` if that is not `generation`.
    """
    row = connection.execute(_JOB, [job]).fetchone()
    if row is None:
        msg = f"no job {job!r}"
        raise NotFound(msg, code="unknown_job")
    state, last, count, landed, left = row
    if state == "cancelled":
        msg = f"job {job} was cancelled: it does not run again; submit what is missing as another job"
        raise Refused(msg, code="job_cancelled")
    if state not in ENDED:
        how = f"{left:,} items left" if count is not None else f"{landed:,} items landed and more to come"
        msg = f"job {job} is still running ({state}), {how}: wait for its end, or cancel it"
        raise Refused(msg, code="still_running")
    if generation not in (None, last + 1):
        msg = f"the next generation of job {job} is {last + 1}, not {generation}: read its status again"
        raise Conflict(msg, code="other_generation")
    if last >= MAX_GENERATION:
        msg = f"job {job} has had {last} generations: submit its items as another job"
        raise Refused(msg, code="too_many_generations")
    return int(count or 0), int(last) + 1


def begin(
    connection: Connection, job: str, generation: int | None, condition: str, chosen: Sequence[int] | None
) -> Begun:
    """Begin the next generation of `job` with the items that are failed or dead and carry their task.

    `chosen` are the indices that fit `condition`, None without a condition. If there is no such item, nothing is
    changed. Raise as `existing` and `check` do.
    """
    begun = existing(connection, job, generation, condition)
    if begun is not None:
        return begun
    count, mine = check(connection, job, generation)
    where, values = _CANDIDATES, {"job": job, "count": count}
    if chosen is not None:
        where, values = where + _CHOSEN, values | {"chosen": msgspec.json.encode(chosen).decode()}
    tasks = connection.execute(f"SELECT count(*), count(o.task) {where}", values).fetchall()
    fitting, with_task = tasks[0]
    if not with_task:
        return Begun(job=job, generation=mine - 1, resubmitted=0, left_out=fitting)
    connection.execute(
        f'INSERT INTO retry_items SELECT o.job, o."index", $generation {where} AND o.task IS NOT NULL',
        values | {"generation": mine},
    )
    at = now_us()
    connection.execute(
        _BEGIN, {"job": job, "generation": mine, "count": with_task, "condition": condition, "at": at}
    )
    connection.execute(_REOPEN, {"job": job, "generation": mine, "at": at})
    generations.recount(connection, job)
    crash_point("retry-before-commit")
    return Begun(job=job, generation=mine, resubmitted=with_task, left_out=fitting - with_task)


def open_retries(connection: Connection, job: str | None = None) -> list[Retry]:
    """The retries that have begun and whose items are not all known to be stored: of `job`, or all."""
    more = "" if job is None else " AND r.job = ?"
    return [Retry(*row) for row in connection.execute(_OPEN + more, [] if job is None else [job]).fetchall()]


def running_generation(connection: Connection, job: str) -> int | None:
    """The job's generation while it waits for outcomes; None if it has ended, or is being cancelled."""
    row = connection.execute(
        "SELECT coalesce(generation, 1) FROM jobs WHERE job = ? AND state = 'sealed'", [job]
    ).fetchone()
    return None if row is None else int(row[0])


def all_stored(connection: Connection, job: str, generation: int) -> None:
    """Note that every item of the retry is stored."""
    connection.execute(
        "UPDATE retries SET stored = true WHERE job = ? AND generation = ? AND NOT stored", [job, generation]
    )


def retried(connection: Connection, event: JobRetried) -> None:
    """Note a retry that the data plane does not know of: its file was made anew since."""
    values = {"job": event.job, "generation": event.generation}
    more = {"count": event.count, "condition": event.where, "at": event.at_us or now_us()}
    connection.execute(_RETRIED, values | more)
    connection.execute(_MOVE_GENERATION, values)
