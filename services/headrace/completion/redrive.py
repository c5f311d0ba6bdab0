"""Redrive: what was given up goes its way once more, an item as a retry of that one alone, a letter on its subject.

A letter is what somebody sent and nobody could take, so nothing it says is trusted: it goes only to a subject that this
mesh's own tasks, results, job events or mails have, and without headers that would speak to the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from headrace.completion import job_rows
from headrace.completion.dead_list import letters_of_job, no_such, parse_item_id, parse_letter_id
from headrace.completion.retry import Retrier
from headrace.completion.store import Connection, Store
from headrace.contracts.api import RedriveReply, RedriveRequest, RetryRequest
from headrace.contracts.codec import REDRIVEN
from headrace.contracts.errors import Conflict, HeadraceError, InvalidInput, NotFound, Refused
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import STREAM_IS_FULL, JetStreamError
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.completion")

_CUT = re.compile(r"\(cut: the message had [0-9]+ bytes\)$")
_EVENTS: Final = ("opened", "sealed", "retried", "cancelled", "completed")

_LETTER = "SELECT subject, data, headers, reason, epoch_us(redriven_at) FROM dead WHERE sequence = ?"

_ITEM = """
SELECT status, (
    SELECT max(r.generation) FROM retry_items AS r
    WHERE r.job = o.job AND r."index" = o."index" AND r.generation > o.generation)
