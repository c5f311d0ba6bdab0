"""What completion's tests stand on: a producer and a worker by hand, and completion as a real process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.completion.service import CompletionService
from headrace.contracts import codec
from headrace.contracts.api import JobAudit, JobStatus
from headrace.contracts.errors import HeadraceError, NotFound, Unavailable
from headrace.contracts.messages import (
    Choice,
    FunctionSpec,
    ItemError,
    JobCompleted,
    JobOpened,
    JobSealed,
    Manifest,
    Result,
    Task,
    TextPrompt,
    Usage,
)
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.provision import register_function
from headrace.mesh.publisher import AtomicBatch, OutMessage, publish, publish_all
from headrace.mesh.settings import CompletionSettings, Settings

FUNCTION = "echo"
INPUT = "0123456789abcdef"
SHAPE = 6


def result(job: str, index: int, status: str = "ok", **fields: Any) -> Result:
    """An outcome as a worker would store it."""
    fields.setdefault(
        "choices", [Choice(text=f"answer {index}", finish_reason="length")] if status == "ok" else []
    )
    fields.setdefault("usage", Usage(prompt_tokens=3, completion_tokens=2))
    if status != "ok":
        fields.setdefault("error", ItemError(type="too_long", message="too long"))
    return Result(
        job=job, index=index, function=FUNCTION, status=status, worker="w1", engine="echo", **fields
    )


async def until(condition: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    """Wait for a true `condition` (a value, or an awaitable of one) and return it; fail after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.02)


class Producer:
    """A client's and a worker's part of the protocol, step by step."""

    def __init__(self, mesh: Mesh, job: str, *, shapes: Sequence[int] = ()) -> None:
        """With `shapes` the items have these in turn, and manifests and results say so."""
        self.mesh = mesh
        self.job = job
        self.shapes = shapes
        self.stored = 0
        self.manifest_seq = 0

    async def open(self, **fields: Any) -> None:
        await self.event(
            JobOpened(job=self.job, function=FUNCTION, input_fingerprint=INPUT, **fields), "opened"
        )

    async def event(self, event: Any, name: str) -> None:
        await publish(
            self.mesh,
            self.mesh.topology.jobs,
            self.mesh.subjects.job_event(self.job, name),
            codec.JOB_EVENT.encode(event),
            expected_last_subject_seq=0,
        )

    async def submit(self, n: int, *, closed: str = "") -> None:
        """Store `n` more tasks with the progress record, as one atomic batch for each 900."""
        left = n
        while left > 0 or closed:
            part = min(900, left)
            tasks = [
                Task(job=self.job, index=self.stored + i, function=FUNCTION, prompt=TextPrompt(text="hi"))
                for i in range(part)
            ]
            subjects = [
                self.mesh.subjects.task(FUNCTION, "normal", self.shape_of(t.index) or SHAPE, self.job)
                for t in tasks
            ]
            left -= part
            manifest = Manifest(
                job=self.job,
                input_fingerprint=INPUT,
                stored=self.stored + part,
                closed=closed if left == 0 else "",  # type: ignore[arg-type]
                shapes=self.counts(self.stored + part),
            )
            batch = AtomicBatch(self.mesh, self.mesh.topology.tasks)
            await batch.stage(
                [OutMessage(s, codec.TASK.encode(t)) for s, t in zip(subjects, tasks, strict=True)]
            )
            ack = await batch.commit(
                OutMessage(self.mesh.subjects.manifest(self.job), codec.MANIFEST.encode(manifest)),
                expected_last_subject_seq=self.manifest_seq,
            )
            self.manifest_seq = ack.seq
            self.stored += part
            if left == 0:
                return

    async def seal(self, count: int | None = None) -> None:
        count = self.stored if count is None else count
        sealed = JobSealed(job=self.job, count=count, input_fingerprint=INPUT, shapes=self.counts(count))
        await self.event(sealed, "sealed")

    def shape_of(self, index: int) -> int | None:
        return self.shapes[index % len(self.shapes)] if self.shapes else None

    def counts(self, n: int) -> dict[str, int]:
        """The first `n` items by shape."""
        return dict(Counter(f"t{self.shape_of(i)}" for i in range(n if self.shapes else 0)))

    async def whole(self, n: int, **fields: Any) -> None:
        """Open, store `n` tasks, seal."""
        await self.open(**fields)
        await self.submit(n, closed="sealed")
        await self.seal()

    async def work(
        self, indices: Iterable[int], status: str = "ok", *, remove: bool = True, **fields: Any
    ) -> None:
        """A worker's part for these items: the result is stored, then the task is gone."""
        indices = list(indices)
        await self.results(
            result(self.job, i, status, **({"shape": self.shape_of(i)} | fields)) for i in indices
        )
        if remove:
            await self.take_away(indices)

    async def results(self, results: Iterable[Result]) -> None:
        messages = [
            OutMessage(self.mesh.subjects.result("job", r.function, r.job), codec.RESULT.encode(r))
            for r in results
        ]
        for i in range(0, len(messages), 1_000):
            await publish_all(self.mesh, self.mesh.topology.results, messages[i : i + 1_000])

    async def take_away(self, indices: Iterable[int]) -> None:
        """Remove tasks from the stream, as acks would (or as a loss would)."""
        wanted = set(indices)
        sequence = 1
        while wanted:
            found = await jsapi.next_message(
                self.mesh, self.mesh.topology.tasks, self.mesh.subjects.tasks_of_job(self.job), sequence
            )
            assert found is not None, f"no task for {sorted(wanted)[:5]}"
            sequence = found.sequence + 1
            if (index := codec.TASK.decode(found.data).index) in wanted:
                await jsapi.delete_message(self.mesh, self.mesh.topology.tasks, found.sequence)
                wanted.discard(index)

    # --- what is seen ------------------------------------------------------------------------------
    async def status(self) -> JobStatus:
        return msgspec.json.decode(await call_api(self.mesh, "status", {"job": self.job}), type=JobStatus)

    async def audit(self) -> JobAudit:
        body = await call_api(self.mesh, "audit", {"job": self.job}, timeout_s=20)
        return msgspec.json.decode(body, type=JobAudit)

    async def ended(self, timeout_s: float = 20.0) -> JobStatus:
        """The status once the job has ended and that is announced."""

        async def look() -> JobStatus | None:
            with contextlib.suppress(NotFound, Unavailable):
                status = await self.status()
                if status.state in ("completed", "completed_with_errors", "cancelled"):
                    return status
            return None

        status = await until(look, timeout_s)
        await until(self.completed, timeout_s)
        return status

    async def completed(self) -> JobCompleted | None:
        subject = self.mesh.subjects.job_event(self.job, "completed")
        found = await jsapi.last_message(self.mesh, self.mesh.topology.jobs, subject)
        return None if found is None else codec.JOB_EVENT.decode(found.data)

    async def count_completed_events(self) -> int:
        subject = self.mesh.subjects.job_event(self.job, "completed")
        return await jsapi.count_subject(self.mesh, self.mesh.topology.jobs, subject)

    async def results_empty(self) -> bool:
        return await jsapi.count_subject(self.mesh, self.mesh.topology.results, "hr.results.>") == 0


