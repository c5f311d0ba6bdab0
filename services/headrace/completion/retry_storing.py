"""Storing the items of a retry: each once, in the order of their index, whatever crashes and whatever ack is lost.

As a producer does: up to 999 tasks and the progress record that counts them, by one atomic commit that expects the
record before it to be the last of its subject. A record that counts nothing comes first, so that each later commit
expects a sequence that the subject has once only: a repeat that comes late, after the record is gone, is refused.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Literal

from msgspec import Struct

from headrace.completion import retry_rows
from headrace.completion.announce import TAKEN
from headrace.completion.job_rows import now_us
from headrace.completion.retry_rows import Retry
from headrace.completion.retry_tasks import Again, TaskMaker, Unstorable, functions_of, index_at, page
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.codec import SCHEMA_HEADER
from headrace.contracts.errors import NotFound, Undecodable
from headrace.contracts.messages import FunctionSpec, ItemError, Manifest, Result
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import STREAM_IS_FULL, JetStreamError, last_message, purge
from headrace.mesh.provision import get_function
from headrace.mesh.publisher import MAX_BATCH, AtomicBatch, OutMessage, publish_message
from headrace.mesh.wire import header_block

log = logging.getLogger("headrace.completion")

FIRST_BATCH: Final = 128
"""Items of the first batch: how large they are is not known before."""
NO_INPUT: Final = "0" * 16
_KEEP_EVERY: Final = 50
"""Batches after which old progress records are removed."""


class Stored(Struct, frozen=True):
    """What the progress record says: `items` of the retry are stored; `seq` is the record's own sequence."""

    items: int
    seq: int
    closed: str = ""


class RetryStorer:
    """Stores the items of one retry that are not stored yet."""

    def __init__(self, mesh: Mesh, store: Store, retry: Retry) -> None:
        self._mesh = mesh
        self._store = store
        self._retry = retry
        self._subject = mesh.subjects.manifest(retry.job)
        self._specs: dict[str, FunctionSpec] = {}
        self._maker = TaskMaker(mesh.subjects, retry, self._specs, mesh.max_payload)
        self._limit = FIRST_BATCH
        self._last = (0, -1)
        self._commits = 0

    async def run(self) -> bool:
        """Go on after what is stored until all is; False if the job ended before, or is being cancelled.

        While the queue is full it waits. Raise `Unavailable` while the broker is away: to run it again is safe.
        """
        attempt = 0
        at = await self._where()
        while at is not None and not at.closed:
            try:
                at = await self._store_after(at)
                attempt = 0
                continue
            except JetStreamError as e:
                if e.err_code not in (*TAKEN, *STREAM_IS_FULL):
                    raise
                if e.err_code in STREAM_IS_FULL:
                    self._limit = max(1, self._limit // 2)  # a smaller batch may still fit
                    await self._wait(at, attempt, str(e))
                    attempt += 1
            at = await self._where()
        if at is not None and at.closed == "sealed" and self._commits:
            await purge(self._mesh, self._mesh.topology.tasks, filter_=self._subject, keep=1)
        return at is not None and at.closed == "sealed"

    async def _wait(self, at: Stored, attempt: int, reason: str) -> None:
        delay = backoff_s(attempt)
        extra = {
            "job": self._retry.job,
            "stored": at.items,
            "reason": reason[:300],
            "retry_in_s": round(delay, 2),
        }
        log.warning("items of a retry are not stored yet", extra=extra)
        await asyncio.sleep(delay)

    async def _where(self) -> Stored | None:
        """What is stored of this retry; None if nothing of it is to be stored any more.

        The record is read before the job's state. A record of this retry is removed only once the job has ended, so
        where there is none and the job still runs, there never was one.
        """
        record = await last_message(self._mesh, self._mesh.topology.tasks, self._subject)
        running = await self._store.read(retry_rows.running_generation, self._retry.job)
        if running != self._retry.generation:
            return None
        if record is not None:
            try:
                manifest: Manifest = codec.MANIFEST.decode(record.data, record.headers)
            except Undecodable as e:
                log.warning(
                    "a progress record is unreadable", extra={"job": self._retry.job, "reason": str(e)}
                )
            else:
                if manifest.generation >= self._retry.generation:
                    return Stored(manifest.stored, record.sequence, manifest.closed)
        try:
            ack = await publish_message(
                self._mesh,
                self._mesh.topology.tasks,
                self._record(0, ""),
                expected_last_subject_seq=record.sequence if record else 0,
            )
        except JetStreamError as e:
            if e.err_code not in TAKEN:
                raise
            return await self._where()
        crash_point("retry-record-stored")
        return Stored(0, ack.seq)

    async def _store_after(self, at: Stored) -> Stored:
        """Store one more batch."""
        if self._last[0] != at.items:
            self._last = at.items, await self._store.read(index_at, self._retry, at.items)
        items = await self._store.read(page, self._retry, self._last[1], self._limit)
        messages = await self._messages(items)
        stored = at.items + len(items)
        closed = "sealed" if stored >= self._retry.count or not items else ""
        batch = AtomicBatch(self._mesh, self._mesh.topology.tasks)
        await batch.stage(messages)
        ack = await batch.commit(self._record(stored, closed), expected_last_subject_seq=at.seq)
        crash_point("retry-batch-stored")
        if items:
            self._last = stored, items[-1].index
        self._limit = min(MAX_BATCH - 1, max(1, len(items)) * 2)
        self._commits += 1
        if self._commits % _KEEP_EVERY == 0:
            await purge(self._mesh, self._mesh.topology.tasks, filter_=self._subject, keep=1)
        return Stored(stored, ack.seq, closed)

    async def _messages(self, items: list[Again]) -> list[OutMessage]:
        for function in functions_of(items) - self._specs.keys():
            try:
                self._specs[function] = await get_function(self._mesh, function)
            except NotFound:
                log.warning("a retry is of a function that is not registered", extra={"function": function})
        messages: list[OutMessage] = []
        now = now_us()
        for item in items:
            try:
                messages.append(self._maker.message(item, now))
            except Unstorable as e:
                await self._give_up(item, e)
        return messages

    async def _give_up(self, item: Again, error: Unstorable) -> None:
        """Store an outcome for an item that cannot run again: the job could not end otherwise."""
        retry = self._retry
        result = Result(
            job=retry.job,
            index=item.index,
            function=item.function or "unknown",
            status="failed",
            generation=retry.generation,
            error=ItemError(type=error.code, message=f"cannot run again: {error}"[:2_048]),
        )
        log.error(
            "an item cannot run again", extra={"job": retry.job, "index": item.index, "reason": str(error)}
        )
        subject = self._mesh.subjects.result("job", result.function, retry.job)
        headers = header_block({SCHEMA_HEADER: codec.RESULT.name})
        message = OutMessage(subject, codec.RESULT.encode(result), headers)
        await publish_message(self._mesh, self._mesh.topology.results, message)

    def _record(self, stored: int, closed: Literal["", "sealed"]) -> OutMessage:
        manifest = Manifest(
            job=self._retry.job,
            input_fingerprint=self._retry.input_fingerprint or NO_INPUT,
            stored=stored,
            closed=closed,
            generation=self._retry.generation,
        )
        return OutMessage(
            self._subject, codec.MANIFEST.encode(manifest), header_block({SCHEMA_HEADER: codec.MANIFEST.name})
        )
