"""One trace from submit to landed, over a redelivery: real services in their own processes, a real receiver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headrace.contracts.messages import FunctionSpec
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import get_message
from headrace.mesh.microservice import call_api
from headrace.mesh.provision import register_function

pytestmark = pytest.mark.anyio

SERVICE = """
import sys
from importlib import import_module
from headrace.mesh.service import run_service
from headrace.mesh.settings import load_settings
module, name = sys.argv[1].split(":")
sys.exit(run_service(getattr(import_module(module), name), load_settings()))
"""
WORKER, COMPLETION, GATEWAY = (
    "headrace.inference_worker.service:WorkerService",
    "headrace.completion.service:CompletionService",
    "headrace.gateway.service:GatewayService",
)
SECRET = "nobody reads this prompt"
UNTRACED = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OTEL_", "HEADRACE_", "TRACEPARENT"))
}


class Processes:
    """The services of one test, each with the environment that points at its broker and its receiver."""

    def __init__(self, url: str, folder: Path, environ: dict[str, str]) -> None:
        self._running: dict[str, subprocess.Popen] = {}
        self._folder = folder
        self.environ = {
            **UNTRACED,
            "HEADRACE_NATS_URL": url,
            "HEADRACE_DURABILITY": "relaxed",
            "HEADRACE_ACK_WAIT_S": "1",
            **environ,
        }

    def start(self, name: str, service: str, *, toml: str = "", **environ: str) -> subprocess.Popen:
        """Start a service and wait until it is ready."""
        folder = self._folder / name
        folder.mkdir()
        (folder / "headrace.toml").write_text(toml)
        ready = folder / "ready"
        log = (folder / "log").open("w")
        process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, service],
            env={**self.environ, "HEADRACE_DIR": str(folder), "HEADRACE_READY_FILE": str(ready), **environ},
            stderr=log,
        )
        log.close()
        self._running[name] = process
        end = time.monotonic() + 30
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{name} did not start: {(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.02)
        return process

    def submit(self, *lines: dict, code: int = 0, **environ: str) -> dict:
        """`headrace submit`, as a user runs it."""
        file = self._folder / "input.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = subprocess.run(
            [sys.executable, "-m", "headrace.cli.main", "submit", str(file), "--job", "j", "--json"],
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if code == 0 else {}

    def stop(self) -> None:
        """Drain all, so that they send what spans they have."""
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def processes(nats_server, tmp_path, receiver):
    running = Processes(nats_server.url, tmp_path, receiver.environ())
    yield running
    running.stop()


@pytest.fixture
def settings(settings):
    return msgspec.structs.replace(settings, ack_wait_s=1.0)


@pytest.fixture
def anyio_backend():
    """The services run on uvloop whatever this is."""
    return "asyncio"


async def landed(settings, count: int, job: str = "j") -> list[dict]:
    """The outcomes of the job once there are `count`."""
    end = time.monotonic() + 30
    async with await Mesh.connect(settings, name="asker") as mesh:
        while time.monotonic() < end:
            status = msgspec.json.decode(await call_api(mesh, "status", {"job": job}))
            if status["ok"] + status["failed"] + status["dead"] >= count:
                page = msgspec.json.decode(await call_api(mesh, "results", {"job": job}))
                return page["results"]
            time.sleep(0.1)
    pytest.fail(f"{count} outcomes did not land: {status}")


def attempts(spans: list[dict]) -> list[int]:
    return sorted(span["attributes"]["headrace.delivery.attempt"] for span in spans)


def linked(span: dict) -> str:
    (link,) = span["links"]
    assert link["trace_id"] == span["trace_id"]
    return link["span_id"]


async def test_one_trace_from_submit_to_landed_over_a_killed_worker(mesh, settings, processes, receiver):
    """The first worker dies after it stored the result and before the ack: the task is delivered again."""
    processes.start("completion", COMPLETION)
    first = processes.start("worker-1", WORKER, HEADRACE_CRASH_AT="result-published")
    processes.submit({"prompt": SECRET, "max_tokens": 5, "temperature": 0.5}, {"prompt": SECRET, "seed": 1})
    assert first.wait(20) == -signal.SIGKILL
    processes.start("worker-2", WORKER)
    outcomes = await landed(settings, 2)
    receiver.wait("process HR_TASKS", 2)
    processes.stop()

    spans = receiver.spans()
    (trace_id,) = {span["trace_id"] for span in spans}
    assert {outcome["trace_id"] for outcome in outcomes} == {trace_id}
    (submit,) = receiver.spans("submit")
    sends = {span["span_id"]: span for span in receiver.spans("send HR_TASKS")}
    assert {span["parent_id"] for span in sends.values()} == {submit["span_id"]}
    assert sorted(span["attributes"]["headrace.index"] for span in sends.values()) == [0, 1]
    processed = receiver.spans("process HR_TASKS")
    assert attempts(processed) == [2, 2]
    for span in processed:
        assert linked(span) == span["parent_id"]
        assert (
            sends[linked(span)]["attributes"]["messaging.message.id"]
            == span["attributes"]["messaging.message.id"]
        )
        assert span["attributes"]["messaging.consumer.group.name"].startswith("generate-normal-t")
    chats = receiver.spans("text_completion echo")
    assert {span["parent_id"] for span in chats} >= {span["span_id"] for span in processed}
    assert chats[0]["attributes"]["gen_ai.response.finish_reasons"]
    lands = receiver.spans("land HR_RESULTS")
    assert {span["attributes"]["headrace.index"] for span in lands} == {0, 1}
    assert {linked(span) for span in lands} >= {span["span_id"] for span in processed}
    services = {span["resource"]["service.name"] for span in spans}
    assert services == {"headrace-submit", "headrace-worker", "headrace-completion"}
    assert SECRET not in json.dumps(spans)


async def test_each_delivery_has_its_own_span_linked_to_the_same_send(mesh, settings, processes, receiver):
    """The first worker is stopped for longer than its lease, a second one takes the task, the first wakes up."""
    processes.start("completion", COMPLETION)
    slow = processes.start("worker-1", WORKER, toml='[worker.engine_options]\ndelay_ms = "1500"\n')
    processes.submit({"prompt": SECRET})
    (send,) = receiver.wait("send HR_TASKS", 1)
    time.sleep(0.5)  # the task is running there by now
    slow.send_signal(signal.SIGSTOP)
    processes.start("worker-2", WORKER)
    (outcome,) = await landed(settings, 1)
    receiver.wait("process HR_TASKS", 1)
    slow.send_signal(signal.SIGCONT)
    spans = receiver.wait("process HR_TASKS", 2)
    # The broker may have tried the stopped worker once more, since its pulls were open: then there are three.
    assert attempts(spans)[0] == 1
    assert len(set(attempts(spans))) == len(spans)
    assert {linked(span) for span in spans} == {send["span_id"]}
    assert {span["parent_id"] for span in spans} == {send["span_id"]}
    assert len({span["resource"]["service.instance.id"] for span in spans}) == 2
    assert {span["trace_id"] for span in receiver.spans()} == {outcome["trace_id"]}


async def test_a_request_at_the_front_door_goes_on_in_the_trace_of_its_asker(
    mesh, settings, processes, receiver
):
    processes.start("completion", COMPLETION)
    processes.start("worker", WORKER)
    processes.start("gateway", GATEWAY)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    answer = await mesh.request("hr.api.submit", b'{"job":"j","prompt":"x"}', headers=headers)
    assert msgspec.json.decode(answer.data)["trace_id"] == trace_id
    (outcome,) = await landed(settings, 1)
    assert outcome["trace_id"] == trace_id
    receiver.wait("land HR_RESULTS", 1)
    assert {span["trace_id"] for span in receiver.spans()} == {trace_id}


async def test_a_submit_that_was_killed_goes_on_in_its_trace(mesh, settings, processes, receiver):
    """Killed after its first batch; of the 1,500 items 5 have spans, and all carry the trace."""
    await register_function(mesh, FunctionSpec(name="generate"))
    lines = [{"prompt": f"p{i}"} for i in range(1500)]
    few = {"HEADRACE_TRACE_ITEMS_PER_JOB": "5"}
    processes.submit(*lines, code=-signal.SIGKILL, HEADRACE_CRASH_AT="submit-batch-stored", **few)
    receipt = processes.submit(*lines, **few)
    assert receipt["resumed_from"] == 999
    (submit,) = receiver.wait("submit", 1)
    headers = []
    for sequence in (1, 6, 999, 1001, 1501):  # 1,000 is the first batch's manifest
        message = await get_message(mesh, "HR_TASKS", sequence)
        headers.append(message.headers["traceparent"])
    assert {header[3:35] for header in headers} == {submit["trace_id"]}
    assert [header[-2:] for header in headers] == ["01", "00", "00", "00", "00"]


async def test_off_by_default_no_header_travels_and_nothing_is_sent(
    mesh, settings, nats_server, tmp_path, receiver
):
    processes = Processes(nats_server.url, tmp_path, {})
    try:
        processes.start("completion", COMPLETION)
        processes.start("worker", WORKER)
        processes.submit({"prompt": "x"})
        (outcome,) = await landed(settings, 1)
    finally:
        processes.stop()
    assert outcome.get("trace_id") is None
    assert receiver.spans() == []