async def sql(mesh: Mesh, statement: str, **fields: Any) -> list[list[Any]]:
    """Rows of a query by the front door."""
    body = await call_api(mesh, "query", {"sql": statement, **fields}, timeout_s=20)
    return msgspec.json.decode(body)["rows"]


async def cancel(mesh: Mesh, job: str = "j", reason: str = "enough") -> dict[str, Any]:
    """What the service answers to a cancellation."""
    return msgspec.json.decode(await call_api(mesh, "cancel", {"job": job, "reason": reason}, timeout_s=20))


async def assert_cancelled(job: Producer, *, count: int, ok: int | None = None) -> None:
    """One outcome for each index, nothing in the broker, one `completed` event, a balanced account."""
    status = await job.ended()
    assert (status.state, status.submitted) == ("cancelled", count)
    assert status.ok + status.failed + status.dead + status.cancelled == count
    if ok is not None:
        assert (status.ok, status.cancelled) == (ok, count - ok)
    found = await sql(
        job.mesh, 'SELECT count(*), count(DISTINCT "index"), min("index"), max("index") FROM outcomes'
    )
    assert found == [[count, count, 0, count - 1] if count else [0, 0, None, None]]
    assert (
        await jsapi.count_subject(job.mesh, job.mesh.topology.tasks, job.mesh.subjects.tasks_of_job(job.job))
        == 0
    )
    assert await job.count_completed_events() == 1
    audit = await job.audit()
    assert audit.balanced, audit
    assert audit.missing == []


async def error_of(request: Awaitable[Any]) -> HeadraceError:
    """The error that `request` raises."""
    try:
        answer = await request
    except HeadraceError as e:
        return e
    raise AssertionError(f"no error but {answer!r}")


def with_options(settings: Settings, **options: Any) -> Settings:
    """`settings` with other options of completion."""
    old = {f: getattr(settings.completion, f) for f in CompletionSettings.__struct_fields__}
    return msgspec.structs.replace(settings, completion=CompletionSettings(**(old | options)))


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[CompletionService]:
    """Completion in this process."""
    service = CompletionService(settings)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        assert service.failure is None, service.failure


class Process:
    """Completion in its own process, as the command runs it, or by another script of this folder."""

    script = "run_completion.py"

    def __init__(self, settings: Settings, folder: Path, *, crash_at: str = "") -> None:
        self.settings = settings
        self.ready = folder / "completion.ready"
        self.log = folder / "completion.log"
        self.crash_at = crash_at
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, *, wait: bool = True) -> None:
        self.ready.unlink(missing_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "OTEL_"))}
        env["HEADRACE_READY_FILE"] = str(self.ready)
        if self.crash_at:
            env["HEADRACE_CRASH_AT"] = self.crash_at
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(self.script))],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=env,
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.settings))
        self.process.stdin.close()
        if wait:
            await until(lambda: self.ready.exists() or self.process.poll() is not None)
            assert self.process.poll() is None or self.crash_at, self.log.read_text()

    async def wait(self, timeout_s: float = 20.0) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.wait()

    def peak_rss_mb(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1_024


@contextlib.asynccontextmanager
async def process(settings: Settings, folder: Path, *, crash_at: str = "") -> AsyncIterator[Process]:
    """Completion in its own process, killed at the end."""
    running = Process(settings, folder, crash_at=crash_at)
    await running.start()
    try:
        yield running
    finally:
        running.kill()


async def register(mesh: Mesh) -> None:
    """Register the function, so that its consumers exist."""
    await register_function(mesh, FunctionSpec(name=FUNCTION, engine="echo"))


def now() -> float:
    """Seconds of a clock that only goes forward."""
    return time.monotonic()
