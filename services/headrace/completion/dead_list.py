"""What was given up, as the front door lists it: items out of tries, and letters that no consumer could take."""

from __future__ import annotations

import base64
import re
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.completion.store import Connection, Store
from headrace.contracts.api import DeadEntry, DeadReply, DeadRequest
from headrace.contracts.errors import InvalidInput, NotFound

ENVELOPE_BYTES: Final = 4_096
"""What a reply has besides its entries."""

_ITEM_ID = re.compile(r"([A-Za-z0-9_-]{1,128})/([0-9]{1,16})@([0-9]{1,5})")
_LETTER_ID = re.compile(r"[0-9]{1,16}")

# The job that a letter's message was of, as far as its subject tells.
JOB_OF_LETTER: Final = """CASE
    WHEN starts_with(d.subject, $prefix || '.tasks.') AND len(string_split(d.subject, '.')) = 6
        THEN split_part(d.subject, '.', 6)
    WHEN starts_with(d.subject, $prefix || '.results.') AND len(string_split(d.subject, '.')) = 5
        THEN split_part(d.subject, '.', 5)
    WHEN starts_with(d.subject, $prefix || '.jobs.') AND len(string_split(d.subject, '.')) = 4
        THEN split_part(d.subject, '.', 3)
END"""

_ITEM = """
SELECT epoch_us(o.landed_at) AS at_us, o.job || '/' || o."index" || '@' || o.generation AS id, 'item' AS kind,
    coalesce(o.error_message, o.error_type, '') AS reason, o.attempt::BIGINT AS tries, o.job AS job,
    o."index" AS "index", o.generation AS generation, o.error_type AS error_type, o.custom_id AS custom_id,
    o.function AS function, o.worker AS worker, NULL AS origin, NULL AS subject"""

_LETTER = f"""
SELECT coalesce(epoch_us(d.died_at), 0) AS at_us, d.sequence::VARCHAR AS id, 'letter' AS kind, d.reason AS reason,
    coalesce(d.tries, 0) AS tries, {JOB_OF_LETTER} AS job, NULL::BIGINT AS "index", NULL::INTEGER AS generation,
    NULL AS error_type, NULL AS custom_id, NULL AS function, NULL AS worker, d.origin AS origin, d.subject AS subject"""

_LIST = f"""
SELECT * FROM (
    {_ITEM}, false AS redriven FROM current_outcomes AS o WHERE o.status = 'dead'
    UNION ALL {_LETTER}, d.redriven_at IS NOT NULL AS redriven FROM dead AS d
) WHERE ($job IS NULL OR job = $job) AND ($at IS NULL OR (at_us, id) < ($at, $id))
ORDER BY at_us DESC, id DESC LIMIT $limit"""  # noqa: S608  (constants)

_ONE_ITEM = f"""
{_ITEM}, EXISTS (
    SELECT 1 FROM retry_items AS r WHERE r.job = o.job AND r."index" = o."index" AND r.generation > o.generation
) AS redriven, o.task
FROM outcomes AS o WHERE o.job = $job AND o."index" = $index AND o.generation = $generation AND o.status = 'dead'"""  # noqa: S608

_ONE_LETTER = f"""
{_LETTER}, d.redriven_at IS NOT NULL AS redriven, d.data, d.headers FROM dead AS d WHERE d.sequence = $sequence"""


