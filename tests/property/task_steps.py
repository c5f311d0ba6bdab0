"""The task path step by step: the product's own code, driven by hand so that a test decides what comes when.

A producer, workers and completion, each of whose steps can be lost, repeated or cut off by a crash. Nothing here runs
on its own between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Awaitable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.client.jobs import (
    TAKEN,
    Stored,
    finished_count,
    manifest_message,
    open_job,
    read_manifest,
    seal_job,
    undo_if_late,
)
from headrace.completion.accounting import Accounting
from headrace.completion.announce import Announcer
from headrace.completion.blobs import Blobs
from headrace.completion.cancel import Canceller
from headrace.completion.jobs import Jobs
from headrace.completion.landing import Landing
from headrace.completion.query import Queries
from headrace.completion.retry import Retrier
from headrace.completion.sources import SourceReader
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.messages import (
    FunctionSpec,
    ItemError,
    JobOpened,
    JobSealed,
    Manifest,
    Result,
    Task,
    TextPrompt,
)
from headrace.contracts.names import Lane
from headrace.contracts.specs import ConsumerSpec
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer
from headrace.mesh.jsapi import JetStreamError, consumer_info
from headrace.mesh.publisher import AtomicBatch, publish_all
from headrace.mesh.settle import Done, Settler
from headrace.mesh.wire import OutMessage

FUNCTION = "echo"
SHAPE = 6
SPEC = FunctionSpec(name=FUNCTION, engine="echo", lanes=[Lane.NORMAL], min_shape=SHAPE, max_shape=SHAPE)
INPUT = "0123456789abcdef"
ACK_WAIT_S = 0.4
PULL_S = 0.06
"""A pull of nothing ends after this long."""


class Crash(BaseException):
    """The process died here: nothing above may catch it and go on."""


async def take(mesh: Mesh, spec: ConsumerSpec, n: int) -> list[Delivery]:
    """Up to `n` deliveries of a durable consumer, by one pull; it waits only for what may come."""
    try:
        info = await consumer_info(mesh, spec.stream, spec.durable)
    except Unavailable:
        return []
    n = min(n, int(info["num_pending"]) + int(info["num_ack_pending"]))
    found: list[Delivery] = []
    if n == 0:
        return found
    over = asyncio.Event()

    def on_delivery(delivery: Delivery) -> None:
        found.append(delivery)
        if len(found) >= n:
            over.set()

    consumer = PullConsumer(
        mesh, spec, on_delivery, on_demand_lost=over.set, expires_s=PULL_S, heartbeat_s=PULL_S / 2
    )
    await consumer.start()
    consumer.ask(n)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            await over.wait()
    await consumer.stop()
    return found


async def until_connected(*meshes: Mesh) -> None:
    """Return when the broker is back for each of these."""
    async with asyncio.timeout(15):
        while not all(m.connected for m in meshes):
            await asyncio.sleep(0.005)


# --- the producer -----------------------------------------------------------------------------------


class Producer:
    """Stores one job batch by batch. `at` is what it knows of what is stored, which an ack that was lost makes old."""

    def __init__(self, mesh: Mesh, job: str) -> None:
        self.mesh = mesh
        self.job = job
        self.at = Stored()

    async def open(self) -> None:
        await open_job(self.mesh, JobOpened(job=self.job, function=FUNCTION, input_fingerprint=INPUT), None)

    async def store(self, n: int, *, lose_ack: bool = False) -> int:
        """Store a batch of `n` after what it knows of; return how many items more there are by it.

        0: a batch was there already (its ack was lost), or the intake has ended; `at` is up to date then.
        Raise `Conflict` if the job was cancelled.
        """
        before = self.at
        if await self._commit(n, ""):
            if before.seq == 0 and await undo_if_late(self.mesh, self.job) is not None:
                await self.look()
                return 0
            if lose_ack:
                self.at = before
            return n
        await self.look()
        return 0

    async def seal(self, *, die_before_event: bool = False) -> bool:
        """Close the intake; return whether it is closed. Raise `Conflict` if the job was cancelled."""
        if not self.at.closed and not await self._commit(0, "sealed"):
            await self.look()
            if not self.at.closed:
                return False
        if not die_before_event:
            await seal_job(
                self.mesh,
                JobSealed(
                    job=self.job,
                    count=self.at.items,
                    input_fingerprint=INPUT,
                    shapes={f"t{SHAPE}": self.at.items},
                ),
            )
        return True

    async def look(self) -> None:
        """Read what is stored, as the client does after any doubt."""
        stored = await read_manifest(self.mesh, self.job, INPUT)
        count = await finished_count(self.mesh, self.job)
        self.at = stored if count is None else Stored(count, seq=stored.seq, closed="sealed")

    async def _commit(self, n: int, closed: str) -> bool:
        first = self.at.items
        tasks = [
            Task(job=self.job, index=first + i, function=FUNCTION, prompt=TextPrompt(text="hi"))
            for i in range(n)
        ]
        subject = self.mesh.subjects.task(FUNCTION, Lane.NORMAL, SHAPE, self.job)
        manifest = Manifest(
            job=self.job,
            input_fingerprint=INPUT,
            stored=first + n,
            consumed_lines=first + n,
            closed=closed,  # type: ignore[arg-type]
            shapes={f"t{SHAPE}": first + n},
        )
        batch = AtomicBatch(self.mesh, self.mesh.topology.tasks)
        try:
            if tasks:
                await batch.stage([OutMessage(subject, codec.TASK.encode(t)) for t in tasks])
            ack = await batch.commit(
                manifest_message(self.mesh, manifest), expected_last_subject_seq=self.at.seq
            )
        except JetStreamError as e:
            if e.err_code not in TAKEN:
                raise
            return False
        except Unavailable:  # stored or not: nobody knows until somebody looks
            await until_connected(self.mesh)
            return False
        self.at = Stored(first + n, first + n, ack.seq, closed)
        return True


# --- workers ----------------------------------------------------------------------------------------


@dataclass
class Held:
    """A task that some worker has in hand; its lease may have lapsed long ago."""

    delivery: Delivery
    task: Task


class Workers:
    """Any number of workers, as what they have in hand."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.settler = Settler(mesh)
        self.held: list[Held] = []

    async def pull(self, n: int) -> list[Held]:
        spec = self.mesh.topology.task_consumer(FUNCTION, Lane.NORMAL, SHAPE)
        got = [Held(d, codec.TASK.decode(d.data)) for d in await take(self.mesh, spec, n)]
        self.held += got
        return got

    async def settle(self, held: list[Held], status: str) -> list[bool]:
        """Store their results and ack them, as a worker does; return for each whether its ack is confirmed."""
        futures = [
            self.settler.begin(h.delivery, Done((self.message(h.task, status, h.delivery.delivered),)))
            for h in held
        ]
        done = await asyncio.gather(*futures, return_exceptions=True)
        for outcome in done:
            if outcome is not None and not isinstance(outcome, HeadraceError):
                raise outcome
        return [outcome is None for outcome in done]

    async def publish(self, held: Held, status: str) -> None:
        """Only the first half: the worker dies between the result and the ack."""
        await publish_all(
            self.mesh,
            self.mesh.topology.results,
            [self.message(held.task, status, held.delivery.delivered)],
        )

    def message(self, task: Task, status: str, attempt: int) -> OutMessage:
        result = Result(
            job=task.job,
            index=task.index,
            function=FUNCTION,
            status=status,  # type: ignore[arg-type]
            generation=task.generation,
            attempt=attempt,
            shape=SHAPE,
            error=None if status == "ok" else ItemError(type="poisoned"),
            task=None if status == "ok" else task,
        )
        return OutMessage(self.mesh.subjects.result("job", FUNCTION, task.job), codec.RESULT.encode(result))


