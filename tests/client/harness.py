"""What the client's tests share: inputs, the queue as it is, and submits in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace.client.acceptance import Acceptance
from headrace.client.checking import Checked, Checker
from headrace.client.formats import LineDecoder
from headrace.client.inputs import Input, open_input
from headrace.client.tasks import LIMIT, TaskMaker
from headrace.contracts import codec
from headrace.contracts.messages import FunctionSpec, JobSealed, Manifest, Task
from headrace.contracts.names import Lane
from headrace.contracts.subjects import Subjects
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import count_subject, get_message, last_message, stream_info
from headrace.mesh.settings import Settings

SPEC = FunctionSpec(name="generate", engine="echo", vocab_size=1_000, max_model_len=4_096)
ROOT = Path(__file__).parents[2]


def plain(n: int, *, first: int = 0, size: int = 20, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"prompt {i} ".ljust(size, "x"), "custom_id": f"id-{i}", **fields}
        for i in range(first, first + n)
    ]


def write(path: Path, lines: Iterable[dict[str, Any] | str]) -> Path:
    with path.open("w") as out:
        for line in lines:
            out.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    return path


def batch_line(**body: Any) -> dict[str, Any]:
    """A line of an OpenAI Batch file for chat completions."""
    body.setdefault("messages", [{"role": "user", "content": "hi"}])
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def text_line(**body: Any) -> dict[str, Any]:
    """A line of an OpenAI Batch file for completions."""
    body.setdefault("prompt", "hi")
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}


def acceptance(
    *,
    max_payload: int = 1 << 20,
    limit: int = LIMIT,
    spec: FunctionSpec = SPEC,
    tokeniser: Any = None,
    **decoder: Any,
) -> Acceptance:
    maker = TaskMaker(
        Subjects(), spec, job="j", lane=Lane.NORMAL, tenant="default", max_payload=max_payload, limit=limit
    )
    return Acceptance(LineDecoder(spec, **decoder), maker, tokeniser)


def check(
    source: Path | list[Any] | Input, *, mapping: dict[str, Any] | None = None, **options: Any
) -> Checked:
    """The first pass over `source`."""
    opened = source if isinstance(source, Input) else open_input(source)
    with opened as lines:
        return Checker(lines, acceptance(**options), lambda _bytes, _items: None).run(mapping or {})


async def stored_tasks(mesh: Mesh, job: str | None = None) -> list[Task]:
    """Every task in the queue, in the order in which they are stored."""
    stream = mesh.topology.tasks
    state = (await stream_info(mesh, stream))["state"]
    first, last = int(state["first_seq"]), int(state["last_seq"])
    found: list[Task] = []
    for begin in range(first, last + 1, 128):
        numbers = range(begin, min(begin + 128, last + 1))
        messages = await asyncio.gather(*(get_message(mesh, stream, n) for n in numbers))
        found += [
            codec.TASK.decode(m.data, m.headers)
            for m in messages
            if m is not None and ".manifest." not in m.subject
        ]
    return [t for t in found if job is None or t.job == job]


async def count_tasks(mesh: Mesh, job: str) -> int:
    return await count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job(job))


async def manifest(mesh: Mesh, job: str) -> Manifest:
    found = await last_message(mesh, mesh.topology.tasks, mesh.subjects.manifest(job))
    assert found is not None
    return codec.MANIFEST.decode(found.data, found.headers)


async def assert_whole(mesh: Mesh, job: str, count: int) -> None:
    """Each of `count` items stands in the queue once, in order, and the job is sealed with that count."""
    tasks = await stored_tasks(mesh, job)
    assert [t.index for t in tasks] == list(range(count))
    assert [t.custom_id for t in tasks] == [f"id-{i}" for i in range(count)]
    found = await manifest(mesh, job)
    assert (found.stored, found.closed) == (count, "sealed")
    # By shape too, however often the submit was killed: the record says what stands in the queue.
    shapes: Counter[str] = Counter()
    for subject, n in (await queued_by_subject(mesh, job)).items():
        shapes[subject.split(".")[4]] += n
    assert found.shapes == dict(shapes)
    sealed = await last_message(mesh, mesh.topology.jobs, mesh.subjects.job_event(job, "sealed"))
    assert sealed is not None
    event = codec.JOB_EVENT.decode(sealed.data)
    assert isinstance(event, JobSealed)
    assert (event.count, event.shapes) == (count, dict(shapes))


async def queued_by_subject(mesh: Mesh, job: str) -> dict[str, int]:
    info = await stream_info(mesh, mesh.topology.tasks, subjects_filter=mesh.subjects.tasks_of_job(job))
    return info["state"]["subjects"]


class SubmitProcess:
    """`tests.client.run_submit` in a process of its own."""

    def __init__(
        self, settings: Settings, source: Path, job: str, *, crash_at: str = "", patience_s: float = 20.0
    ) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        if crash_at:
            env["HEADRACE_CRASH_AT"] = crash_at
        command = [
            sys.executable,
            "-m",
            "tests.client.run_submit",
            settings.url,
            str(source),
            job,
            str(patience_s),
        ]
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
        )

    def wait(self, timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
        """The exit code, and what it printed as JSON."""
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, json.loads(out) if out.strip() else {}

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    async def finished(self, timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
        return await asyncio.to_thread(self.wait, timeout_s)


async def until(what: Any, *, within_s: float = 20.0) -> Any:
    """Wait until `await what()` is true, by looking."""
    deadline = time.monotonic() + within_s
    while True:
        value = await what()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.005)
