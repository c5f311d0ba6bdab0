"""Results that were too large for a message, in the data plane: whole, as JSON text, in parts.

DuckDB reads and checkpoints 2,048 values of a column at a time and holds them, so a few hundred results of some
megabytes in one column could neither be read nor checkpointed. In parts of this size it holds 64 MB. The row in
`outcomes` has everything of such a result but its `text`, `choices` and `value`:

    SELECT string_agg(data, '' ORDER BY part) FROM large_parts WHERE job = 'j' AND "index" = 0 AND generation = 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from headrace.completion.store import Connection
from headrace.contracts.messages import Blob, Result

PART_CHARACTERS: Final = 32 << 10
_INSERTED: Final = 256
"""Parts of one statement."""

Key = tuple[str, int, int]
"""Job, index, generation."""
Large = Mapping[Key, bytes]
"""The JSON of whole results, for those that came by reference."""

_KNOWN = 'SELECT 1 FROM outcomes WHERE job = ? AND "index" = ? AND generation = ?'

_PARTS = """
INSERT INTO large_parts
SELECT $1, $2, $3, $4 + i - 1, p FROM (SELECT unnest($5::VARCHAR[]) AS p, generate_subscripts($5::VARCHAR[], 1) AS i)"""

_READ = """
SELECT part, data FROM large_parts WHERE job = ? AND "index" = ? AND generation = ? AND part BETWEEN ? AND ?
ORDER BY part"""

_REFERENCES = """
SELECT "index", generation, size, digest FROM large_outcomes WHERE job = ? AND "index" BETWEEN ? AND ?"""


class Parts(Struct, frozen=True):
    """`data` begins with part number `part` of a result; `next` is the number that follows, None at the end."""

    data: str
    part: int
    next: int | None


def key_of(result: Result) -> Key:
    """What identifies the outcome."""
    return result.job, result.index, result.generation


def unknown(connection: Connection, results: Iterable[Result], large: Large) -> list[Result]:
    """Those of `results` that are in `large` and have no outcome yet, each once."""
    fresh: dict[Key, Result] = {}
    for result in results if large else ():
        key = key_of(result)
        if key in large and key not in fresh and connection.execute(_KNOWN, key).fetchone() is None:
            fresh[key] = result
    return list(fresh.values())


def insert(connection: Connection, results: Sequence[Result], large: Large) -> None:
    """Store the whole of `results`, which have their rows and refer to their objects."""
    for result in results:
        key, blob = key_of(result), result.blob
        if blob is None:
            continue
        connection.execute(
            "INSERT INTO large_outcomes VALUES (?, ?, ?, ?, ?)", [*key, blob.size, blob.digest]
        )
        text = large[key].decode()
        starts = range(0, len(text), PART_CHARACTERS)
        for first in range(0, len(starts), _INSERTED):
            parts = [text[at : at + PART_CHARACTERS] for at in starts[first : first + _INSERTED]]
            connection.execute(_PARTS, [*key, first, parts])


def references(connection: Connection, job: str, first: int, last: int) -> dict[tuple[int, int], Blob]:
    """What stands for the whole of the large results with indices `first`..`last`, by index and generation."""
    rows = connection.execute(_REFERENCES, [job, first, last]).fetchall()
    return {
        (index, generation): Blob(name=f"{job}/{index}@{generation}", size=size, digest=digest)
        for index, generation, size, digest in rows
    }


def read_parts(connection: Connection, key: Key, part: int, max_bytes: int) -> Parts | None:
    """As many parts from number `part` on as have at most `max_bytes` as JSON, but one; None if there is none."""
    most = part + max(1, max_bytes // PART_CHARACTERS)
    rows = connection.execute(_READ, [*key, part, most]).fetchall()
    if not rows:
        return None
    taken: list[str] = []
    size = 0
    for number, data in rows:
        size += len(msgspec.json.encode(data))
        if taken and (size > max_bytes or number == most):
            return Parts("".join(taken), part, number)
        taken.append(data)
    return Parts("".join(taken), part, None)
