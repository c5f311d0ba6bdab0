"""One run of a submit: check everything, open the job, store it, seal it.

Running it again, by whomever and after whatever end, goes on after the last stored batch: every step looks at
what the broker has before it adds to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from headrace.client.acceptance import Acceptance
from headrace.client.checking import Checked, Checker
from headrace.client.feed import Feed
from headrace.client.formats import LineDecoder
from headrace.client.inputs import Input
from headrace.client.jobs import (
    Stored,
    drop_old_manifests,
    finished_count,
    last_event,
    open_job,
    read_manifest,
    seal_job,
)
from headrace.client.options import OnProgress, Progress, Receipt, SubmitOptions
from headrace.client.policies import deadline_us, share, time_text
from headrace.client.problems import InvalidLines
from headrace.client.storing import Storer
from headrace.client.tasks import TaskMaker, task_headers
from headrace.client.tokenise import Tokeniser
from headrace.contracts.errors import HeadraceError, InvalidInput, Unavailable
from headrace.contracts.messages import FunctionSpec, JobOpened, JobSealed
from headrace.contracts.names import Lane
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.jsapi import JetStreamError
from headrace.mesh.spans import JobTrace, submit_span

log = logging.getLogger("headrace.client")
T = TypeVar("T")


class Submission:
    """One run of a submit, over an opened input."""

    def __init__(
        self,
        mesh: Mesh,
        lines: Input,
        spec: FunctionSpec,
        tokeniser: Tokeniser | None,
        *,
        job: str,
        lane: Lane,
        options: SubmitOptions,
        report: OnProgress,
    ) -> None:
        self._mesh = mesh
        self._lines = lines
        self._spec = spec
        self._tokeniser = tokeniser
        self._job = job
        self._lane = lane
        self._options = options
        self._report = report
        self._tenant = options.tenant or mesh.settings.tenant
        self._trace: JobTrace | None = None
        self._deadline_us = None if options.deadline is None else deadline_us(options.deadline)
        self._max_failed = None if options.max_failed is None else share(options.max_failed)
        self._notes: list[str] = []

    async def run(self) -> Receipt:
        """Check, open, store, seal."""
        checked = await self._check()
        if checked.refused and not self._options.skip_bad:
            raise InvalidLines(checked.errors, checked.refused)
        known = await self._patiently(lambda: last_event(self._mesh, self._job, "opened"))
        # A resumed submit stays in the trace that the job began with.
        before = known.traceparent if isinstance(known, JobOpened) else None
        self._trace = self._new_trace(before or self._options.traceparent)
        try:
            if known is None and self._deadline_us is not None and self._deadline_us <= _now_us():
                raise _too_late(self._deadline_us)
            opened = await self._patiently(lambda: open_job(self._mesh, self._opened(checked), known))
            self._keep_policy(opened)
            receipt = await self._store(checked)
        except BaseException as e:
            self._end_trace(0, e)
            raise
        self._end_trace(receipt.submitted, None)
        return receipt

    def _keep_policy(self, opened: JobOpened) -> None:
        """A job's deadline is the one that it was opened with, so a resumed submit gives its items that one."""
        if known := opened.deadline_us:
            if self._deadline_us not in (None, known):
                self._notes.append(f"the job keeps the deadline that it was opened with, {time_text(known)}")
        elif self._deadline_us is not None:
            self._notes.append("the job was opened without a deadline, and keeps none")
        if self._max_failed not in (None, opened.max_failed):
            kept = "none" if opened.max_failed is None else f"{opened.max_failed:g}"
            self._notes.append(f"the job keeps the failure limit that it was opened with: {kept}")
        self._deadline_us = opened.deadline_us

    # --- the steps -----------------------------------------------------------------------------------
    def _new_trace(self, parent: str | None) -> JobTrace | None:
        return submit_span(
            job=self._job,
            function=self._spec.name,
            tenant=self._tenant,
            lane=self._lane.value,
            stream=self._mesh.topology.tasks,
            stored=parent,
        )

    def _acceptance(self) -> Acceptance:
        headers = task_headers(self._trace.send if self._trace is not None and self._trace.sampled else None)
        maker = TaskMaker(
            self._mesh.subjects,
            self._spec,
            job=self._job,
            lane=self._lane,
            tenant=self._tenant,
            max_payload=self._mesh.max_payload,
            headers=headers,
            large=self._mesh.settings.large_item_bytes,
            limit=min(self._mesh.settings.max_item_bytes, BlobStore(self._mesh).limit),
            deadline_us=self._deadline_us,
        )
        decoder = LineDecoder(self._spec, form=self._options.form, defaults=self._options.defaults)
        return Acceptance(decoder, maker, self._tokeniser)

    async def _check(self) -> Checked:
        """The first pass, in a thread; a cancelled submit ends it."""

        def progress(bytes_read: int, _accepted: int) -> None:
            total = self._lines.total_bytes
            self._report(Progress(job=self._job, phase="checking", bytes_read=bytes_read, total_bytes=total))

        checker = Checker(self._lines, self._acceptance(), progress)
        try:
            return await asyncio.to_thread(checker.run, self._mapping())
        finally:
            checker.stop.set()

    def _mapping(self) -> Mapping[str, Any]:
        o = self._options
        return {
            "tenant": self._tenant,
            "function": o.function,
            "lane": self._lane.value,
            "form": o.form,
            "column": o.column,
            "id_column": o.id_column,
            "defaults": {k: v for k, v in o.defaults.items() if v is not None},
        }

    def _opened(self, checked: Checked) -> JobOpened:
        return JobOpened(
            job=self._job,
            function=self._spec.name,
            input_fingerprint=checked.fingerprint,
            tenant=self._tenant,
            lane=self._lane,
            model=self._spec.model or None,
            source=self._lines.name[:1024],
            at_us=_now_us(),
            traceparent=self._trace.traceparent if self._trace is not None else None,
            deadline_us=self._deadline_us,
            max_failed=self._max_failed,
            pipeline=self._options.pipeline,
            stage=self._options.stage,
        )

    async def _look(self, checked: Checked) -> tuple[Stored, int | None]:
        """What is stored, and the count of the job if its intake has ended.

        In this order: a job that completes in between loses its manifest, but has its `sealed` event by then.
        """
        stored = await read_manifest(self._mesh, self._job, checked.fingerprint)
        return stored, await finished_count(self._mesh, self._job)

    async def _store(self, checked: Checked) -> Receipt:
        total = checked.accepted
        stored, count = await self._patiently(lambda: self._look(checked))
        if count is not None:
            note = f"job {self._job} was submitted before, with this input: nothing was added"
            return self._receipt(checked, count, count, note)
        at = stored
        if stored.closed != "sealed":
            feed = Feed(
                self._lines,
                self._acceptance(),
                skip=checked.duplicates,
                after_line=stored.line,
                first_index=stored.items,
            )

            def progress(items: int, waiting: str) -> None:
                if self._trace is not None:
                    self._trace.stored(items)
                self._report(
                    Progress(
                        job=self._job,
                        phase="storing",
                        bytes_read=feed.position(),
                        total_bytes=self._lines.total_bytes,
                        stored=items,
                        items=total,
                        waiting=waiting,
                    )
                )

            storer = Storer(
                self._mesh,
                feed,
                job=self._job,
                fingerprint=checked.fingerprint,
                total=total,
                patience_s=self._options.patience_s,
                progress=progress,
                prepare_in_thread=self._tokeniser is not None,
            )
            at = await storer.run(stored)
        self._lines.check_unchanged()
        await self._seal(checked, at)
        self._report(Progress(job=self._job, phase="sealed", stored=total, items=total))
        return self._receipt(checked, total, stored.items, None)

    async def _seal(self, checked: Checked, at: Stored) -> None:
        sealed = JobSealed(
            job=self._job,
            count=checked.accepted,
            input_fingerprint=checked.fingerprint,
            refused=checked.refused,
            at_us=_now_us(),
            shapes=dict(at.shapes),
        )
        await self._patiently(lambda: seal_job(self._mesh, sealed))
        try:
            await drop_old_manifests(self._mesh, self._job)
        except (JetStreamError, Unavailable) as e:
            # Tidiness only: completion removes the rest with the job.
            log.info("old manifests stay", extra={"job": self._job, "reason": str(e)[:300]})

    async def _patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """The value of a step that is safe to repeat; it is, while the broker is away, for `patience_s`."""
        clock = asyncio.get_running_loop().time
        until, attempt = clock() + self._options.patience_s, 0
        while True:
            try:
                return await step()
            except Unavailable as e:
                if clock() >= until or self._mesh.closed.is_set():
                    raise
                self._report(Progress(job=self._job, phase="storing", waiting=str(e)))
            await asyncio.sleep(min(backoff_s(attempt, base=0.1), max(0.0, until - clock())))
            attempt += 1

    def _receipt(self, checked: Checked, submitted: int, resumed_from: int, note: str | None) -> Receipt:
        return Receipt(
            job=self._job,
            submitted=submitted,
            refused=checked.refused,
            resumed_from=resumed_from,
            errors=checked.errors,
            notes=[*checked.notes, *self._notes, *([note] if note else [])],
            trace_id=self._trace.trace_id if self._trace is not None else None,
        )

    def _end_trace(self, count: int, error: BaseException | None) -> None:
        if self._trace is not None:
            code = error.code if isinstance(error, HeadraceError) else type(error).__name__ if error else None
            self._trace.end(count=count, error=code)


def _too_late(at_us: int) -> InvalidInput:
    msg = f"the deadline {time_text(at_us)} has passed: nothing was stored"
    return InvalidInput(msg, field="deadline", code="invalid_deadline")


def _now_us() -> int:
    return time.time_ns() // 1_000
