"""Pipelines in the data plane: which job feeds which, what has arrived for a stage, and what became of it.

Each function works inside the caller's transaction and changes nothing when it is repeated. The order of arrivals is
fixed as rows land, and each arrival is divided once (`assign`): so the index of every row of a stage is durable before
its task is stored, and storing can be taken up again anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from headrace.completion.job_rows import ENDED
from headrace.completion.store import Connection
from headrace.contracts.messages import Result
from headrace.mesh.crash import crash_point

_INDICES: Final = "(SELECT unnest(from_json($indices::VARCHAR, '[\"BIGINT\"]')))"

_CHILDREN = """
SELECT job, parent FROM stages
WHERE arrives AND parent IN (SELECT unnest(from_json($1::VARCHAR, '["VARCHAR"]')))"""

_ARRIVE = """
INSERT INTO stage_arrivals
SELECT $job, base.n + row_number() OVER (ORDER BY o."index") - 1, o."index", o.generation
FROM (SELECT coalesce(max(arrival), -1) + 1 AS n FROM stage_arrivals WHERE job = $job) AS base, (
    SELECT "index", min(generation) AS generation FROM outcomes
    WHERE job = $parent AND status = 'ok' AND {which} GROUP BY "index"
) AS o
WHERE o."index" NOT IN (SELECT parent_index FROM stage_arrivals WHERE job = $job AND {noted})"""

_ARRIVE_BATCH = _ARRIVE.format(
    which=f'"index" BETWEEN $first AND $last AND "index" IN {_INDICES}',
    noted="parent_index BETWEEN $first AND $last",
)

_ARRIVE_ALL = _ARRIVE.format(which="true", noted="true")

_AFTER = """
SELECT arrival, parent_index, generation FROM stage_arrivals
WHERE job = $job AND arrival > $after ORDER BY arrival LIMIT $limit"""

_FEEDS_FROM = """
SELECT parent_index, generation, first, items FROM stage_feeds
WHERE job = $job AND first + items > $index ORDER BY first LIMIT $limit"""

_POSITION = """
SELECT coalesce(max(arrival), -1), coalesce(max(first + items), 0) FROM stage_feeds WHERE job = ?"""

_ASSIGN = """
INSERT INTO stage_feeds
SELECT $job, r[1], r[2], r[3]::INTEGER, r[4], r[5], 1
FROM (SELECT unnest(from_json($rows::VARCHAR, '[["BIGINT"]]')) AS r)"""

_KEEP = """
INSERT INTO stage_kept SELECT $job, r."index", r.kept
FROM (SELECT unnest(from_json($kept::VARCHAR, '[{"index": "BIGINT", "kept": "JSON"}]')) AS r)"""


class Stage(Struct, frozen=True):
    """A stage as its row says."""

    job: str
    pipeline: str
    stage: str
    number: int
    parent: str | None
    fed: bool


class Kept(Struct, frozen=True):
    """What a row carries along."""

    index: int
    kept: msgspec.Raw


class Source(Struct, frozen=True):
    """Rows `first`.. of a stage, `items` of them, come of row `index` of the stage before it."""

    index: int
    generation: int
    first: int
    items: int


class Position(Struct, frozen=True):
    """How far a stage is fed: `arrival` is the last that was divided, `assigned` how many rows there are of all.

    `ended`: the stage before it has ended and is fed no more, and nothing has arrived after `arrival`. `child` is the
    state of its own job, None while that is not known.
    """

    arrival: int
    assigned: int
    ended: bool
    child: str | None


def arrive_all(connection: Connection, job: str, parent: str | None) -> None:
    """Note what has landed of `parent` and feeds the stage `job`."""
    connection.execute(_ARRIVE_ALL, {"job": job, "parent": parent})


def arrive(connection: Connection, results: Iterable[Result]) -> None:
    """Note which of `results`, which were just inserted, feed a stage: each once, in the order of their index."""
    landed: defaultdict[str, set[int]] = defaultdict(set)
    for result in results:
        if result.status == "ok":
            landed[result.job].add(result.index)
    if not landed:
        return
    for job, parent in connection.execute(_CHILDREN, [_json(list(landed))]).fetchall():
        indices = sorted(landed[parent])
        values = {
            "job": job,
            "parent": parent,
            "indices": _json(indices),
            "first": indices[0],
            "last": indices[-1],
        }
        connection.execute(_ARRIVE_BATCH, values)


# --- feeding ----------------------------------------------------------------------------------------
def position(connection: Connection, stage: Stage) -> Position:
    """How far `stage` is fed, all of one moment."""
    arrival, assigned = connection.execute(_POSITION, [stage.job]).fetchall()[0]
    states: dict[str, str] = dict(
        connection.execute(
            "SELECT job, state FROM jobs WHERE job IN (?, ?)", [stage.job, stage.parent]
        ).fetchall()
    )
    more = connection.execute(_AFTER, {"job": stage.job, "after": arrival, "limit": 1}).fetchone()
    parent = connection.execute(
        "SELECT parent IS NULL OR fed FROM stages WHERE job = ?", [stage.parent]
    ).fetchone()
    ended = (
        more is None and parent is not None and bool(parent[0]) and states.get(stage.parent or "") in ENDED
    )
    return Position(arrival, assigned, ended, states.get(stage.job))


def after(connection: Connection, stage: Stage, arrival: int, limit: int) -> list[tuple[int, int, int]]:
    """Arrivals after `arrival` that wait to be divided: number, index, generation."""
    return connection.execute(_AFTER, {"job": stage.job, "after": arrival, "limit": limit}).fetchall()


def sources(connection: Connection, job: str, index: int, limit: int) -> list[Source]:
    """What row `index` of `job` and those after it come of."""
    rows = connection.execute(_FEEDS_FROM, {"job": job, "index": index, "limit": limit}).fetchall()
    return [Source(*row) for row in rows]


def assign(
    connection: Connection,
    stage: Stage,
    arrivals: Sequence[int],
    found: Sequence[Source],
    kept: Sequence[Kept],
) -> None:
    """Note what became of each of `arrivals`. Only the one feeder of the stage calls it, with what comes next."""
    rows = [
        [arrival, s.index, s.generation, s.first, s.items] for arrival, s in zip(arrivals, found, strict=True)
    ]
    connection.execute(_ASSIGN, {"job": stage.job, "rows": _json(rows)})
    if kept:
        connection.execute(_KEEP, {"job": stage.job, "kept": _json(list(kept))})
    crash_point("pipeline-before-assign")


def mark_fed(connection: Connection, job: str) -> None:
    """Note that a stage is sealed, or ended: nothing is fed any more."""
    connection.execute("UPDATE stages SET fed = true WHERE job = ? AND NOT fed", [job])


# --- reading ----------------------------------------------------------------------------------------
def stages(connection: Connection, pipeline: str | None = None) -> list[Stage]:
    """The stages of `pipeline` in order, or of all pipelines those that are still to be fed."""
    where, values = ("pipeline = ?", [pipeline]) if pipeline else ("parent IS NOT NULL AND NOT fed", [])
    rows = connection.execute(
        f"SELECT job, pipeline, stage, number, parent, fed FROM stages WHERE {where} ORDER BY number",  # noqa: S608
        values,
    ).fetchall()
    return [Stage(*row) for row in rows]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