FROM outcomes AS o WHERE job = ? AND "index" = ? AND generation = ?"""

_DEAD_ITEMS = "SELECT count(*) FROM current_outcomes WHERE job = ? AND status = 'dead'"


class Redriver:
    """Redrives one thing at a time, so that two requests for one letter do not both find it untouched."""

    def __init__(self, mesh: Mesh, store: Store, retrier: Retrier) -> None:
        self._mesh = mesh
        self._store = store
        self._retrier = retrier
        self._one_at_a_time = asyncio.Lock()

    async def request(self, request: RedriveRequest) -> RedriveReply:
        """Redrive `request.id`, or all that is dead of `request.job`; return once that is durable.

        Raise `NotFound`, `InvalidInput`, or `Refused` saying why it cannot, or not again, be redriven.
        """
        if (request.id is None) == (request.job is None):
            msg = "redrive either one id or all of a job"
            raise InvalidInput(msg, field="id")
        async with self._one_at_a_time:
            if request.job is not None:
                return await self._job(request.job)
            id_ = request.id or ""
            item = parse_item_id(id_)
            if item is not None:
                return await self._item(id_, *item)
            await self._letter(parse_letter_id(id_), again=request.again)
            return RedriveReply(redriven=1)

    # --- items -------------------------------------------------------------------------------------
    async def _item(self, id_: str, job: str, index: int, generation: int) -> RedriveReply:
        row = await self._store.read(lambda c: c.execute(_ITEM, [job, index, generation]).fetchone())
        if row is None or row[0] != "dead":
            raise no_such(id_)
        if row[1] is not None:
            msg = f"{id_} was redriven before: it runs again as generation {row[1]}"
            raise Refused(msg, code="already_redriven")
        where = f"\"index\" = {index} AND generation = {generation} AND status = 'dead'"
        begun = await self._retrier.request(RetryRequest(job=job, where=where))
        if begun.left_out:
            msg = f"{id_} does not carry its task, which was too large: submit the item again"
            raise Refused(msg, code="task_lost")
        if not begun.resubmitted:
            msg = f"{id_} changed meanwhile: look at it again"
            raise Conflict(msg)
        return RedriveReply(redriven=begun.resubmitted, job=job, generation=begun.generation)

    # --- all of a job ------------------------------------------------------------------------------
    async def _job(self, job: str) -> RedriveReply:
        """Letters first: an item that is among them is what keeps the job from ending."""
        prefix = self._mesh.subjects.prefix
        letters = await self._store.read(letters_of_job, job, prefix)
        items = await self._store.read(_count, _DEAD_ITEMS, job)
        if not letters and not items and await self._store.read(job_rows.state_of, job) is None:
            msg = f"no job {job!r}"
            raise NotFound(msg, code="unknown_job")
        done, left, why = 0, 0, list[str]()
        for sequence in letters:
            try:
                await self._letter(sequence, again=False)
            except Refused as e:
                left += 1
                why.append(str(e))
            else:
                done += 1
        generation: int | None = None
        if items:
            try:
                begun = await self._retrier.request(RetryRequest(job=job, where="status = 'dead'"))
            except Refused as e:
                if not done:
                    raise
                left += items
                why.append(str(e))
            else:
                generation = begun.generation if begun.resubmitted else None
                done += begun.resubmitted
                left += begun.left_out
                if begun.left_out:
                    why.append(f"{begun.left_out:,} items do not carry their task: submit them again")
        note = "; ".join(why)[:2_000] or None
        return RedriveReply(redriven=done, job=job, generation=generation, left=left, note=note)

    # --- letters -----------------------------------------------------------------------------------
    async def _letter(self, sequence: int, *, again: bool) -> None:
        row = await self._store.read(lambda c: c.execute(_LETTER, [sequence]).fetchone())
        if row is None:
            raise no_such(str(sequence))
        subject, data, headers, reason, redriven_us = row
        if redriven_us is not None and not again:
            when = datetime.fromtimestamp(redriven_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            msg = f"letter {sequence} was redriven before, at {when}: with --again it is redriven once more"
            raise Refused(msg, code="already_redriven")
        stream, job = self._destination(sequence, subject)
        if _CUT.search(reason):
            msg = f"letter {sequence} holds only a part of its message: send that anew"
            raise Refused(msg, code="letter_cut")
        if await self._store.read(job_rows.state_of, job) == "cancelled":
            msg = f"letter {sequence} is of job {job}, which was cancelled"
            raise Refused(msg, code="job_cancelled")
        try:
            await publish(
                self._mesh,
                stream,
                subject,
                data or b"",
                headers=_harmless(headers)
                | ({REDRIVEN: str(sequence)} if stream == self._mesh.topology.mail else {}),
                # The same again within the stream's window, after a crash before the note, is no second message.
                msg_id=f"redrive-{sequence}-{redriven_us or 0}",
            )
        except JetStreamError as e:
            if e.err_code in STREAM_IS_FULL:
                msg = f"letter {sequence} is not redriven, since {stream} is full: try again"
                raise Refused(msg, code="queue_full") from None
            raise
        crash_point("letter-published")
        await self._store.write(_note, sequence, job_rows.now_us())
        crash_point("letter-noted")
        log.info("dead letter is redriven", extra={"sequence": sequence, "subject": subject})

    def _destination(self, sequence: int, subject: str) -> tuple[str, str]:
        """The stream of a letter's subject, and its job (empty for mail); `Refused` for a subject not of this mesh."""
        subjects, topology = self._mesh.subjects, self._mesh.topology
        known: tuple[str, str, str] | None = None
        with contextlib.suppress(HeadraceError):
            # Each is built anew from its parts, which checks every token.
            match subject.split(".")[1:]:
                case ["tasks", function, lane, _, job]:
                    shape = subjects.parse_task(subject).shape
                    known = subjects.task(function, lane, shape, job), topology.tasks, job
                case ["results", ("job" | "call") as sink, function, job]:
                    known = subjects.result(sink, function, job), topology.results, job
                case ["jobs", job, event] if event in _EVENTS:
                    known = subjects.job_event(job, event), topology.jobs, job
                case ["mail", agent, lane, sender]:
                    known = subjects.mail(agent, lane, sender), topology.mail, ""
                case _:
                    pass
        if known is not None and known[0] == subject:
            return known[1], known[2]
        msg = (
            f"letter {sequence} came on {subject[:200]!r}, which is no subject of this mesh's tasks, results, job "
            "events or mails: it stays where it is"
        )
        raise Refused(msg, code="foreign_subject")


def _harmless(headers: str | None) -> dict[str, str]:
    """A letter's headers without those that tell the broker what to do (batches, expectations, ids)."""
    known: dict[str, Any] = msgspec.json.decode(headers) if headers else {}
    return {key: str(value) for key, value in known.items() if not key.lower().startswith("nats-")}


def _note(connection: Connection, sequence: int, at_us: int) -> None:
    connection.execute(
        "UPDATE dead SET redriven_at = make_timestamp(?::BIGINT) WHERE sequence = ?", [at_us, sequence]
    )


def _count(connection: Connection, statement: str, job: str) -> int:
    row = connection.execute(statement, [job]).fetchone()
    return 0 if row is None else int(row[0])
