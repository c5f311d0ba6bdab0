"""The account on real parts: by shape, of all jobs together, with a slow sink, through retries and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.completion import counting
from headrace.completion.counting import count_landed, doubled, gaps
from headrace.completion.outcomes import insert_results
from headrace.completion.store import Connection, Store
from headrace.contracts import codec
from headrace.contracts.api import JobAudit, ShapeAccount, TenantAudit
from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import Task, TextPrompt
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.completion.world import (
    FUNCTION,
    SHAPE,
    Producer,
    assert_cancelled,
    cancel,
    process,
    register,
    result,
    serving,
    until,
    with_options,
)

pytestmark = pytest.mark.anyio
TERMINAL = ("ok", "failed", "dead", "cancelled")


async def tenant(mesh: Mesh) -> TenantAudit:
    body = await call_api(mesh, "audit", {}, timeout_s=20)
    return msgspec.json.decode(body, type=TenantAudit)


def total(account: JobAudit | TenantAudit | ShapeAccount) -> int:
    return sum(getattr(account, name) for name in (*TERMINAL, "queued", "landing"))


def assert_law(audit: JobAudit | TenantAudit) -> None:
    assert audit.balanced, audit
    assert total(audit) == audit.submitted
    for account in audit.shapes:
        assert total(account) == account.submitted, account
    for name in ("submitted", *TERMINAL, "queued", "landing"):
        assert sum(getattr(a, name) for a in audit.shapes) == getattr(audit, name), (name, audit)


def shapes(audit: JobAudit | TenantAudit, *names: str) -> dict[str, tuple[int, ...]]:
    return {a.shape: tuple(getattr(a, n) for n in names) for a in audit.shapes}


# --- by shape ---------------------------------------------------------------------------------------
async def test_each_shape_has_its_account(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6, 6, 9))
        await job.whole(30)
        await job.work(range(6))
        await job.work([6, 8], "failed")
        await until(job.results_empty)
        audit = await job.audit()
        assert_law(audit)
        assert shapes(audit, "submitted", "ok", "failed", "queued") == {
            "t6": (20, 4, 1, 15),
            "t9": (10, 2, 1, 7),
        }
        await job.work([7, *range(9, 30)])
        status = await job.ended()
        assert (status.ok, status.failed) == (28, 2)
        # The record is gone with the job: its shapes stand in its events, and in its row.
        await until(lambda: _no_record(job))
        audit = await job.audit()
        assert_law(audit)
        assert shapes(audit, "submitted", "ok", "failed") == {"t6": (20, 19, 1), "t9": (10, 9, 1)}
        assert shapes(await tenant(mesh), "submitted", "ok", "failed") == {
            "t6": (20, 19, 1),
            "t9": (10, 9, 1),
        }


async def _no_record(job: Producer) -> bool:
    subject = job.mesh.subjects.manifest(job.job)
    return await jsapi.last_message(job.mesh, job.mesh.topology.tasks, subject) is None


async def test_what_a_cancellation_filled_in_is_what_remains_of_each_shape(
    mesh: Mesh, settings: Settings
) -> None:
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6, 6, 9))
        await job.whole(30)
        await job.work(range(9))
        await until(job.results_empty)
        await cancel(mesh)
        await assert_cancelled(job, count=30, ok=9)
        audit = await job.audit()
        assert_law(audit)
        assert shapes(audit, "submitted", "ok", "cancelled") == {"t6": (20, 6, 14), "t9": (10, 3, 7)}
        assert shapes(await tenant(mesh), "submitted", "ok", "cancelled") == {
            "t6": (20, 6, 14),
            "t9": (10, 3, 7),
        }


async def test_an_open_job_that_is_cancelled_keeps_its_shapes(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6, 9))
        await job.open()
        await job.submit(10)
        await cancel(mesh)
        await assert_cancelled(job, count=10, ok=0)
        for audit in (await job.audit(), await tenant(mesh)):
            assert_law(audit)
            assert shapes(audit, "submitted", "cancelled") == {"t6": (5, 5), "t9": (5, 5)}


async def test_a_job_whose_shapes_nobody_noted_has_one_row(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings):
        job = Producer(mesh, "j")
        await job.whole(5)
        await job.work(range(2))
        await until(job.results_empty)
        audit = await job.audit()
        assert_law(audit)
        assert shapes(audit, "submitted", "ok", "queued") == {"?": (5, 2, 3)}


async def test_a_loss_in_one_shape_shows_though_another_has_one_too_many(
    mesh: Mesh, settings: Settings
) -> None:
    await register(mesh)
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6, 9))
        await job.whole(10)
        await job.take_away([3])
        other = mesh.subjects.task(FUNCTION, "normal", 6, "j")
        task = Task(job="j", index=3, function=FUNCTION, prompt=TextPrompt(text="hi"))
        await mesh.request(other, msgspec.json.encode(task))
        audit = await job.audit()
        assert (audit.submitted, audit.queued, audit.balanced) == (10, 10, False)
        assert shapes(audit, "submitted", "queued") == {"t6": (5, 6), "t9": (5, 4)}


async def test_a_message_that_is_no_task_breaks_no_audit(mesh: Mesh, settings: Settings) -> None:
    """Published by hand beside a job's tasks: it is one too many there, and nothing to the others."""
    async with serving(settings):
        job, other = Producer(mesh, "j", shapes=(6,)), Producer(mesh, "k", shapes=(6,))
        await job.whole(2)
        await other.whole(2)
        for subject in (f"hr.tasks.{FUNCTION}.normal.large.j", "hr.tasks.junk", "hr.tasks.a.b.c.d.e.f"):
            await mesh.request(subject, b"{}")
        audit = await job.audit()
        assert (audit.balanced, audit.queued) == (False, 3)
        assert (await tenant(mesh)).unbalanced == ["j"]
        assert (await other.audit()).balanced


