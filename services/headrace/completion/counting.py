"""Outcomes of a job counted anew: by shape and status, what is missing, what is doubled.

Everything goes by slices of indices, so that memory stays flat however many items a job has: DuckDB holds a hash
table of a slice at most, and finds a slice's rows by the zones of the table without reading the others.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from headrace.completion.store import Connection

SLICE: Final = 500_000
"""Indices that are looked at in one statement."""

_NEXT = 'SELECT min("index") FROM outcomes WHERE job = $job AND "index" >= $first'

_RETRIED = "SELECT count(*) > 0 FROM retry_items WHERE job = $job"

_IN_SLICE = 'FROM {table} WHERE job = $job AND "index" >= $first AND "index" < $end'

_SIZE = f'SELECT count(*), count(DISTINCT "index") {_IN_SLICE.format(table="outcomes")}'

_BY_SHAPE = f"SELECT shape, status, count(*) {_IN_SLICE} GROUP BY ALL"

# The latest outcome of each index.
_LATEST = f"""SELECT shape, status, count(*) FROM (
    SELECT shape, status {_IN_SLICE.format(table="current_outcomes")}
    QUALIFY row_number() OVER (PARTITION BY "index" ORDER BY generation DESC) = 1
) GROUP BY ALL"""  # noqa: S608  (constants)

_DOUBLED = f"""SELECT min(i), max(i) FROM (
    SELECT i, i - row_number() OVER (ORDER BY i) AS island FROM (
        SELECT DISTINCT "index" AS i FROM (
            SELECT "index" {_IN_SLICE.format(table="outcomes")} GROUP BY "index", generation HAVING count(*) > 1)))
GROUP BY island ORDER BY 1 LIMIT $limit"""  # noqa: S608  (constants)

_PRESENT = 'SELECT count(DISTINCT "index") {from_slice}'

# Between one outcome and the next, before the first and after the last: what is not there.
_GAPS = """SELECT before + 1, i - 1 FROM (
    SELECT i, lag(i, 1, $first - 1) OVER (ORDER BY i) AS before FROM (
        SELECT DISTINCT "index" AS i {from_slice}
        UNION ALL SELECT $end
    )
) WHERE i - before > 1 ORDER BY 1 LIMIT $limit"""

Ranges = list[tuple[int, int]]
"""Inclusive ranges of indices, ascending."""


class Landed(Struct, frozen=True):
    """What the outcomes themselves say.

    `rows` are those of all generations; `counts` has the latest outcome of each index by shape (None: not known)
    and status. An index whose latest generation is still under way has none. `repeated`: some index has several rows,
    of several generations or because it is doubled.
    """

    rows: int
    counts: dict[tuple[int | None, str], int]
    repeated: bool = False

    @property
    def indices(self) -> int:
        """Indices that have a current outcome."""
        return sum(self.counts.values())

    def of(self, status: str) -> int:
        """Indices whose current outcome has this status."""
        return sum(n for (_, s), n in self.counts.items() if s == status)


def count_landed(connection: Connection, job: str) -> Landed:
    """Count the outcomes of `job` by reading them, and not by its counters."""
    retried = _one(connection, _RETRIED, {"job": job})
    rows, counts, first, repeated = 0, dict[tuple[int | None, str], int](), 0, False
    while (at := _one(connection, _NEXT, {"job": job, "first": first})) is not None:
        first = at + SLICE
        values: dict[str, object] = {"job": job, "first": at, "end": first}
        n, indices = connection.execute(_SIZE, values).fetchall()[0]
        rows += n
        repeated = repeated or n != indices
        simple = n == indices and not retried
        by_shape = _BY_SHAPE.format(table="outcomes") if simple else _LATEST
        for shape, status, found in connection.execute(by_shape, values).fetchall():
            counts[shape, status] = counts.get((shape, status), 0) + found
    return Landed(rows, counts, repeated)


def doubled(connection: Connection, job: str, limit: int = 1_000) -> Ranges:
    """Indices with more than one outcome in one generation, at most `limit` ranges."""
    found: Ranges = []
    first = 0
    while len(found) < limit and (at := _one(connection, _NEXT, {"job": job, "first": first})) is not None:
        first = at + SLICE
        values: dict[str, object] = {"job": job, "first": at, "end": first}
        n, indices = connection.execute(_SIZE, values).fetchall()[0]
        if n != indices:
            ranges = connection.execute(_DOUBLED, values | {"limit": limit}).fetchall()
            _extend(found, ranges)
    return found[:limit]


def gaps(connection: Connection, job: str, count: int, limit: int = 1_000) -> Ranges:
    """The indices 0..count-1 that have no current outcome, at most `limit` ranges."""
    retried = _one(connection, _RETRIED, {"job": job})
    from_slice = _IN_SLICE.format(table="current_outcomes" if retried else "outcomes")
    found: Ranges = []
    first = 0
    while first < count and len(found) < limit:
        following = _one(connection, _NEXT, {"job": job, "first": first})
        if following is None or following >= count:
            _extend(found, [(first, count - 1)])
            break
        if following > first:
            _extend(found, [(first, following - 1)])
        first, end = following, min(following + SLICE, count)
        values: dict[str, object] = {"job": job, "first": first, "end": end}
        if _one(connection, _PRESENT.format(from_slice=from_slice), values) != end - first:
            query = _GAPS.format(from_slice=from_slice)
            _extend(found, connection.execute(query, values | {"limit": limit}).fetchall())
        first = end
    return found[:limit]


def _extend(found: Ranges, more: Ranges) -> None:
    """Append ascending ranges; one that goes on where the last ended becomes one with it."""
    for first, last in more:
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], int(last))
        else:
            found.append((int(first), int(last)))


def _one(connection: Connection, query: str, values: dict[str, object]) -> int | None:
    row = connection.execute(query, values).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def which_landed(connection: Connection, job: str, keys: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of the given (index, generation) that have an outcome."""
    rows = connection.execute(
        """SELECT "index", generation FROM outcomes
        WHERE job = $1 AND "index" IN (SELECT unnest($2::BIGINT[])) AND generation IN (SELECT unnest($3::INTEGER[]))""",
        [job, [index for index, _ in keys], sorted({generation for _, generation in keys})],
    ).fetchall()
    return {(int(index), int(generation)) for index, generation in rows}
