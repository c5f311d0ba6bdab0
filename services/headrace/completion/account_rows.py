"""What the account reads of the data plane, as SQL: rows of `jobs`, and all ended jobs in one statement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.completion.account_parts import Intake, JobRow, Side, add_to
from headrace.completion.counting import Landed, count_landed
from headrace.completion.job_rows import ENDED
from headrace.completion.sandwich import Reading
from headrace.completion.store import Connection
from headrace.contracts.api import ShapeAccount

_COLUMNS: Final = """
j.job, j.state, j.count, j.landed, j.ok, j.failed, j.dead, j.cancelled, j.duplicates, j.tokens_in, j.tokens_out,
j.function, j.model, j.lane, coalesce(epoch_us(j.opened_at), 0), epoch_us(j.ended_at), coalesce(j.generation, 1),
j.cancel_cause, j.cancel_reason, epoch_us(j.deadline_at), coalesce(r.count, 0)"""

_JOBS = f"""SELECT {_COLUMNS} FROM jobs AS j
LEFT JOIN retries AS r ON r.job = j.job AND r.generation = j.generation"""  # noqa: S608  (constants)

_WIDTH: Final = len(JobRow.__struct_fields__)
_ENDED: Final = ", ".join(f"'{state}'" for state in ENDED)
_GIVEN: Final = "SELECT unnest(from_json($given::VARCHAR, '[\"VARCHAR\"]'))"

_LIVE = f"""SELECT job FROM jobs WHERE state NOT IN ({_ENDED})
UNION {_GIVEN}
UNION (SELECT unnest(from_json($recorded::VARCHAR, '["VARCHAR"]')) EXCEPT SELECT job FROM jobs)
ORDER BY 1"""  # noqa: S608

# One pass over all outcomes, whose counts are far fewer than they are; in the order of jobs, so that none are held.
_ENDED_JOBS = f"""SELECT {_COLUMNS}, j.shapes, o.shape, o.status, o.n FROM jobs AS j
LEFT JOIN retries AS r ON r.job = j.job AND r.generation = j.generation
LEFT JOIN (SELECT job, shape, status, count(*) AS n FROM current_outcomes GROUP BY ALL) AS o ON o.job = j.job
WHERE j.state IN ({_ENDED}) AND j.job NOT IN ({_GIVEN}) ORDER BY j.job"""  # noqa: S608

_FETCH: Final = 2_000

_shapes = msgspec.json.Decoder(dict[str, int])


class Tenant(Struct, frozen=True):
    """All jobs of the data plane at one moment.

    `live` are those that have not ended, that were given as queued, or of which only their progress record is known.
    Of the others, `doubtful` are those whose rows and counters do not agree; `ended`, `duplicates` and `shapes` sum up
    the rest.
    """

    live: list[str]
    doubtful: list[Reading]
    ended: int
    duplicates: int
    shapes: list[ShapeAccount]


def account(connection: Connection, job: str, count: bool) -> tuple[JobRow | None, Landed | None]:  # noqa: FBT001
    """The job's row and, if asked, its outcomes counted, both of one snapshot."""
    row = connection.execute(f"{_JOBS} WHERE j.job = ?", [job]).fetchone()
    return JobRow(*row) if row else None, count_landed(connection, job) if count else None


def newest(connection: Connection, limit: int, state: str | None) -> list[JobRow]:
    """Jobs in `state` or all, newest first."""
    rows = connection.execute(
        f"{_JOBS} WHERE $state IS NULL OR j.state = $state ORDER BY j.opened_at DESC, j.job DESC LIMIT $limit",
        {"state": state, "limit": limit},
    ).fetchall()
    return [JobRow(*row) for row in rows]


def tenant(connection: Connection, queued: Iterable[str], recorded: Iterable[str]) -> Tenant:
    """Every job once: the live ones by name, the others by their sums, all of one snapshot.

    `queued` are the jobs that have tasks in the broker, `recorded` those that have a progress record there.
    """
    given, records = _json(queued), _json(recorded)
    found = connection.execute(_LIVE, {"given": given, "recorded": records}).fetchall()
    sums: dict[str, ShapeAccount] = {}
    ended, duplicates, doubtful = 0, 0, list[Reading]()
    for reading in _ended(connection, given):
        if not reading.balanced:
            doubtful.append(reading)
            continue
        ended += 1
        duplicates += reading.row.duplicates
        add_to(sums, reading.shapes())
    return Tenant([str(job) for (job,) in found], doubtful, ended, duplicates, list(sums.values()))


def _ended(connection: Connection, given: str) -> Iterator[Reading]:
    """Each ended job as a reading with nothing of it in the broker."""
    found = connection.execute(_ENDED_JOBS, {"given": given})
    for _, group in groupby(_rows(found), key=itemgetter(0)):
        rows = list(group)
        row = JobRow(*rows[0][:_WIDTH])
        counts = {(shape, status): n for *_, shape, status, n in rows if status is not None}
        shapes = rows[0][_WIDTH]
        stored = row.landed if row.count is None else row.count
        side = Side(Intake(stored, "sealed", _shapes.decode(shapes) if shapes else {}), {}, 0)
        yield Reading(row, Landed(sum(counts.values()), counts), side, side, {})


def _rows(found: Connection) -> Iterator[tuple[Any, ...]]:
    while page := found.fetchmany(_FETCH):
        yield from page


def _json(names: Iterable[str]) -> str:
    return msgspec.json.encode(sorted(names)).decode()