# --- counting anew ----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [3, 500_000])
async def test_gaps_and_counts_do_not_depend_on_the_slices(
    store: Store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(counting, "SLICE", size)
    present = [0, 1, 4, 5, 6, 11, 30]
    await store.write(insert_results, [result("j", i, shape=6 if i % 2 else None) for i in present], 1)
    await store.write(insert_results, [result("other", i) for i in range(40)], 1)
    assert await store.read(gaps, "j", 32) == [(2, 3), (7, 10), (12, 29), (31, 31)]
    assert await store.read(gaps, "j", 32, 2) == [(2, 3), (7, 10)]
    assert await store.read(gaps, "j", 2) == []
    assert await store.read(gaps, "nobody", 3) == [(0, 2)]
    landed = await store.read(count_landed, "j")
    assert (landed.rows, landed.counts) == (7, {(6, "ok"): 3, (None, "ok"): 4})
    assert await store.read(doubled, "j") == []


@pytest.mark.parametrize("size", [3, 500_000])
async def test_outcomes_that_no_key_guards_are_found_when_they_are_doubled(
    store: Store, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(counting, "SLICE", size)
    await store.write(insert_results, [result("j", i) for i in range(10)], 1)

    def without_key(connection: Connection) -> None:
        connection.execute("CREATE TABLE free AS SELECT * FROM outcomes")
        connection.execute('INSERT INTO free SELECT * FROM outcomes WHERE "index" IN (2, 3, 4, 8)')
        connection.execute("DROP VIEW current_outcomes")
        connection.execute("DROP TABLE outcomes")
        connection.execute("ALTER TABLE free RENAME TO outcomes")
        connection.execute("CREATE VIEW current_outcomes AS SELECT * FROM outcomes")

    await store.write(without_key)
    assert await store.read(doubled, "j") == [(2, 4), (8, 8)]
    landed = await store.read(count_landed, "j")
    assert (landed.rows, landed.indices) == (14, 10)


# --- a slow sink ------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def held_writer(store: Store) -> AsyncIterator[None]:
    """The data plane cannot write while the block lasts."""
    let_go = threading.Event()
    writing = asyncio.ensure_future(store.write(lambda _: let_go.wait(30)))
    try:
        yield
    finally:
        let_go.set()
        await writing


async def test_a_slow_sink_shows_as_landing_and_never_as_completed(mesh: Mesh, settings: Settings) -> None:
    """A12: all is done and stored, and nothing is landed."""
    async with serving(settings) as service:
        job = Producer(mesh, "j", shapes=(6,))
        await job.whole(200)
        await until(lambda: _is_sealed(job))
        async with held_writer(service._store):
            await job.work(range(200))
            for _ in range(3):
                status = await job.status()
                assert (status.ok, status.queued, status.landing, status.state) == (0, 0, 200, "sealed")
                audit = await job.audit()
                assert_law(audit)
                assert (audit.landing, audit.sources.rows_landed) == (200, 0)
        assert (await job.ended()).ok == 200


async def _is_sealed(job: Producer) -> bool:
    try:
        return (await job.status()).state == "sealed"
    except HeadraceError:
        return False


# --- all jobs ---------------------------------------------------------------------------------------
async def test_the_tenants_account_is_the_sum_of_the_jobs(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    async with serving(settings):
        done, failed, gone, live, opened = (Producer(mesh, n, shapes=(6, 9)) for n in "abcde")
        assert (await tenant(mesh)).jobs == 0
        for job in (done, failed, gone, live):
            await job.whole(10)
        await opened.open()
        await opened.submit(4)
        await done.work(range(10))
        await failed.work(range(8))
        await failed.work(range(8, 10), "failed")
        await gone.work(range(2))
        await until(done.results_empty)
        await cancel(mesh, "c")
        await live.work(range(3))
        for job in (done, failed, gone):
            await job.ended()
        await until(done.results_empty)
        audit = await tenant(mesh)
        assert_law(audit)
        assert (audit.jobs, audit.open_jobs, audit.submitted) == (5, 2, 44)
        assert (audit.ok, audit.failed, audit.cancelled, audit.queued) == (23, 2, 8, 11)
        assert shapes(audit, "submitted", "queued") == {"t6": (22, 5), "t9": (22, 6)}


async def test_the_tenants_account_names_the_jobs_that_do_not_balance(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service:
        jobs = [Producer(mesh, name, shapes=(6,)) for name in ("good", "lost-row", "lost-task")]
        for job in jobs:
            await job.whole(6)
            await job.work(range(6) if job.job != "lost-task" else range(3))
        for job in jobs[:2]:
            await job.ended()
        await service._store.write(
            lambda c: c.execute("""DELETE FROM outcomes WHERE job = 'lost-row' AND "index" = 2""")
        )
        await jobs[2].take_away([4])
        audit = await tenant(mesh)
        assert not audit.balanced
        assert sorted(audit.unbalanced) == ["lost-row", "lost-task"]
        assert (audit.jobs, audit.open_jobs) == (3, 1)


async def test_a_job_that_the_data_plane_has_not_heard_of_counts(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service, held_writer(service._store):
        job = Producer(mesh, "j", shapes=(6,))
        await job.whole(5)
        audit = await tenant(mesh)
        assert_law(audit)
        assert (audit.jobs, audit.submitted, audit.queued) == (1, 5, 5)


async def test_thousands_of_ended_jobs_take_one_statement(mesh: Mesh, settings: Settings) -> None:
    async with serving(settings) as service:

        def fill(connection: Connection) -> None:
            connection.execute(
                """INSERT INTO jobs (job, state, count, landed, ok, shapes, announced)
                SELECT 'j' || i, 'completed', 10, 10, 10, '{"t6":10}', true FROM range(3000) AS r(i)"""
            )
            connection.execute(
                """INSERT INTO outcomes (job, "index", generation, tenant, function, status, attempt, prompt_tokens,
                    completion_tokens, cached_tokens, landed_at, chat, shape)
                SELECT 'j' || (i // 10), i % 10, 1, 'default', 'echo', 'ok', 1, 1, 1, 0, now()::TIMESTAMP, false, 6
                FROM range(30000) AS r(i)"""
            )

        await service._store.write(fill)
        before = await _requests(mesh)
        audit = await tenant(mesh)
        assert_law(audit)
        assert (audit.jobs, audit.open_jobs, audit.ok) == (3_000, 0, 30_000)
        assert await _requests(mesh) - before < 50


async def _requests(mesh: Mesh) -> int:
    return int((await jsapi.account_info(mesh))["api"]["total"])


# --- retries ----------------------------------------------------------------------------------------
async def test_every_sample_of_a_retry_balances(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    async with serving(settings):
        job = Producer(mesh, "j", shapes=(6, 9))
        await job.whole(60)
        task = {i: Task(job="j", index=i, function=FUNCTION, prompt=TextPrompt(text="hi")) for i in range(60)}
        for i in range(60):
            await job.results(
                [result("j", i, "failed" if i < 40 else "ok", task=task[i], shape=job.shape_of(i))]
            )
        await job.take_away(range(60))
        assert (await job.ended()).failed == 40
        reply = msgspec.json.decode(await call_api(mesh, "retry", {"job": "j"}, timeout_s=20))
        assert (reply["generation"], reply["resubmitted"]) == (2, 40)

        async def sample() -> JobAudit:
            audit = await job.audit()
            assert_law(audit)
            assert (audit.submitted, audit.generation, audit.missing) == (60, 2, [])
            assert shapes(audit, "submitted") == {"t6": (30,), "t9": (30,)}
            assert_law(await tenant(mesh))
            return audit

        # Before, while and after completion stores the tasks anew.
        while (await sample()).queued and not await _has_tasks(job):
            pass
        await until(lambda: _has_tasks(job, 40))
        for first in range(0, 40, 8):
            again = range(first, first + 8)
            await job.results(result("j", i, generation=2, shape=job.shape_of(i)) for i in again)
            await job.take_away(again)
            await sample()
        await job.ended()
        audit = await sample()
        assert (audit.state, audit.ok, audit.failed, audit.sources.rows_landed) == ("completed", 60, 0, 100)


async def _has_tasks(job: Producer, count: int = 1) -> bool:
    subject = job.mesh.subjects.tasks_of_job("j")
    return await jsapi.count_subject(job.mesh, job.mesh.topology.tasks, subject) >= count


# --- through restarts -------------------------------------------------------------------------------
async def test_the_account_holds_through_kills_of_completion(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    """A1's sampling: whenever completion answers, what it says balances; SIGKILL in between changes nothing."""
    settings = with_options(settings, batch_rows=40)
    job = Producer(mesh, "j", shapes=(6, 9))
    samples: list[Any] = []
    async with process(settings, tmp_path) as running:
        await job.whole(1_000)
        for part in range(5):
            await job.work(range(part * 200, part * 200 + 200))
            audit = await job.audit()
            assert_law(audit)
            samples.append(audit.ok)
            running.kill()
            await running.start()
        await job.ended()
        audit = await job.audit()
        assert_law(audit)
        assert_law(await tenant(mesh))
    assert (audit.ok, audit.missing, audit.doubled) == (1_000, [], [])
    assert samples == sorted(samples)


async def test_tasks_whose_lease_a_killed_broker_forgot_are_one_item_each(
    mesh: Mesh, settings: Settings
) -> None:
    """Their outcomes landed, and they wait once more with nobody who holds them: in two places, and counted once."""
    job = Producer(mesh, "j")
    await job.whole(300)
    await job.work(range(40, 300), remove=False)
    async with serving(settings):
        await until(job.results_empty)
        audit = await job.audit()
        assert_law(audit)
        assert (audit.ok, audit.queued, audit.sources.tasks_in_broker) == (260, 40, 300)
        status = await job.status()
        assert (status.ok, status.queued) == (260, 40)
        # One more than there may be is still found.
        task = Task(job="j", index=299, function=FUNCTION, prompt=TextPrompt(text="hi"), generation=9)
        await publish(
            mesh,
            mesh.topology.tasks,
            mesh.subjects.task(FUNCTION, "normal", SHAPE, "j"),
            codec.TASK.encode(task),
        )
        assert not (await job.audit()).balanced
