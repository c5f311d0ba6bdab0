"""Outcomes by job and index: `result` for one, `results` for pages in index order; the latest generation counts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.completion import large_rows
from headrace.completion.job_rows import state_of
from headrace.completion.landing import Landing
from headrace.completion.sources import SourceReader
from headrace.completion.store import Connection, Store
from headrace.contracts.api import ResultPartReply, ResultPartRequest, ResultRequest, ResultsRequest
from headrace.contracts.errors import NotFound, Refused
from headrace.contracts.messages import Blob, Choice, ItemError, Result, Task, Timings, Usage

_COLUMNS = """job, "index", generation, tenant, function, status, custom_id, choices, value, error_type, error_message,
    error_field, model, engine, params_fingerprint, worker, attempt, prompt_tokens, completion_tokens, cached_tokens,
    epoch_us(submitted_at), epoch_us(received_at), epoch_us(started_at), epoch_us(finished_at), trace_id, chat, task"""

_ONE = f"""
SELECT {_COLUMNS} FROM outcomes WHERE job = $job AND "index" = $index
    AND ($generation IS NULL OR generation = $generation)
ORDER BY generation DESC LIMIT 1"""  # noqa: S608  (constants)

_PAGE = f"""
SELECT {_COLUMNS} FROM outcomes WHERE job = $job AND "index" BETWEEN $first AND $last
QUALIFY row_number() OVER (PARTITION BY "index" ORDER BY generation DESC) = 1 ORDER BY "index" """  # noqa: S608

_NEXT = """SELECT min("index") FROM outcomes WHERE job = ? AND "index" > ?"""

ENVELOPE_BYTES: Final = 4_096
"""What a reply has besides its results, headers included, with room to spare."""

_choices = msgspec.json.Decoder(list[Choice])
_task = msgspec.json.Decoder(Task)


class NotLanded(Struct, frozen=True, kw_only=True):
    """Answer of `result` for an item without an outcome yet: `queued`, `running`, `landing`, or `unknown` to all."""

    job: str
    index: int
    state: str
    landed: bool = False


class Results:
    """Reads outcomes for the endpoints."""

    def __init__(self, store: Store, sources: SourceReader, landing: Landing, *, max_bytes: int) -> None:
        self._store = store
        self._sources = sources
        self._landing = landing
        self._max_bytes = max_bytes

    async def one(self, request: ResultRequest) -> Result | NotLanded:
        """The item's outcome, waiting up to `wait_s` for it; `NotLanded` if there is none. `NotFound`: no such job."""
        deadline = time.monotonic() + request.wait_s
        while True:
            found, state = await self._store.read(_read_one, request.job, request.index, request.generation)
            left = deadline - time.monotonic()
            if found is not None:
                return found
            if left <= 0:
                return await self._absent(request, known=state is not None)
            # A commit may come between the reading and the waiting, so no wait is long.
            await self._landing.next_commit(min(left, 0.25))

    async def part(self, request: ResultPartRequest) -> ResultPartReply:
        """A piece of an outcome that is too large for a reply; `NotFound` if there is none."""
        key = (request.job, request.index, request.generation)
        most = self._max_bytes - ENVELOPE_BYTES
        found = await self._store.read(large_rows.read_parts, key, request.part, most)
        if found is None:
            msg = f"{request.job}/{request.index}@{request.generation} has no part {request.part}: ask `result` for it"
            raise NotFound(msg, code="no_part")
        job, index, generation = key
        return ResultPartReply(
            job=job, index=index, generation=generation, part=found.part, data=found.data, next=found.next
        )

    async def _absent(self, request: ResultRequest, *, known: bool) -> NotLanded:
        job, index = request.job, request.index
        intake = await self._sources.intake(job)
        if intake is None and not known:
            msg = f"no job {job!r}"
            raise NotFound(msg, code="unknown_job")
        state = "unknown"
        if intake is not None and index < intake.stored:
            # Which of a job's items a worker runs is known to that worker only: this says what they all are.
            if await self._sources.tasks(job):
                running = await self._sources.running(job)
                state = "running" if running.items else "queued"
            elif await self._sources.results(job):
                state = "landing"
        return NotLanded(job=job, index=index, state=state)

    async def page(self, request: ResultsRequest) -> bytes:
        """The JSON of a `ResultsReply`: outcomes from index `after` + 1 on. `NotFound`: no such job."""
        results, more = await self._store.read(_read_page, request, self._max_bytes - ENVELOPE_BYTES)
        if not results and not await self._is_known(request.job):
            msg = f"no job {request.job!r}"
            raise NotFound(msg, code="unknown_job")
        follows = b"null" if more is None else str(more).encode()
        return b'{"job":"%b","results":[%b],"next":%b}' % (request.job.encode(), b",".join(results), follows)

    async def _is_known(self, job: str) -> bool:
        state = await self._store.read(state_of, job)
        return state is not None or await self._sources.intake(job) is not None


