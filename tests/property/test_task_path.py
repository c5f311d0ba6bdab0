"""The task path as a state machine: whatever happens in whatever order, nothing is lost and nothing counts twice.

Hypothesis chooses what producers, workers, completion, the broker and somebody who cancels do next; a real
nats-server and a real DuckDB file bear it, through the product's own code (`task_steps`). After each step the account
of every job must balance and agree with a model that knows none of that code (`task_model`). At the end everything is
driven home: each index has exactly one outcome, and each job exactly one `completed` event.

The default is a fixed set of examples. `HEADRACE_TASK_PATH_EXAMPLES=5000` tries as many others, and prints how to
repeat one that fails.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from hypothesis.strategies._internal.featureflags import FeatureFlags

from headrace.completion.retry_rows import Begun
from headrace.contracts import codec
from headrace.contracts.api import RetryRequest
from headrace.contracts.errors import Conflict, NotFound, Refused
from headrace.contracts.messages import JobCompleted
from headrace.contracts.topology import Topology
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision, register_function
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.property.task_model import JobModel
from tests.property.task_steps import (
    ACK_WAIT_S,
    POINTS,
    SPEC,
    Completion,
    Held,
    Producer,
    Workers,
    crashing_at,
    lapse,
    survives,
    until_connected,
)

JOBS = ("a", "b")
ENDED = ("completed", "completed_with_errors", "cancelled")
EXAMPLES = int(os.environ.get("HEADRACE_TASK_PATH_EXAMPLES", "0"))
BROKER_KILLS = 3
"""In one example at most: each takes the time of ten other steps."""
ROUNDS = 8
HOME_S = 60.0
"""Everything must have ended within this time once nothing more goes wrong."""

SEEN: Counter[str] = Counter()
"""What happened in all examples together: a machine that never gets anywhere proves nothing."""

jobs = st.sampled_from(JOBS)
few = st.integers(1, 8)
which = st.integers(0, 7)
statuses = st.sampled_from(("ok", "failed", "dead"))
rarely = st.integers(0, 5).map(lambda n: n == 3)
ends = st.sampled_from(
    ("settle", "settle", "settle", "hold", "die", "die_before_ack", "give_back", "settle_twice")
)


afterwards = st.sampled_from(("nothing", "retry", "stranger", "retry, stranger"))
crashes = st.sampled_from((None, None, None, "now", 0, 1, 2, 3, 4, 5))
"""Whether completion dies: at a point that its step passes, by number, or after it."""


class TaskPath(RuleBasedStateMachine):
    """Rules have no preconditions: what cannot be done now does nothing, so an example repeats as it was."""

    def __init__(self) -> None:
        super().__init__()
        if not EXAMPLES:
            # Hypothesis leaves some rules out of each example. Of few examples most would get nowhere then.
            self._rules_strategy.enabled_rules_strategy = st.just(FeatureFlags())
        self.folder = Path(tempfile.mkdtemp(prefix="task-path-"))
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.server = NatsServer(self.folder / "nats", durability="relaxed")
        self.server.start()
        self.models = {job: JobModel() for job in JOBS}
        self.history: list[str] = []
        self.last_pull = time.monotonic()
        self.broker_kills = 0
        self.idle = self.failed = self.dropped = False
        self.run(self.set_up())

    @initialize(a=few, b=few)
    def begin(self, a: int, b: int) -> None:
        """Both jobs have something to lose."""
        self.run(self._store("a", a))
        self.run(self._store("b", b))

    def run(self, work: Awaitable[Any]) -> Any:
        """One step, to its end."""

        self.idle = False
        caller = sys._getframe(1)
        names = caller.f_code.co_varnames[1 : caller.f_code.co_argcount]
        self.history.append(
            f"{caller.f_code.co_name}({', '.join(f'{n}={caller.f_locals[n]!r}' for n in names)})"
        )

        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await work

        try:
            return self.runner.run(bounded())
        except BaseException:
            # Hypothesis shows an error, and what led to it, only if it comes again.
            traceback.print_exc()
            print("what happened:", *self.history, sep="\n  ")
            self.failed = True
            raise

    async def set_up(self) -> None:
        options = Settings(url=self.server.url, dir=str(self.folder), durability="relaxed")
        self.meshes = [await Mesh.connect(options, name=name) for name in ("outside", "completion")]
        for mesh in self.meshes:
            mesh.topology = Topology(mesh.subjects, ack_wait_s=ACK_WAIT_S)
        outside, inside = self.meshes
        await provision(outside)
        await register_function(outside, SPEC)
        self.producers = {job: Producer(outside, job) for job in JOBS}
        self.workers = Workers(outside)
        self.completion = Completion(inside, self.folder)
        await self.completion.start()

    # --- the producer ------------------------------------------------------------------------------
    @rule(
        job=jobs, n=few, lose_ack=st.booleans(), seal=rarely, die_before_event=st.booleans(), stranger=rarely
    )
    def produce(
        self, job: str, n: int, lose_ack: bool, seal: bool, die_before_event: bool, stranger: bool
    ) -> None:
        """A producer stores a batch or closes the intake, and may not hear of it.

        A stranger knows nothing of the job: it was told to submit it as well, and may have slept through all of it.
        """
        if stranger:
            SEEN["stranger"] += 1
            self.run(self._store(job, n, producer=Producer(self.meshes[0], job)))
        elif seal:
            self.run(self._seal(job, die_before_event))
        else:
            self.run(self._store(job, n, lose_ack))

    async def _store(
        self,
        job: str,
        n: int,
        lose_ack: bool = False,
        *,
        unsure: bool = False,
        producer: Producer | None = None,
    ) -> None:
        model, producer = self.models[job], producer or self.producers[job]
        await self._open(job)
        if producer.at.closed:
            return
        try:
            added = await producer.store(n, lose_ack=lose_ack)
        except Conflict:
            assert model.cancel_asked, "refused as cancelled, and nobody cancelled"
            await self._count_what_is_stored(job, n if unsure else 0)
            return
        if added:
            assert not model.intake_closed, "a batch was stored after the intake was closed"
            model.stored += added
            return
        # A batch was there already: what the producer knows now is what the broker has.
        more = (0, n) if unsure else (0,)
        assert producer.at.items - model.stored in more, (producer.at, model.stored)
        model.stored = producer.at.items

    async def _open(self, job: str) -> None:
        if not self.models[job].opened:
            self.models[job].opened = True
            await self.producers[job].open()

    async def _count_what_is_stored(self, job: str, more: int) -> None:
        """The job was cancelled while a batch was on its way: it is stored whole, or not at all."""
        mesh = self.meshes[0]
        found = await jsapi.last_message(mesh, mesh.topology.tasks, mesh.subjects.manifest(job))
        assert found is not None
        stored = codec.MANIFEST.decode(found.data).stored
        assert stored - self.models[job].stored in (0, more)
        self.models[job].stored = stored

    async def _seal(self, job: str, die_before_event: bool = False) -> bool:
        model, producer = self.models[job], self.producers[job]
        if not model.opened:
            return False
        try:
            closed = await producer.seal(die_before_event=die_before_event)
        except Conflict:
            assert model.cancel_asked, "refused as cancelled, and nobody cancelled"
            return True
        model.sealed = model.intake_closed = model.sealed or closed
        return closed and not die_before_event

    # --- workers -----------------------------------------------------------------------------------
    @rule(n=few, end=ends, status=statuses, other=statuses, after_lapse=st.booleans())
    def work(self, n: int, end: str, status: str, other: str, after_lapse: bool) -> None:
        """A worker pulls (what another one let lapse comes again), and this becomes of it."""
        if after_lapse and self.dropped:
            self.dropped = False
            self.run(lapse(self.last_pull))
        got = self.run(self.workers.pull(n))
        self.last_pull = time.monotonic()
        SEEN["redelivered"] += sum(h.delivery.delivered > 1 for h in got)
        self.run(self._end(got, end, status, other))

    @rule(first=which, n=few, end=ends, status=statuses, other=statuses)
    def work_goes_on(self, first: int, n: int, end: str, status: str, other: str) -> None:
        """A worker ends what it held; its lease may have lapsed, and another may have been quicker."""
        held = self.workers.held
        at = first % len(held) if held else 0
        taken = held[at : at + n]
        del held[at : at + n]
        SEEN["late"] += len(taken)
        if taken:
            self.run(self._end(taken, end, status, other))

    async def _end(self, held: list[Held], end: str, status: str, other: str) -> None:
        SEEN[end] += len(held)
        match end:
            case "settle":
                await self._settle(held, status)
            case "settle_twice":  # it was taken for dead, came back, and says something else
                await self._settle(held, status)
                await self._settle(held, other)
            case "die_before_ack":
                for h in held:
                    self.models[h.task.job].publish(h.task.index, h.task.generation, status)
                    await self.workers.publish(h, status)
            case "give_back":
                for h in held:
                    self.workers.settler.nak(h.delivery, 0.01)
                await self.meshes[0].flush()
            case "hold":
                self.workers.held += held
            case _:  # dead: what it held is nobody's until its lease is over
                pass
        self.dropped = self.dropped or (bool(held) and end in ("die", "die_before_ack", "hold"))

    async def _settle(self, held: list[Held], status: str) -> None:
        for h in held:
            self.models[h.task.job].publish(h.task.index, h.task.generation, status)
        confirmed = await self.workers.settle(held, status)
        for h, gone in zip(held, confirmed, strict=True):
            if gone:
                self.models[h.task.job].acked.add((h.task.index, h.task.generation))

    # --- completion --------------------------------------------------------------------------------
    @rule(n=few, crash=crashes)
    def land(self, n: int, crash: int | str | None) -> None:
        """Completion lands up to `n` results."""
        self._complete("land", self.completion.land(n), crash)

    @rule(n=few, crash=crashes)
    def take_job_events(self, n: int, crash: int | str | None) -> None:
        """Completion applies up to `n` events of jobs."""
        self._complete("events", self.completion.take_events(n), crash)

    @rule(sweep=st.booleans(), crash=crashes)
    def go_on(self, sweep: bool, crash: int | str | None) -> None:
        """Completion goes on with what runs beside its loops: cancellations, and the search for what is left out."""
        if sweep:
            self._complete("sweep", self.completion.sweep(), crash)
        else:
            if self._complete("go_on", self.completion.go_on(), crash):
                for model in self.models.values():
                    model.retry_stored = True

    @rule(job=jobs, crash=crashes, sure=rarely)
    def cancel(self, job: str, crash: int | str | None, sure: bool) -> None:
        """Somebody asks for a cancellation; completion may die before it answers."""
        if sure:
            SEEN["cancel"] += 1
            self.run(self._cancel(job, self._point("cancel", crash)))

    @rule(job=jobs, crash=crashes)
    def retry(self, job: str, crash: int | str | None) -> None:
        """Somebody asks that what failed of an ended job runs again."""
        self.run(self._retry(job, self._point("retry", crash)))

    async def _retry(self, job: str, point: str | None) -> None:
        model = self.models[job]
        state = (await self.completion.states()).get(job)
        again = model.may_be_retried()
        begun: Begun | None = None

        async def ask() -> None:
            nonlocal begun
            begun = await self.completion.retrier.request(RetryRequest(job=job))

        try:
            survived = await self._unless_it_crashes(ask(), point)
        except (NotFound, Refused):
            assert state not in ("completed", "completed_with_errors"), "an ended job was not retried"
            return
        assert state in ("completed", "completed_with_errors"), f"a job that is {state} was retried"
        if begun is not None:
            assert begun.resubmitted == len(again), begun
            assert begun.generation == model.generation + bool(again)
        if again and (survived or point == "retry-noted"):
            SEEN["retry"] += 1
            model.retry()

    def _complete(self, step: str, work: Awaitable[Any], crash: int | str | None) -> bool:
        SEEN[step] += 1
        return self.run(self._unless_it_crashes(work, self._point(step, crash)))

    @staticmethod
    def _point(step: str, crash: int | str | None) -> str | None:
        points = POINTS[step]
        return points[crash % len(points)] if isinstance(crash, int) else crash

    async def _unless_it_crashes(self, step: Awaitable[Any], crash: str | None) -> bool:
        with crashing_at(crash):
            survived = await survives(step)
        if not survived or crash == "now":
            SEEN[f"crash at {crash}"] += 1
            await self.completion.crash()
        return survived

    async def _cancel(self, job: str, point: str | None) -> None:
        model = self.models[job]
        accepted = False

        async def ask() -> None:
            nonlocal accepted
            accepted = await self.completion.canceller.request(job, "enough")

        try:
            survived = await self._unless_it_crashes(ask(), point)
        except NotFound:
            assert not model.opened
            return
        assert model.opened
        if accepted or (not survived and point != "cancel-noted"):
            model.intake_closed = True
        if accepted or not survived:
            model.ask_to_cancel()
        else:  # it had ended before: every row must have been committed by then
            model.see_rows(await self._rows(job))
            assert model.finished, "a job that had not ended refused to be cancelled"

    @rule(job=jobs, status=statuses, n=few, sure=st.booleans(), then=afterwards)
    def a_quiet_while(self, job: str, status: str, n: int, sure: bool, then: str) -> None:
        """For once nothing goes wrong, and what is there is worked off in small pieces: the job ends.

        What ended is asked for again: by a retry, by a submitter who slept through it all.
        """
        if sure and self.models[job].opened:
            SEEN["quiet"] += 1
            self.run(self._quiet(job, status, n))
            if "retry" in then:
                self.run(self._retry(job, None))
            if "stranger" in then:
                self.run(self._store(job, n, producer=Producer(self.meshes[0], job)))

    async def _quiet(self, job: str, status: str, n: int) -> None:
        await self._seal(job)
        for _ in range(ROUNDS):
            if await self._is_home(job):
                return
            await self._work_off(status, n)

    async def _work_off(self, status: str, n: int) -> None:
        """One round of everybody's work, `n` of each thing at most."""
        held, self.workers.held = self.workers.held[:n], self.workers.held[n:]
        await self._settle(held, status)
        got = await self.workers.pull(n)
        self.workers.held = [h for h in self.workers.held if h not in got]
        self.last_pull = time.monotonic()
        await self._settle(got, status)
        await self.completion.land(max(1, n - 1))
        await self._check()
        await self.completion.take_events(n)
        await self.completion.go_on()
        for model in self.models.values():
            model.retry_stored = True
        await self.completion.sweep()
        await self._check()

    # --- the broker --------------------------------------------------------------------------------
    @rule(
        during=st.sampled_from(("nothing", "store", "settle", "land", "events", "cancelling")),
        job=jobs,
        n=few,
        turns=st.integers(0, 30),
    )
    def broker_is_killed(self, during: str, job: str, n: int, turns: int) -> None:
        """The broker is killed and comes back, `turns` turns of the event loop after something began."""
        if self.broker_kills == BROKER_KILLS:
            return
        self.broker_kills += 1
        SEEN[f"broker killed during {during}"] += 1
        self.run(self._broker(during, job, n, turns))

    async def _broker(self, during: str, job: str, n: int, turns: int) -> None:
        await self._open(job)
        match during:
            case "store":
                step = self._store(job, n, unsure=True)
            case "settle":
                held, self.workers.held = self.workers.held[:n], self.workers.held[n:]
                step = self._settle(held, "ok")
            case "land":
                step = self.completion.land(n)
            case "events":
                step = self.completion.take_events(n)
            case "cancelling":
                step = self.completion.go_on()
            case _:
                step = asyncio.sleep(0)
        self.completion.taken.clear()
        under_way = asyncio.ensure_future(step)
        if during in ("land", "events"):
            taken = asyncio.ensure_future(self.completion.taken.wait())
            await asyncio.wait((taken, under_way), return_when=asyncio.FIRST_COMPLETED)
            taken.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        self.server.kill()
        await asyncio.sleep(0.01)
        self.server.restart()
        await until_connected(*self.meshes)
        await under_way

    # --- what holds after each step ----------------------------------------------------------------
    @invariant()
    def the_account_balances_and_agrees_with_the_model(self) -> None:
        if not self.idle:
            self.run(self._check())
            self.idle = True

    async def _check(self) -> None:
        states = await self.completion.states()
        for job, model in self.models.items():
            model.see_rows(await self._rows(job))
            if model.opened:
                await self._check_account(job, model)
            ended = states.get(job) in ENDED
            assert not ended or model.finished, (
                f"job {job} is {states.get(job)} before its rows are committed"
            )
            announced, count = await self._announced(job)
            assert count == (announced.generation if announced else 0), "once for each generation"
            if announced and announced.generation == model.generation:
                assert ended
                assert model.finished, "announced before its rows are committed"

    async def _check_account(self, job: str, model: JobModel) -> None:
        audit = await self.completion.accounting.audit(job)
        parts = (audit.ok, audit.failed, audit.dead, audit.cancelled, audit.queued, audit.landing)
        assert audit.balanced, audit
        assert audit.missing == [], audit
        assert audit.submitted == sum(parts) == model.stored, audit
        assert parts[:4] == tuple(model.count(s) for s in ("ok", "failed", "dead", "cancelled")), audit
        sources = audit.sources
        assert model.tasks_at_least() <= sources.tasks_in_broker <= model.tasks_at_most(), (audit, model)
        assert sources.results_in_broker >= len(model.landing), (audit, model)
        assert sources.rows_landed == len(model.landed), audit
        assert audit.doubled == []

    async def _rows(self, job: str) -> list[tuple[int, int, str]]:
        return [row[1:] for row in await self.completion.outcomes() if row[0] == job]

    async def _announced(self, job: str) -> tuple[JobCompleted | None, int]:
        """The job's last `completed` event, and how many there are."""
        mesh = self.meshes[0]
        subject = mesh.subjects.job_event(job, "completed")
        found = await jsapi.last_message(mesh, mesh.topology.jobs, subject)
        if found is None:
            return None, 0
        event = codec.JOB_EVENT.decode(found.data)
        assert isinstance(event, JobCompleted)
        return event, await jsapi.count_subject(mesh, mesh.topology.jobs, subject)

    # --- the end -----------------------------------------------------------------------------------
    def teardown(self) -> None:
        try:
            if not self.failed:
                self.run(self._drive_home())
        finally:
            self.run(self._free())
            self.runner.close()
            self.server.kill()
            shutil.rmtree(self.folder)

    async def _free(self) -> None:
        await self.completion.stop()
        for mesh in self.meshes:
            await mesh.close()

    async def _drive_home(self) -> None:
        """Nothing goes wrong any more: every job must end, whole."""
        open_jobs = [job for job in JOBS if self.models[job].opened]
        for job in open_jobs:
            while not await self._seal(job):
                pass
        deadline = time.monotonic() + HOME_S
        while not all([await self._is_home(job) for job in open_jobs]):
            assert time.monotonic() < deadline, (self.models, await self.completion.states())
            await self._work_off("ok", 4)
        await self._check()
        for job in open_jobs:
            await self._check_end(job, self.models[job])

    async def _is_home(self, job: str) -> bool:
        mesh = self.meshes[0]
        left = [
            await jsapi.count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job(job)),
            await jsapi.count_subject(mesh, mesh.topology.results, mesh.subjects.results_of_job(job)),
        ]
        event, _ = await self._announced(job)
        return left == [0, 0] and event is not None and event.generation == self.models[job].generation

    async def _check_end(self, job: str, model: JobModel) -> None:
        assert all(model.key(i) in model.landed for i in range(model.stored)), "each index has its outcome"
        event, count = await self._announced(job)
        assert event is not None
        assert count == event.generation == model.generation
        counts = tuple(model.count(s) for s in ("ok", "failed", "dead", "cancelled"))
        assert (event.ok, event.failed, event.dead, event.cancelled) == counts, event
        assert event.count == model.stored
        clean = "completed" if counts[1:] == (0, 0, 0) else "completed_with_errors"
        assert event.state == ("cancelled" if model.cancel_asked else clean), event
        assert (await self.completion.states())[job] == event.state


PROFILE = settings(
    max_examples=EXAMPLES or 25,
    stateful_step_count=25,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    print_blob=True,
    report_multiple_bugs=False,
    # Without shrinking: an example is short, and a hundred more runs of it would not fit the time of a test.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(0 if EXAMPLES else 400)
def test_the_task_path_loses_nothing_and_counts_nothing_twice() -> None:
    run_state_machine_as_test(TaskPath, settings=PROFILE)
    if not EXAMPLES:
        happened = {
            "crashes": sum(n for what, n in SEEN.items() if what.startswith("crash at")),
            "broker kills": sum(n for what, n in SEEN.items() if what.startswith("broker killed")),
            **{what: SEEN[what] for what in ("retry", "cancel", "redelivered", "late", "die_before_ack")},
        }
        assert all(happened.values()), f"the machine got nowhere: {happened}"
        assert happened["crashes"] >= 10, happened
        assert happened["broker kills"] >= 10, happened