class DeadThings:
    """Reads what is dead; `max_bytes` bounds a reply, `prefix` is the subjects' own."""

    def __init__(self, store: Store, *, prefix: str, max_bytes: int) -> None:
        self._store = store
        self._prefix = prefix
        self._max_bytes = max_bytes - ENVELOPE_BYTES

    async def read(self, request: DeadRequest) -> DeadReply:
        """A page of entries, newest first, or the one of `request.id` with its task or bytes.

        Raise `NotFound` for an id of nothing dead, `InvalidInput` for what is no id.
        """
        if request.id is not None:
            return DeadReply(entries=[await self.one(request.id)])
        at, id_ = _read_after(request.after)
        values = {"job": request.job, "at": at, "id": id_, "limit": request.limit + 1, "prefix": self._prefix}
        rows = await self._store.read(lambda c: c.execute(_LIST, values).fetchall())
        entries: list[DeadEntry] = []
        size = 0
        for row in rows[: request.limit]:
            entry = _entry(row)
            size += len(msgspec.json.encode(entry)) + 1
            if size > self._max_bytes and entries:
                break
            entries.append(entry)
        more = len(rows) > len(entries)
        return DeadReply(entries=entries, next=f"{entries[-1].at_us}~{entries[-1].id}" if more else None)

    async def one(self, id_: str) -> DeadEntry:
        """The entry `id_`, with its task or its bytes."""
        item = parse_item_id(id_)
        if item is not None:
            job, index, generation = item
            values = {"job": job, "index": index, "generation": generation}
            row = await self._store.read(lambda c: c.execute(_ONE_ITEM, values).fetchone())
            if row is not None:
                task = None if row[15] is None else msgspec.Raw(row[15].encode())
                return replace(_entry(row[:15]), task=task)
        else:
            values = {"sequence": parse_letter_id(id_), "prefix": self._prefix}
            row = await self._store.read(lambda c: c.execute(_ONE_LETTER, values).fetchone())
            if row is not None:
                return _with_bytes(_entry(row[:15]), row[15] or b"", row[16])
        raise no_such(id_)


def parse_item_id(id_: str) -> tuple[str, int, int] | None:
    """Job, index and generation of an item's id (`<job>/<index>@<generation>`); None if it is none."""
    found = _ITEM_ID.fullmatch(id_)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def parse_letter_id(id_: str) -> int:
    """The number of a letter; raise `InvalidInput` if it is none."""
    if not _LETTER_ID.fullmatch(id_):
        msg = (
            f"{id_[:200]!r} is no id of something dead: an item's is <job>/<index>@<generation>, a letter's a number; "
            "`headrace dead list` prints them"
        )
        raise InvalidInput(msg, field="id")
    return int(id_)


def no_such(id_: str) -> NotFound:
    """The error of an id that names nothing."""
    return NotFound(
        f"nothing dead has the id {id_}: `headrace dead list` prints those that are", code="not_dead"
    )


def letters_of_job(connection: Connection, job: str, prefix: str) -> list[int]:
    """The numbers of the letters of `job` that were not redriven, oldest first."""
    rows = connection.execute(
        f"SELECT d.sequence FROM dead AS d WHERE d.redriven_at IS NULL AND {JOB_OF_LETTER} = $job ORDER BY 1",  # noqa: S608
        {"job": job, "prefix": prefix},
    )
    return [sequence for (sequence,) in rows.fetchall()]


def _read_after(after: str | None) -> tuple[int | None, str]:
    if after is None:
        return None, ""
    at, separator, id_ = after.partition("~")
    if not separator or not at.isdecimal() or len(at) > 18:  # noqa: PLR2004  (digits of a time in microseconds)
        msg = f"after {after[:80]!r} is not the `next` of a page"
        raise InvalidInput(msg, field="after")
    return int(at), id_


def _entry(row: tuple[Any, ...]) -> DeadEntry:
    return DeadEntry(
        at_us=row[0],
        id=row[1],
        kind=row[2],
        reason=row[3],
        tries=row[4],
        job=row[5],
        index=row[6],
        generation=row[7],
        error_type=row[8],
        custom_id=row[9],
        function=row[10],
        worker=row[11],
        origin=row[12],
        subject=row[13],
        redriven=row[14],
    )


def _with_bytes(entry: DeadEntry, data: bytes, headers: str | None) -> DeadEntry:
    """The letter's message: as text where it is some, and that is no longer than base64 would be."""
    encoded = base64.b64encode(data).decode()
    known: dict[str, str] = msgspec.json.decode(headers) if headers else {}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return replace(entry, data=encoded, encoding="base64", headers=known)
    if len(msgspec.json.encode(text)) > len(encoded) + 1_024:
        return replace(entry, data=encoded, encoding="base64", headers=known)
    return replace(entry, data=text, encoding="utf-8", headers=known)