# --- SQL ------------------------------------------------------------------------------------------
def _read_one(
    connection: Connection, job: str, index: int, generation: int | None
) -> tuple[Result | None, str | None]:
    row = connection.execute(_ONE, {"job": job, "index": index, "generation": generation}).fetchone()
    if row is None:
        return None, state_of(connection, job)
    large = large_rows.references(connection, job, index, index)
    return to_result(row, large), None


def _read_page(
    connection: Connection, request: ResultsRequest, max_bytes: int
) -> tuple[list[bytes], int | None]:
    """Encoded outcomes of one page, and the `after` of the next, None at the end.

    Reads a range of indices and not the next rows in order: the table is not sorted, but its zones are narrow.
    """
    row = connection.execute(_NEXT, [request.job, request.after]).fetchone()
    if row is None or row[0] is None:
        return [], None
    first = int(row[0])
    values: dict[str, str | int] = {"job": request.job, "first": first, "last": first + request.limit - 1}
    large = large_rows.references(connection, request.job, first, first + request.limit - 1)
    found: list[bytes] = []
    size, last = 0, first + request.limit - 1
    cursor = connection.execute(_PAGE, values)
    while rows := cursor.fetchmany(100):
        for each in rows:
            encoded = _encoded(to_result(each, large), max_bytes)
            size += len(encoded) + 1
            if size > max_bytes:
                if not found:
                    raise _too_large(request.job, each[1], len(encoded))
                return found, int(each[1]) - 1
            found.append(encoded)
    follows = connection.execute(_NEXT, [request.job, last]).fetchone()
    return found, last if follows and follows[0] is not None else None


def _encoded(result: Result, max_bytes: int) -> bytes:
    """The outcome's JSON; without its task if it fits into no reply with it."""
    encoded = msgspec.json.encode(result)
    if len(encoded) >= max_bytes and result.task is not None:
        encoded = msgspec.json.encode(replace(result, task=None))
    return encoded


def _too_large(job: str, index: int, size: int) -> Refused:
    msg = (
        f"the outcome of {job}/{index} has {size} bytes, more than a reply carries: "
        f"go on after {index}, and read this one by SQL in parts"
    )
    return Refused(msg, code="too_large")


def to_result(row: tuple[Any, ...], large: Mapping[tuple[int, int], Blob] = MappingProxyType({})) -> Result:
    """The outcome of a row in the order of `_COLUMNS`; one in `large` (by index and generation) without its answer."""
    error = None if row[9] is None else ItemError(type=row[9], message=row[10] or "", field=row[11])
    return Result(
        job=row[0],
        index=row[1],
        generation=row[2],
        tenant=row[3],
        function=row[4],
        status=row[5],
        custom_id=row[6],
        choices=[] if row[7] is None else _choices.decode(row[7]),
        value=msgspec.UNSET if row[8] is None else msgspec.Raw(row[8].encode()),
        error=error,
        model=row[12],
        engine=row[13] or "",
        params_fingerprint=row[14] or "0" * 16,
        worker=row[15] or "unknown",
        attempt=row[16],
        usage=Usage(prompt_tokens=row[17], completion_tokens=row[18], cached_tokens=row[19]),
        timings=Timings(
            submitted_us=row[20] or 0,
            received_us=row[21] or 0,
            started_us=row[22] or 0,
            finished_us=row[23] or 0,
        ),
        trace_id=row[24],
        chat=row[25],
        task=None if row[26] is None else _task.decode(row[26]),
        blob=large.get((row[1], row[2])),
    )
