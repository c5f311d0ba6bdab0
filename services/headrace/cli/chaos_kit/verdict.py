"""The proof at the end, from what lies there and not from anybody's counters.

Three readings: the input file (what should be), the rows of the data plane by SQL (what is), and the broker's streams
(what is left over, and how often the job was said to have ended).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final

from msgspec import Struct

from headrace.cli.chaos_kit.answers import Answers
from headrace.cli.chaos_kit.load import Load, lines_of
from headrace.client import status
from headrace.contracts import codec
from headrace.contracts.api import QueryReply
from headrace.contracts.errors import Unavailable
from headrace.contracts.messages import JobCompleted
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import count_subject, last_message, next_message, stream_info

PAGE: Final = 5_000
SHOWN: Final = 20


class Verdict(Struct, kw_only=True):
    """What is there. `lost` are stored items without an outcome that are not in the broker either, `doubled` outcomes
    beyond the first of an item and endings beyond the first of a job, `mismatched` outcomes that are not of their line.

    `missing` are stored items without an outcome, as inclusive ranges; `not_stored` those of a submit that did not
    finish. `examples` say what is wrong with some of the mismatched.
    """

    items: int
    not_stored: int = 0
    rows: int = 0
    ok: int = 0
    failed: int = 0
    dead: int = 0
    cancelled: int = 0
    lost: int = 0
    doubled: int = 0
    mismatched: int = 0
    tasks_left: int = 0
    results_left: int = 0
    dead_letters: int = 0
    completed_events: int = 0
    missing: list[tuple[int, int]] = []
    examples: list[str] = []


async def judge(
    mesh: Mesh, job: str, load: Load, *, engine: str, submitted: bool, patience_s: float
) -> Verdict:
    """Read everything and compare. Results that are still on their way are waited for, `patience_s` at most.

    `submitted` says that a submit has exited 0: it promised that every line is stored.
    """
    found = Verdict(items=load.items)
    if not submitted:
        found.not_stored = load.items - await _stored(mesh, job)
    found.tasks_left, found.results_left = await _left(mesh, job, patience_s)
    found.dead_letters = int((await stream_info(mesh, mesh.topology.dead))["state"]["messages"])
    found.completed_events = await _endings(mesh, job, found)
    await _count(mesh, job, found)
    await _compare(mesh, job, load, Answers(engine, load), found)
    still_there = found.tasks_left + found.results_left
    found.lost = max(0, found.lost - still_there)
    return found


async def _stored(mesh: Mesh, job: str) -> int:
    """Items that the producer's progress record counts."""
    record = await last_message(mesh, mesh.topology.tasks, mesh.subjects.manifest(job))
    return codec.MANIFEST.decode(record.data, record.headers).stored if record is not None else 0


async def _left(mesh: Mesh, job: str, patience_s: float) -> tuple[int, int]:
    """Tasks and results that are still in the broker, once there are none or the patience is over."""
    clock = asyncio.get_running_loop().time
    until = clock() + patience_s
    while True:
        tasks = await count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job(job))
        results = await count_subject(mesh, mesh.topology.results, mesh.subjects.results_of_job(job))
        if not tasks + results or clock() >= until:
            return tasks, results
        await asyncio.sleep(0.1)


async def _endings(mesh: Mesh, job: str, found: Verdict) -> int:
    """How often the job was said to have ended; more than once in a generation counts as doubled."""
    seen: dict[int, int] = {}
    sequence = 1
    while message := await next_message(
        mesh, mesh.topology.jobs, mesh.subjects.job_event(job, "completed"), sequence
    ):
        event = codec.JOB_EVENT.decode(message.data, message.headers)
        if isinstance(event, JobCompleted):
            seen[event.generation] = seen.get(event.generation, 0) + 1
        sequence = message.sequence + 1
    found.doubled += sum(n - 1 for n in seen.values())
    return sum(seen.values())


# --- the data plane ---------------------------------------------------------------------------------
async def _count(mesh: Mesh, job: str, found: Verdict) -> None:
    where = f"FROM outcomes WHERE job = '{job}'"
    statuses = (await _sql(mesh, f"SELECT status, count(*) {where} GROUP BY status")).rows
    for name, count in statuses:
        setattr(found, str(name), int(count))
    found.rows = sum(int(count) for _, count in statuses)


async def _compare(mesh: Mesh, job: str, load: Load, answers: Answers, found: Verdict) -> None:
    """Walk through lines and outcomes side by side, both in the order of their index."""
    outcomes = _outcomes(mesh, job, load.items)
    row = await anext(outcomes, None)
    walked, before = 0, (-1, 0)
    for index, line in enumerate(itertools.islice(lines_of(load), found.items - found.not_stored)):
        if row is None or row[0] > index:
            found.lost += 1
            _add(found.missing, index)
        while row is not None and row[0] == index:
            if (row[0], row[1]) == before:
                found.doubled += 1
            elif why := answers.wrong(index, line, row):
                _mismatch(found, index, why)
            before, walked = (row[0], row[1]), walked + 1
            row = await anext(outcomes, None)
    while row is not None:
        _mismatch(found, row[0], "no line of the input has this index")
        walked += 1
        row = await anext(outcomes, None)
    # A row that the index of the table hides from an ordered reading still counts.
    found.doubled += max(0, found.rows - walked)


def _mismatch(found: Verdict, index: int, why: str) -> None:
    found.mismatched += 1
    if len(found.examples) < SHOWN:
        found.examples.append(f"item {index}: {why}")


async def _outcomes(mesh: Mesh, job: str, items: int) -> AsyncIterator[list[Any]]:
    """Every outcome in order: index, generation, status, custom id, MD5 of its text, its value.

    By ranges of the index, which the data plane can skip to; a reply that was cut is asked for again from its end.
    """
    select = (
        f"SELECT \"index\", generation, status, custom_id, md5(text), value FROM outcomes WHERE job = '{job}'"  # noqa: S608
    )
    order = 'ORDER BY "index", generation'
    at, after = 0, 0
    while at < items:
        last = min(at + PAGE, items) - 1
        page = await _sql(
            mesh, f'{select} AND "index" BETWEEN {at} AND {last} AND ("index" > {at} OR generation > {after}) {order}'
        )  # fmt: skip
        for row in page.rows:
            yield row
        at, after = (page.rows[-1][0], page.rows[-1][1]) if page.truncated and page.rows else (last + 1, 0)
    for row in (await _sql(mesh, f'{select} AND "index" >= {items} {order} LIMIT {PAGE}')).rows:
        yield row


async def _sql(mesh: Mesh, statement: str) -> QueryReply:
    """The reply to a statement; a service that is busy or away is asked again."""
    for attempt in range(10):
        try:
            return await status.query(mesh, statement, max_rows=2 * PAGE)
        except Unavailable:
            await asyncio.sleep(0.2 * (attempt + 1))
    return await status.query(mesh, statement, max_rows=2 * PAGE)


def _add(ranges: list[tuple[int, int]], index: int) -> None:
    if ranges and ranges[-1][1] == index - 1:
        ranges[-1] = (ranges[-1][0], index)
    elif len(ranges) < 1_000:  # noqa: PLR2004  (as many as an audit names)
        ranges.append((index, index))
