"""Storing a job's batches: each once and whole, in order, whatever acks are lost and whoever else does the same.

A batch is up to 999 tasks and the manifest that counts them, stored by one atomic commit that expects the
manifest before it to be the last. So a batch that was stored is never stored again: on any doubt the last manifest
is read, and what it counts is dropped from what is still to do.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

from headrace.client.feed import Batch, Feed
from headrace.client.jobs import TAKEN, Stored, drop_old_manifests, manifest_message, undo_if_late, where_is
from headrace.client.uploads import Uploader
from headrace.client.window import Window
from headrace.contracts.errors import Conflict, HeadraceError, Refused, Unavailable
from headrace.contracts.messages import Manifest
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import STREAM_IS_FULL, JetStreamError
from headrace.mesh.publisher import AtomicBatch

log = logging.getLogger("headrace.client")

_KEEP_EVERY: Final = 50
"""Batches after which old manifests are removed."""

_TURNS: Final = 4
"""Turns of the event loop that bring a commit to the socket; then the broker works while the next batch is made."""

_LOOK_EVERY_S: Final = 0.25

StoreProgress = Callable[[int, str], None]
"""Called with the items stored so far, and why it waits (empty while it does not)."""


class Storer:
    """Stores the items of one job from a feed. `total` is how many there are.

    `patience_s` is how long it goes on without anything getting stored: while the queue is full, the broker away.
    """

    def __init__(
        self,
        mesh: Mesh,
        feed: Feed,
        *,
        job: str,
        fingerprint: str,
        total: int,
        patience_s: float,
        progress: StoreProgress,
        prepare_in_thread: bool = False,
    ) -> None:
        self._mesh = mesh
        self._uploader = Uploader(mesh)
        self._window = Window(feed, in_thread=prepare_in_thread)
        self._job = job
        self._fingerprint = fingerprint
        self._total = total
        self._patience_s = patience_s
        self._progress = progress
        self._at = Stored()
        self._commits = 0
        self._unfenced = False
        self._reconnected = asyncio.Event()

    async def run(self, at: Stored) -> Stored:
        """Store everything after `at`; return what the last manifest says, which is sealed then.

        Raise `Refused` (the queue stays full) or `Unavailable` naming what is not stored, `Conflict` if the job
        was cancelled or the input changed.
        """
        self._at = at
        self._unfenced = at.seq == 0
        self._mesh.on_reconnect(self._reconnected.set)
        try:
            await self._until_sealed()
        finally:
            self._mesh.off_reconnect(self._reconnected.set)
            await self._window.close()
        return self._at

    async def _until_sealed(self) -> None:
        clock = asyncio.get_running_loop().time
        last_progress, attempt, stored = clock(), 0, self._at.items
        while self._at.closed != "sealed":
            try:
                await self._burst_or_trouble()
                continue
            except (JetStreamError, Unavailable) as e:
                trouble = e
            if self._at.items > stored:
                last_progress, attempt, stored = clock(), 0, self._at.items
            await self._pause(trouble, attempt, self._patience_s - (clock() - last_progress))
            attempt += 1
            if self._mesh.connected:
                try:
                    self._resume(await where_is(self._mesh, self._job, self._fingerprint))
                except (JetStreamError, Unavailable) as e:
                    trouble = e if isinstance(trouble, Unavailable) else trouble
            if self._at.items > stored:
                last_progress, attempt, stored = clock(), 0, self._at.items
            elif clock() - last_progress >= self._patience_s or self._mesh.closed.is_set():
                raise self._gave_up(trouble) from trouble

    async def _pause(self, trouble: HeadraceError, attempt: int, left: float) -> None:
        """Wait for as long as `trouble` deserves, and say why."""
        if isinstance(trouble, JetStreamError) and trouble.err_code in TAKEN:
            # Another submitter of the same job, or our own batch whose ack was lost.
            await asyncio.sleep(random.uniform(0, 0.02))
            return
        full = isinstance(trouble, JetStreamError) and trouble.err_code in STREAM_IS_FULL
        if full:
            # A smaller batch may still fit.
            self._window.shrink()
        self._progress(self._at.items, "the queue is full" if full else str(trouble))
        log.info(
            "waiting to store",
            extra={"job": self._job, "stored": self._at.items, "reason": str(trouble)[:300]},
        )
        loop = asyncio.get_running_loop()
        until = loop.time() + max(0.0, left)
        await asyncio.sleep(max(0.0, min(left, backoff_s(attempt, base=0.1))))
        # nats-py has no event for a connection that is back.
        while not self._mesh.connected and not self._mesh.closed.is_set() and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def _resume(self, at: Stored) -> None:
        """Go on from what is stored, whoever stored it."""
        if at.items < self._at.items:
            msg = (
                f"job {self._job}: {self._at.items:,} items were confirmed as stored, and the broker now has "
                f"{at.items:,}: its storage lost data. Run the same command again to store them anew"
            )
            raise Conflict(msg, code="storage_lost")
        self._at = at

    # --- one burst -----------------------------------------------------------------------------------
    async def _burst_or_trouble(self) -> None:
        """Store batch after batch until the end, or raise the first trouble; a lost connection is one."""
        self._reconnected.clear()
        self._window.rewind()
        burst = asyncio.ensure_future(self._burst())
        reconnect = asyncio.ensure_future(self._reconnected.wait())
        try:
            done: Collection[Any] = ()
            while not done and self._mesh.connected:
                done, _ = await asyncio.wait(
                    {burst, reconnect}, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
            if not burst.done():
                # What was on its way when the connection broke may be stored or not, and no ack will come.
                msg = "the connection to the broker is lost"
                raise Unavailable(msg)
            burst.result()
        finally:
            reconnect.cancel()
            burst.cancel()
            await asyncio.gather(burst, return_exceptions=True)

    async def _burst(self) -> None:
        commit: asyncio.Task[None] | None = None
        try:
            while (
                self._at.closed != "sealed" and (batch := await self._window.take(self._at.items)) is not None
            ):
                await self._uploader.store(batch.uploads.values())
                # Staged while the commit of the batch before it is awaited.
                atomic = AtomicBatch(self._mesh, self._mesh.topology.tasks)
                await atomic.stage(batch.messages)
                if commit is not None:
                    await commit
                    if self._at.closed == "sealed":  # the job had ended before: see `undo_if_late`
                        return
                commit = asyncio.create_task(self._commit(atomic, batch))
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
            if commit is not None:
                await commit
            if self._at.closed != "sealed":
                # Nothing (more) to store: an empty job, or one whose last batch was smaller than thought.
                await self._commit(AtomicBatch(self._mesh, self._mesh.topology.tasks), None)
        finally:
            if commit is not None and not commit.done():
                commit.cancel()
                await asyncio.gather(commit, return_exceptions=True)

    async def _commit(self, atomic: AtomicBatch, batch: Batch | None) -> None:
        items, line = (batch.end, batch.lines[-1]) if batch else (self._at.items, self._at.line)
        if batch is None and items != self._total:
            msg = f"the input gave {items:,} items, and {self._total:,} when it was checked: it was changed meanwhile"
            raise Conflict(msg, code="input_changed")
        closed = "sealed" if items == self._total else ""
        manifest = Manifest(
            job=self._job,
            input_fingerprint=self._fingerprint,
            stored=items,
            consumed_lines=line,
            closed=closed,
            shapes=self._shapes(batch),
        )
        message = manifest_message(self._mesh, manifest)
        ack = await atomic.commit(message, expected_last_subject_seq=self._at.seq)
        self._at = Stored(items, line, ack.seq, closed, manifest.shapes)
        if batch is not None:
            self._window.confirm()
        crash_point("submit-batch-stored")
        if self._unfenced:
            # Expecting no manifest is no fence against a job that has come and gone.
            count = await undo_if_late(self._mesh, self._job)
            self._unfenced = False
            if count is not None:
                self._at = Stored(count, closed="sealed")
        self._progress(items, "")
        self._commits += 1
        if self._commits % _KEEP_EVERY == 0:
            await drop_old_manifests(self._mesh, self._job)

    def _shapes(self, batch: Batch | None) -> dict[str, int]:
        """What is stored by shape with `batch`: the last manifest's count, and the shape in each subject."""
        shapes = dict(self._at.shapes)
        if batch is not None:
            for subject, n in Counter(m.subject for m in batch.messages).items():
                shape = subject.rsplit(".", 2)[1]
                shapes[shape] = shapes.get(shape, 0) + n
        return shapes

    def _gave_up(self, trouble: HeadraceError) -> HeadraceError:
        """The error that names what is not stored."""
        stored, total = self._at.items, self._total
        what = (
            f"job {self._job}: {stored:,} of {total:,} items are confirmed as stored; items {stored:,}..{total - 1:,} "
            f"(after line {self._at.line:,}) are not: {trouble}. Run the same command again to go on from there"
        )
        if isinstance(trouble, JetStreamError) and trouble.err_code in STREAM_IS_FULL:
            return Refused(what, code="queue_full")
        return Unavailable(what, code=trouble.code)
