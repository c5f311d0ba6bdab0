"""Submitting a job: check everything, open the job, store it, seal it. Resumable at every step.

`Submission` is one attempt; running it again, by whomever and after whatever end, goes on after the last stored
batch. The path is that of DESIGN.md, "The path of a task", step 1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.client.acceptance import Acceptance
from headrace.client.checking import Checked, Checker
from headrace.client.feed import Feed
from headrace.client.formats import LineDecoder
from headrace.client.inputs import Input, SourceArgument, open_input
from headrace.client.jobs import (
    drop_old_manifests,
    finished_count,
    last_event,
    new_job_name,
    open_job,
    read_manifest,
    seal_job,
)
from headrace.client.options import OnProgress, Progress, Receipt, SubmitOptions
from headrace.client.problems import InvalidLines
from headrace.client.storing import Storer
from headrace.client.tasks import TaskMaker, task_headers
from headrace.client.tokenise import Tokeniser, choose_tokeniser
from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import FunctionSpec, JobOpened, JobSealed
from headrace.contracts.names import Lane, check_token
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import get_function
from headrace.mesh.spans import JobTrace, submit_span


async def submit(
    mesh: Mesh,
    source: SourceArgument,
    *,
    job: str | None = None,
    options: SubmitOptions | None = None,
    on_progress: OnProgress | None = None,
) -> Receipt:
    """Store every line of `source` durably under `job` (a new UUIDv7 by default) and return the receipt.

    Raise `InvalidLines` (nothing is stored) unless `skip_bad`; `InvalidInput`, `NotFound` (file, function); `Conflict`
    (the name is taken by another input, the job was cancelled); `Refused` or `Unavailable` naming what is not stored.
    """
    options = options or SubmitOptions()
    name = check_token("job", job) if job is not None else new_job_name()
    mesh.subjects.task(options.function, options.lane, 0, name)  # refuses what cannot stand in a subject
    lane = Lane(options.lane)
    spec = await get_function(mesh, options.function)
    if options.tenant is not None:
        check_token("tenant", options.tenant)
    report = on_progress or _quiet
    report(Progress(job=name, phase="reading"))
    tokeniser, note = await asyncio.to_thread(choose_tokeniser, spec, options.tokenise, options.tokenizer)
    opened = await asyncio.to_thread(
        open_input,
        source,
        input_format=options.input_format,
        column=options.column,
        id_column=options.id_column,
    )
    with opened as lines:
        run = Submission(mesh, lines, spec, tokeniser, job=name, lane=lane, options=options, report=report)
        receipt = await run.run()
    return receipt if note is None else _with_note(receipt, note)


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

    async def run(self) -> Receipt:
        """Check, open, store, seal."""
        checked = await self._check()
        if checked.refused and not self._options.skip_bad:
            raise InvalidLines(checked.errors, checked.refused)
        known = await last_event(self._mesh, self._job, "opened")
        # A resumed submit stays in the trace that the job began with.
        before = known.traceparent if isinstance(known, JobOpened) else None
        self._trace = self._new_trace(before or self._options.traceparent)
        try:
            await open_job(self._mesh, self._opened(checked), known)
            receipt = await self._store(checked)
        except BaseException as e:
            self._end_trace(0, e)
            raise
        self._end_trace(receipt.submitted, None)
        return receipt

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
        )

    async def _store(self, checked: Checked) -> Receipt:
        total = checked.accepted
        # The manifest is read before the events: a job that completes in between has its `sealed` event by then.
        stored = await read_manifest(self._mesh, self._job, checked.fingerprint)
        count = await finished_count(self._mesh, self._job)
        if count is not None:
            note = f"job {self._job} was submitted before, with this input: nothing was added"
            return self._receipt(checked, count, count, note)
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
            await storer.run(stored)
        self._lines.check_unchanged()
        await self._seal(checked)
        self._report(Progress(job=self._job, phase="sealed", stored=total, items=total))
        return self._receipt(checked, total, stored.items, None)

    async def _seal(self, checked: Checked) -> None:
        sealed = JobSealed(
            job=self._job,
            count=checked.accepted,
            input_fingerprint=checked.fingerprint,
            refused=checked.refused,
            at_us=_now_us(),
        )
        await seal_job(self._mesh, sealed)
        await drop_old_manifests(self._mesh, self._job)

    def _receipt(self, checked: Checked, submitted: int, resumed_from: int, note: str | None) -> Receipt:
        return Receipt(
            job=self._job,
            submitted=submitted,
            refused=checked.refused,
            resumed_from=resumed_from,
            errors=checked.errors,
            notes=[*checked.notes, *([note] if note else [])],
            trace_id=self._trace.trace_id if self._trace is not None else None,
        )

    def _end_trace(self, count: int, error: BaseException | None) -> None:
        if self._trace is not None:
            code = error.code if isinstance(error, HeadraceError) else type(error).__name__ if error else None
            self._trace.end(count=count, error=code)


def _quiet(_progress: Progress) -> None:
    """Nobody wants to know."""


def _with_note(receipt: Receipt, note: str) -> Receipt:
    return msgspec.structs.replace(receipt, notes=[*receipt.notes, note])


def _now_us() -> int:
    return time.time_ns() // 1_000


__all__ = ["OnProgress", "Progress", "Receipt", "Submission", "SubmitOptions", "submit"]
