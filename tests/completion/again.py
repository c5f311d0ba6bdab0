"""Retries as completion's tests see them: the requests, and workers that run what was stored again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.contracts import codec
from headrace.contracts.api import DeadReply, RedriveReply, RetryReply
from headrace.contracts.errors import NotFound
from headrace.contracts.messages import (
    Choice,
    ItemError,
    JobCompleted,
    JobRetried,
    Result,
    Task,
    TextPrompt,
)
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from tests.completion.world import FUNCTION, Producer, sql, until

ALL_ONCE = """SELECT count(*), count(DISTINCT "index") FROM current_outcomes WHERE job = 'j'"""


def task(job: str, index: int, **fields: Any) -> Task:
    """The task that an outcome carries."""
    fields.setdefault("prompt", TextPrompt(text=f"item {index}"))
    return Task(job=job, index=index, function=FUNCTION, custom_id=f"c{index}", **fields)


async def fail(job: Producer, indices: Any, status: str = "failed", **fields: Any) -> None:
    """A worker's part for items that it could not run: their outcomes carry their tasks."""
    indices = list(indices)
    fields.setdefault("error", ItemError(type="tries_exhausted", message="given up", field=None))
    await job.results(
        Result(
            job=job.job, index=i, function=FUNCTION, status=status, worker="w1", engine="echo", attempt=5, shape=6,
            custom_id=f"c{i}", task=task(job.job, i), **fields,
        )
        for i in indices
    )  # fmt: skip
    await job.take_away(indices)


async def ended_job(mesh: Mesh, ok: int, failed: int = 0, dead: int = 0, *, job: str = "j") -> Producer:
    """A job of that many items that ran to its end: the ok ones first, then the failed, then the dead ones."""
    producer = Producer(mesh, job)
    await producer.whole(ok + failed + dead)
    if ok:
        await producer.work(range(ok))
    if failed:
        await fail(producer, range(ok, ok + failed))
    if dead:
        await fail(producer, range(ok + failed, ok + failed + dead), "dead")
    await producer.ended(60)
    return producer


async def retry(mesh: Mesh, job: str = "j", **fields: Any) -> RetryReply:
    """What the service answers to a retry."""
    body = await call_api(mesh, "retry", {"job": job, **fields}, timeout_s=60)
    return msgspec.json.decode(body, type=RetryReply)


async def dead(mesh: Mesh, **fields: Any) -> DeadReply:
    """A page of what is dead."""
    return msgspec.json.decode(await call_api(mesh, "dead", fields, timeout_s=20), type=DeadReply)


async def redrive(mesh: Mesh, **fields: Any) -> RedriveReply:
    """What the service answers to a redrive."""
    return msgspec.json.decode(await call_api(mesh, "redrive", fields, timeout_s=60), type=RedriveReply)


async def stored_tasks(job: Producer) -> list[tuple[int, str, Task, dict[str, str]]]:
    """Sequence, subject, task and headers of each stored task of the job, in the order of the stream."""
    found, sequence = [], 1
    subject = job.mesh.subjects.tasks_of_job(job.job)
    while stored := await jsapi.next_message(job.mesh, job.mesh.topology.tasks, subject, sequence):
        decoded = codec.TASK.decode(stored.data, stored.headers)
        found.append((stored.sequence, stored.subject, decoded, stored.headers))
        sequence = stored.sequence + 1
    return found


async def run_stored(
    job: Producer,
    status: str | Callable[[Task], str] = "ok",
    *,
    only: Callable[[Task], bool] = lambda _: True,
) -> list[Task]:
    """A worker's part for every stored task that `only` takes: result, then ack. Return what it ran, in order."""
    ran: list[Task] = []
    results: list[Result] = []
    sequences: list[int] = []
    for sequence, _, each, _ in await stored_tasks(job):
        if only(each):
            how = status if isinstance(status, str) else status(each)
            ran.append(each)
            results.append(outcome(each, how))
            sequences.append(sequence)
    await job.results(results)
    for sequence in sequences:
        with contextlib.suppress(jsapi.JetStreamError):  # a cancellation purged it meanwhile
            await jsapi.delete_message(job.mesh, job.mesh.topology.tasks, sequence)
    return ran


def outcome(of: Task, status: str = "ok") -> Result:
    """What a worker stores for a task."""
    ok = status == "ok"
    return Result(
        job=of.job,
        index=of.index,
        function=of.function,
        status=status,  # type: ignore[arg-type]
        generation=of.generation,
        custom_id=of.custom_id,
        worker="w2",
        shape=6,
        choices=[Choice(text=f"again {of.generation}")] if ok else [],
        error=None if ok else ItemError(type="still_bad", message="no"),
        task=None if ok else of,
    )


async def finish(job: Producer, generation: int, status: str | Callable[[Task], str] = "ok") -> list[Task]:
    """Work until the job has ended as `generation`, and that is announced; return what was run."""
    ran: list[Task] = []

    async def ended() -> bool:
        ran.extend(await run_stored(job, status))
        event = await job.completed()
        return event is not None and event.generation >= generation

    await until(ended, 60)
    return ran


async def events(job: Producer, name: str) -> list[JobCompleted | JobRetried]:
    """Every stored event of that name."""
    found, sequence = [], 1
    subject = job.mesh.subjects.job_event(job.job, name)
    while stored := await jsapi.next_message(job.mesh, job.mesh.topology.jobs, subject, sequence):
        found.append(codec.JOB_EVENT.decode(stored.data, stored.headers))
        sequence = stored.sequence + 1
    return found


async def assert_whole(job: Producer, count: int, *, generation: int, **expected: int) -> None:
    """One current outcome for each index, one event for each generation, an empty queue, a balanced account."""
    status = await job.ended(60)
    await until(job.results_empty, 30)
    assert {name: getattr(status, name) for name in expected} == expected
    assert (status.submitted, status.generation) == (count, generation)
    assert status.ok + status.failed + status.dead + status.cancelled == count
    name = job.job
    assert await sql(job.mesh, ALL_ONCE.replace("'j'", f"'{name}'")) == [[count, count]]
    for event in ("completed", "retried"):
        first = 1 if event == "completed" else 2
        assert [e.generation for e in await events(job, event)] == list(range(first, generation + 1)), event
    assert await stored_tasks(job) == []

    async def record_gone() -> bool:
        record = await jsapi.last_message(job.mesh, job.mesh.topology.tasks, job.mesh.subjects.manifest(name))
        return record is None or codec.MANIFEST.decode(record.data).closed == "cancelled"

    await until(record_gone)
    audit = await job.audit()
    assert audit.balanced, audit
    assert audit.missing == []
    assert audit.doubled == []


async def balanced(job: Producer) -> bool:
    """Whether the job's account balances now (False while it is not known yet)."""
    with contextlib.suppress(NotFound):
        return (await job.audit()).balanced
    return False
