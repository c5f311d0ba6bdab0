"""The outcomes that feed a stage, read whole and in pages that are bounded in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.completion import large_rows, stage_groups
from headrace.completion.stage_mapping import Upstream
from headrace.completion.stage_rows import Source, Stage, after, sources
from headrace.completion.store import Connection
from headrace.contracts import codec

PAGE_BYTES: Final = 4 << 20
"""Bytes of the rows of one page, or one row that is larger."""
FIRST_PAGE: Final = 16
MOST_ROWS: Final = 1_000
_PART_BYTES: Final = 8 << 20

# A model's empty text is not in the message, nor in its column.
_ROWS = """
SELECT o."index", o.generation, o.custom_id, coalesce(o.text, CASE WHEN o.choices IS NOT NULL THEN '' END), o.value,
    k.kept
FROM outcomes AS o LEFT JOIN stage_kept AS k
    ON k.job = $job AND k."index" = o."index" AND k."index" BETWEEN $first AND $last
WHERE o.job = $job AND o."index" BETWEEN $first AND $last
    AND o."index" IN (SELECT unnest(from_json($indices::VARCHAR, '["BIGINT"]')))"""


class PageSize:
    """How many rows to read at once: grows while pages are light, shrinks when they are heavy."""

    def __init__(self) -> None:
        self.rows = FIRST_PAGE

    def seen(self, rows: Sequence[Upstream]) -> None:
        """Learn from a page that was read."""
        size = sum(weight(row) for row in rows)
        self.rows = max(1, self.rows // 2) if size > PAGE_BYTES else min(MOST_ROWS, self.rows * 2)


def weight(row: Upstream) -> int:
    """Bytes of a row, about."""
    return len(row.value or b"") + len(row.text or "") + len(row.kept or b"")


def upstream(connection: Connection, job: str, keys: Sequence[tuple[int, int]]) -> list[Upstream]:
    """The ok outcomes of `job` with these (index, generation), in this order: all, or as many as make a page."""
    if not keys:
        return []
    indices = [index for index, _ in keys]
    first, last = min(indices), max(indices)
    large = large_rows.references(connection, job, first, last)
    keys = _light(keys, [large[key].size if key in large else 0 for key in keys])
    values = {"job": job, "first": first, "last": last, "indices": _json([index for index, _ in keys])}
    found: dict[tuple[int, int], Upstream] = {}
    for index, generation, custom_id, text, value, kept in connection.execute(_ROWS, values).fetchall():
        key = (index, generation)
        row = Upstream(index, generation, custom_id, text, _bytes(value), _bytes(kept))
        found[key] = _whole(connection, job, row) if key in large else row
    return [found.get(key) or Upstream(*key) for key in keys]


def arrived(
    connection: Connection, stage: Stage, arrival: int, limit: int
) -> tuple[list[int], list[Upstream]]:
    """The next arrivals of a stage after `arrival`: their numbers, and their rows."""
    keys = after(connection, stage, arrival, limit)
    rows = upstream(connection, stage.parent or "", [(index, generation) for _, index, generation in keys])
    return [number for number, _, _ in keys[: len(rows)]], rows


def divided(
    connection: Connection, stage: Stage, index: int, limit: int
) -> tuple[list[Source], list[Upstream]]:
    """The rows that row `index` of a stage and those after it came of, and where they begin."""
    found = sources(connection, stage.job, index, limit)
    rows = upstream(connection, stage.parent or "", [(s.index, s.generation) for s in found])
    return found[: len(rows)], rows


def members(
    connection: Connection, stage: Stage, *, first: int, end: int, position: int, limit: int
) -> tuple[list[int], list[Upstream]]:
    """The next rows that the groups `first`..`end` of a stage collect, each with its group: see `stage_groups.keys`."""
    found = stage_groups.keys(connection, stage.job, first=first, end=end, position=position, limit=limit)
    rows = upstream(connection, stage.parent or "", [(index, generation) for _, index, generation in found])
    return [group for group, _, _ in found[: len(rows)]], rows


def _light(keys: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Sequence[tuple[int, int]]:
    """As many of `keys` as have large results of at most `PAGE_BYTES` together, at least one."""
    total = 0
    for at, size in enumerate(sizes):
        total += size
        if total > PAGE_BYTES and at:
            return keys[:at]
    return keys


def _whole(connection: Connection, job: str, row: Upstream) -> Upstream:
    """A row whose result was too large for a message, with its result."""
    data: list[str] = []
    part: int | None = 0
    while part is not None:
        found = large_rows.read_parts(connection, (job, row.index, row.generation), part, _PART_BYTES)
        if found is None:
            return row
        data.append(found.data)
        part = found.next
    result = codec.RESULT.decode("".join(data).encode())
    value = None if result.value is msgspec.UNSET else bytes(result.value)
    text = result.choices[0].text if result.choices else None
    return Upstream(row.index, row.generation, row.custom_id, text, value, row.kept)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
