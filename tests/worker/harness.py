"""What the worker's tests share: tasks put straight into the queue, results read straight from theirs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.contracts import codec
from headrace.contracts.errors import NotFound
from headrace.contracts.generation import Generation
from headrace.contracts.messages import BlobPrompt, FunctionSpec, Result, Task, TextPrompt, TokenPrompt
from headrace.contracts.names import Lane
from headrace.contracts.subjects import shape_of
from headrace.inference_worker.service import EngineFactory, WorkerService
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer
from headrace.mesh.jsapi import count_subject, get_message, stream_info
from headrace.mesh.provision import get_function
from headrace.mesh.publisher import OutMessage, publish_all
from headrace.mesh.settings import Settings, WorkerSettings

HEADERS = b"Headrace-Schema: task/1\r\n"
FUNCTION = "generate"

one_loop = pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("asyncio", {}), id="asyncio")], indirect=True
)
"""For tests of worker processes, which bring their own loop: which one the test runs on changes nothing."""


def tokens(n: int, *, first: int = 1) -> TokenPrompt:
    return TokenPrompt(ids=[first + i % 50 for i in range(n)])


def task(
    index: int,
    *,
    job: str = "j",
    prompt: TextPrompt | TokenPrompt | BlobPrompt | None = None,
    max_tokens: int | None = 8,
    **more: Any,
) -> Task:
    prompt = prompt or TokenPrompt(ids=[1, 2, 3, 4])
    if isinstance(prompt, BlobPrompt):
        count = 10
    else:
        count = len(prompt.ids) if isinstance(prompt, TokenPrompt) else max(1, len(prompt.text) // 4)
    more.setdefault("params", Generation(max_tokens=max_tokens))
    more.setdefault("prompt_tokens", count)
    more.setdefault("submitted_us", time.time_ns() // 1_000)
    return Task(job=job, index=index, function=FUNCTION, prompt=prompt, **more)


def shape(t: Task, spec: FunctionSpec) -> int:
    return spec.clamp_shape(shape_of(t.prompt_tokens + (t.params.max_tokens or 256)))


async def put(mesh: Mesh, tasks: Iterable[Task], *, lane: Lane = Lane.NORMAL, at: int | None = None) -> None:
    """Store tasks as the client does: each on the subject of its lane and shape, clamped as the function
    says.
    """
    try:
        spec = await get_function(mesh, FUNCTION)
    except NotFound:
        spec = FunctionSpec(name=FUNCTION)
    messages = [
        OutMessage(
            mesh.subjects.task(t.function, lane, shape(t, spec) if at is None else at, t.job),
            codec.TASK.encode(t),
            HEADERS,
        )
        for t in tasks
    ]
    for i in range(0, len(messages), 1_000):
        await publish_all(mesh, mesh.topology.tasks, messages[i : i + 1_000])


async def results(mesh: Mesh) -> list[Result]:
    """All results that are stored, in order; nobody takes them away in these tests."""
    info = await stream_info(mesh, mesh.topology.results)
    last = int(info["state"]["last_seq"])
    found: list[Result] = []
    for first in range(1, last + 1, 64):
        batch = await asyncio.gather(
            *(get_message(mesh, mesh.topology.results, s) for s in range(first, min(first + 64, last + 1)))
        )
        found += [codec.RESULT.decode(m.data, m.headers) for m in batch if m is not None]
    return found


async def stored(mesh: Mesh) -> int:
    return int((await stream_info(mesh, mesh.topology.results))["state"]["messages"])


async def left(mesh: Mesh, job: str = "*") -> int:
    filter_ = f"{mesh.subjects.prefix}.tasks.*.*.*.{job}"
    return await count_subject(mesh, mesh.topology.tasks, filter_)


async def until(what: Callable[[], Awaitable[Any]], *, within_s: float = 20.0, every_s: float = 0.02) -> Any:
    """Wait until `what` is true, by looking; fail loudly if it does not become so."""
    deadline = time.monotonic() + within_s
    while True:
        value = await what()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}")
        await asyncio.sleep(every_s)


async def until_stored(mesh: Mesh, n: int, *, within_s: float = 30.0) -> None:
    async def enough() -> bool:
        return await stored(mesh) >= n

    await until(enough, within_s=within_s)


async def until_empty(mesh: Mesh, *, within_s: float = 30.0) -> None:
    async def empty() -> bool:
        return await left(mesh) == 0

    await until(empty, within_s=within_s)


async def lease(mesh: Mesh, n: int, *, lane: Lane = Lane.NORMAL, shape: int = 6) -> list[Delivery]:
    """Take `n` tasks as a worker does, and leave them leased."""
    taken: list[Delivery] = []
    consumer = PullConsumer(mesh, mesh.topology.task_consumer(FUNCTION, lane, shape), taken.append)
    await consumer.start()
    consumer.ask(n)

    async def enough() -> bool:
        return len(taken) >= n

    await until(enough)
    await consumer.stop()
    return taken


def with_worker(settings: Settings, **worker: Any) -> Settings:
    """`settings` with those of the worker; `engine_options` as keyword."""
    fields = {f: getattr(settings, f) for f in Settings.__struct_fields__}
    top = {k: worker.pop(k) for k in list(worker) if k in fields}
    return Settings(**{**fields, **top, "worker": WorkerSettings(**worker)})


@asynccontextmanager
async def running(settings: Settings, factory: EngineFactory | None = None) -> AsyncIterator[WorkerService]:
    """A worker in this process."""
    service = WorkerService(settings, factory)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
    assert service.failure is None


class WorkerProcess:
    """A worker in its own process, which signals can reach."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._number = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "worker.log"

    def start(self, **environ: str) -> None:
        self._number += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        ready = self._folder / f"ready-{self._number}"
        (self._folder / "headrace.toml").write_text(_toml(self._settings), "utf-8")
        code = (
            "import sys; from headrace.mesh.service import run_service;"
            "from headrace.mesh.settings import load_settings;"
            "from headrace.inference_worker.service import WorkerService;"
            f"sys.exit(run_service(WorkerService, load_settings({str(self._folder)!r})))"
        )
        env = {**os.environ, "HEADRACE_READY_FILE": str(ready), **environ}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 30.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _toml(settings: Settings) -> str:
    worker = settings.worker
    lines = [
        f"{f} = {_value(getattr(settings, f))}"
        for f in ("url", "durability", "ack_wait_s", "max_tries", "grace_s")
    ]
    lines += ["[worker]"]
    for f in WorkerSettings.__struct_fields__:
        value = getattr(worker, f)
        if value is not None and f != "engine_options":
            lines.append(f"{f} = {_value(value)}")
    lines += ["[worker.engine_options]", *(f'"{k}" = "{v}"' for k, v in worker.engine_options.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
