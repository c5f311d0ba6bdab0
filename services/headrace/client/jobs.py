"""What the broker knows of a job's intake: its events, and the manifest beside its tasks."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping

from msgspec import Struct

from headrace.contracts.codec import JOB_EVENT, MANIFEST, SCHEMA_HEADER
from headrace.contracts.errors import Conflict, Unavailable
from headrace.contracts.messages import JobCancelled, JobCompleted, JobEvent, JobOpened, JobSealed, Manifest
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import (
    NO_MESSAGE,
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SUBJECT_SEQUENCE,
    JetStreamError,
    call,
    last_message,
    purge,
)
from headrace.mesh.publisher import publish
from headrace.mesh.wire import OutMessage, header_block

TAKEN = (WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE)
"""A compare-and-set found another message: somebody, perhaps we ourselves, was there before."""


class Stored(Struct, frozen=True):
    """What the last manifest says: items 0..`items`-1 of lines up to `line` are stored; `seq` is its own sequence.

    `shapes` are the items by shape token.
    """

    items: int = 0
    line: int = 0
    seq: int = 0
    closed: str = ""
    shapes: Mapping[str, int] = {}


def new_job_name() -> str:
    """A UUIDv7: names sort by the time at which they were made (RFC 9562, section 5.7)."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return str(uuid.UUID(int=value))


async def last_event(mesh: Mesh, job: str, event: str) -> JobEvent | None:
    """The job's event of that name, or None."""
    found = await last_message(mesh, mesh.topology.jobs, mesh.subjects.job_event(job, event))
    return None if found is None else JOB_EVENT.decode(found.data, found.headers)


async def open_job(mesh: Mesh, opened: JobOpened, known: JobEvent | None) -> JobOpened:
    """Make the job, unless it is `known` as made before with the same input; return how it was opened.

    Raise `Conflict` naming both fingerprints if the name belongs to another input.
    """
    if known is None:
        known = await _publish_event(mesh, opened, "opened")
        crash_point("submit-opened")
    if not isinstance(known, JobOpened) or known.input_fingerprint != opened.input_fingerprint:
        theirs = known.input_fingerprint if isinstance(known, JobOpened) else "unknown"
        msg = (
            f"job {opened.job} exists with another input or other settings (fingerprint {theirs}, this one has "
            f"{opened.input_fingerprint}): choose another name"
        )
        raise Conflict(msg, code="job_exists")
    return known


async def seal_job(mesh: Mesh, sealed: JobSealed) -> None:
    """Say that every accepted line is stored. Safe to repeat."""
    await _publish_event(mesh, sealed, "sealed")
    crash_point("submit-sealed")


async def _publish_event(mesh: Mesh, event: JobOpened | JobSealed, name: str) -> JobEvent:
    """Publish the job's only event of that name; return it, or the one that was there before."""
    subject = mesh.subjects.job_event(event.job, name)
    headers = {SCHEMA_HEADER: JOB_EVENT.name}
    try:
        await publish(
            mesh,
            mesh.topology.jobs,
            subject,
            JOB_EVENT.encode(event),
            headers=headers,
            expected_last_subject_seq=0,
        )
    except (JetStreamError, Unavailable) as e:
        if isinstance(e, JetStreamError) and e.err_code not in TAKEN:
            raise
        known = await last_event(mesh, event.job, name)
        if known is None:
            raise
        return known
    return event


async def finished_count(mesh: Mesh, job: str) -> int | None:
    """How many items the job has if its intake has ended; None while it is open.

    Raise `Conflict` if it was cancelled. A completed job's manifest is gone, so the events are what counts.
    """
    for name in ("cancelled", "sealed", "completed"):
        event = await last_event(mesh, job, name)
        if isinstance(event, JobCancelled) or (
            isinstance(event, JobCompleted) and event.state == "cancelled"
        ):
            raise cancelled(job)
        if isinstance(event, JobSealed | JobCompleted):
            return event.count
    return None


def cancelled(job: str) -> Conflict:
    """The error of a submit to a job that somebody cancelled."""
    return Conflict(f"job {job} was cancelled: submit under another name", code="job_cancelled")


async def read_manifest(mesh: Mesh, job: str, fingerprint: str) -> Stored:
    """What the job's last manifest says is stored; `Conflict` if it is cancelled or of another input."""
    found = await last_message(mesh, mesh.topology.tasks, mesh.subjects.manifest(job))
    if found is None:
        return Stored()
    manifest = MANIFEST.decode(found.data, found.headers)
    if manifest.closed == "cancelled":
        raise cancelled(job)
    if manifest.generation > 1:
        return Stored()  # a retry's: the intake ended long before, as the job's events say
    if manifest.input_fingerprint != fingerprint:
        msg = f"job {job}: what is stored has fingerprint {manifest.input_fingerprint}, this input {fingerprint}"
        raise Conflict(msg, code="job_exists")
    return Stored(manifest.stored, manifest.consumed_lines, found.sequence, manifest.closed, manifest.shapes)


def manifest_message(mesh: Mesh, manifest: Manifest) -> OutMessage:
    """The manifest as a message: the last of an atomic batch."""
    headers = header_block({SCHEMA_HEADER: MANIFEST.name})
    return OutMessage(mesh.subjects.manifest(manifest.job), MANIFEST.encode(manifest), headers)


async def drop_old_manifests(mesh: Mesh, job: str) -> None:
    """Remove all but the last manifest of a job."""
    await purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.manifest(job), keep=1)


async def where_is(mesh: Mesh, job: str, fingerprint: str) -> Stored:
    """`read_manifest`, for a job that may have completed meanwhile: that removes its manifest."""
    stored = await read_manifest(mesh, job, fingerprint)
    if stored.seq == 0 and (count := await finished_count(mesh, job)) is not None:
        return Stored(count, closed="sealed")
    return stored


async def undo_if_late(mesh: Mesh, job: str) -> int | None:
    """After the first batch of a run that found no manifest: take it back if the job had ended before.

    A submitter that was paused while another one stored everything, and workers finished it, finds the manifest
    gone and starts again from 0. Both messages bear the broker's time, so which came first is certain. Return
    the count of the job that had ended, None if all is well.
    """
    sealed = await _stored_at(mesh, mesh.topology.jobs, mesh.subjects.job_event(job, "sealed"))
    if sealed is None:
        return None
    batch = await _stored_at(mesh, mesh.topology.tasks, mesh.subjects.manifest(job))
    if batch is None or batch < sealed:
        return None
    count = await finished_count(mesh, job)
    await purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job(job))
    await purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.manifest(job))
    return count


async def _stored_at(mesh: Mesh, stream: str, subject: str) -> str | None:
    """When the last message of `subject` was stored, by the broker's clock: a text that sorts by time."""
    try:
        found = (await call(mesh, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject}))["message"]
    except JetStreamError as e:
        if e.err_code == NO_MESSAGE:
            return None
        raise
    seconds, _, fraction = str(found["time"]).rstrip("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"