# --- completion -------------------------------------------------------------------------------------

_ENDING = ("job-announcing", "job-announced")
POINTS = {
    "land": ("landing-before-commit", "landing-committed", "landing-acked", *_ENDING),
    "events": ("job-events-committed", *_ENDING),
    "sweep": _ENDING,
    "cancel": ("cancel-noted", "cancel-intake-closed", "cancel-announced"),
    "retry": ("retry-before-commit", "retry-noted", *_ENDING),
    "go_on": (
        "cancel-purged", "cancel-filling", "cancel-committed", "landing-committed", "retry-announced",
        "retry-record-stored", "retry-batch-stored", "retry-all-stored", "retry-ended", *_ENDING,
    ),
}  # fmt: skip
"""The steps of completion, and where each can be made to die; a point that it does not pass changes nothing."""


class Completion:
    """Completion's own parts on one DuckDB file, each step asked for."""

    def __init__(self, mesh: Mesh, folder: Path) -> None:
        self.mesh = mesh
        self._folder = folder
        self._generation = 0
        self.taken = asyncio.Event()
        """Set when a step has its messages in hand, and is about to do something with them."""

    @property
    def path(self) -> Path:
        """The data plane's file of this life."""
        return self._folder / f"plane-{self._generation}.duckdb"

    async def start(self) -> None:
        """What the service does at its start, without its loops."""
        self.store = Store(self.path)
        await self.store.open()
        self.settler = Settler(self.mesh)
        self.announcer = Announcer(self.mesh, self.store)
        self.pending: list[Coroutine[Any, Any, None]] = []
        self.canceller = Canceller(self.mesh, self.store, self.announcer, self._spawn)
        self.blobs = Blobs(self.mesh, self.store)
        self.landing = Landing(self.mesh, self.store, self.settler, self.announcer, self.blobs)
        self.jobs = Jobs(
            self.mesh,
            self.store,
            self.settler,
            self.announcer,
            self.canceller.start,
            on_ended=self.blobs.ended,
        )
        self.accounting = Accounting(SourceReader(self.mesh), self.store)
        queries = Queries(self.store, timeout_s=10.0, max_rows=1_000, max_bytes=1 << 20)
        self.retrier = Retrier(self.mesh, self.store, self.announcer, queries, self._spawn)
        await self.canceller.resume()
        await self.retrier.resume()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Keep the work of a cancellation or a retry for `go_on`; the task that is returned stands for it."""
        self.pending.append(work)
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return waiting  # type: ignore[return-value]

    async def crash(self) -> None:
        """Die and start again: on the files as they are at this moment, with nothing else of this life."""
        old, old_path = self.store, self.path
        self._generation += 1
        shutil.copy(old_path, self.path)
        log = Path(f"{old_path}.wal")
        if log.exists():
            shutil.copy(log, f"{self.path}.wal")
        self._drop()
        await old.close()
        await self.start()

    async def stop(self) -> None:
        self._drop()
        await self.store.close()

    def _drop(self) -> None:
        for work in self.pending:
            work.close()
        self.pending = []

    # --- steps ---------------------------------------------------------------------------------------
    async def land(self, n: int) -> int:
        """Pull up to `n` results, commit them, announce what ended, ack; return how many were pulled."""
        batch = await take(self.mesh, self.mesh.topology.results_consumer(), n)
        self.taken.set()
        pairs, endings = [], []
        if batch:
            whole = await self.blobs.fetch(await self.landing._readable(batch))
            pairs, endings = await self.landing._land(*whole)
        await self.landing._settle(pairs, endings, batch)
        return len(batch)

    async def take_events(self, n: int) -> int:
        """Apply up to `n` job events."""
        batch = await take(self.mesh, self.mesh.topology.jobs_consumer(), n)
        self.taken.set()
        if batch:
            with contextlib.suppress(Unavailable):  # not acked: they come again
                await self.jobs.take(batch)
        return len(batch)

    async def sweep(self) -> None:
        """Announce what is left out."""
        await self.announcer.sweep()

    async def go_on(self) -> None:
        """Carry begun cancellations and retries to their end, landing meanwhile what they wait for."""
        works, self.pending = self.pending, []
        ends = [asyncio.ensure_future(work) for work in works]
        try:
            if ends:  # as far as they come by themselves
                await asyncio.wait(ends, timeout=0.1)
            while not all(end.done() for end in ends):
                await self.land(100)
            for end in ends:
                end.result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        self.canceller._running.clear()
        self.retrier._running.clear()

    async def outcomes(self) -> list[tuple[str, int, int, str]]:
        """Every row: job, index, generation, status."""
        return await self.store.read(
            lambda c: c.execute('SELECT job, "index", generation, status FROM outcomes').fetchall()
        )

    async def states(self) -> dict[str, str]:
        """The state of each job as the data plane has it."""
        return dict(await self.store.read(lambda c: c.execute("SELECT job, state FROM jobs").fetchall()))


@contextlib.contextmanager
def crashing_at(point: str | None) -> Iterator[None]:
    """Within the block completion dies, by `Crash`, where it passes the crash point of that name."""
    if point is None:
        yield
        return

    def die(name: str) -> None:
        if name == point:
            raise Crash(name)

    modules = [
        m
        for name, m in list(sys.modules.items())
        if name.startswith("headrace.completion.") and hasattr(m, "crash_point")
    ]
    originals = [m.crash_point for m in modules]
    for module in modules:
        module.crash_point = die  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.crash_point = original  # type: ignore[attr-defined]


async def survives(step: Awaitable[Any]) -> bool:
    """Whether the step ended without a crash; any other error is a failure of the test."""
    try:
        await step
    except Crash:
        return False
    except BaseExceptionGroup as group:
        if group.split(Crash)[1] is not None:
            raise
        return False
    return True


async def lapse(since: float) -> None:
    """Return when a lease that was given, or renewed, at `since` (of `time.monotonic`) is over."""
    await asyncio.sleep(max(0.0, since + ACK_WAIT_S - time.monotonic()))
