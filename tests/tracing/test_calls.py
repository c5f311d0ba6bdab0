"""Governed calls as a collector sees them: one trace for a call, usage as the ledger has it, and nobody waits."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest

from headrace.contracts.calls import CallAnswer, CallHistory
from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import FunctionSpec
from headrace.mesh.microservice import call_api
from headrace.mesh.provision import register_function
from tests.gateway.callee_process import CalleeProcess
from tests.gateway.office import until
from tests.tracing.test_job import GATEWAY, WORKER, Processes

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]

TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319d"
SECRET = "nobody reads this prompt"


def header(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}


def toml(callee: CalleeProcess) -> str:
    common = f'base_url = "{callee.url}"\ntimeout_s = 30.0\nmax_output_tokens = 50\n'
    return f"""
ack_wait_s = 1.0
[gateway]
name = "g1"
[callees.llm]
kind = "openai"
effect = "cost_bearing"
model = "tiny"
{common}
[callees.llm.price]
version = "1"
output_micro_per_mtok = 1000000
[callees.again]
kind = "openai"
effect = "idempotent"
free = true
{common}
[callees.tool]
kind = "http"
effect = "read"
path = "/tool"
{common}
[callees.pay]
kind = "http"
effect = "money"
{common}
"""


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def settings(settings):
    return msgspec.structs.replace(settings, ack_wait_s=1.0)


@pytest.fixture
def callee(tmp_path):
    process = CalleeProcess(tmp_path)
    yield process
    process.stop()


@pytest.fixture
def processes(nats_server, tmp_path, receiver):
    environ = receiver.environ(OTEL_METRIC_EXPORT_INTERVAL="300")
    running = Processes(nats_server.url, tmp_path, environ)
    yield running
    running.stop()


async def ask(mesh, callee: str, key: str, *, wait_s: float = 10.0, headers=None, **body) -> CallAnswer:
    named = {} if callee == "generate" else {"id": key}
    body = {"messages": [{"role": "user", "content": SECRET}]} | named | body
    request = {"callee": callee, "body": body, "tenant": "t", "agent": "a", "key": key, "wait_s": wait_s}
    subject, data = mesh.subjects.api("call"), msgspec.json.encode(request)
    answer = await mesh.request(subject, data, timeout_s=wait_s + 5, headers=headers)
    return msgspec.json.decode(answer.data, type=CallAnswer)


async def asked_until(mesh, callee: str, key: str, state: str, **body) -> CallAnswer:
    async def look() -> CallAnswer | None:
        try:
            answer = await ask(mesh, callee, key, wait_s=1.0, **body)
        except (HeadraceError, msgspec.MsgspecError):
            return None
        return answer if answer.state == state else None

    return await until(look, 60)


async def show(mesh, call: str) -> CallHistory:
    return msgspec.json.decode(await call_api(mesh, "calls.show", {"call": call}), type=CallHistory)


def of_call(receiver, call: str) -> list[dict]:
    return [s for s in receiver.spans() if s["attributes"].get("headrace.call.id") == call]


async def test_one_trace_over_asking_attempt_and_replay(mesh, processes, callee, receiver):
    processes.start("gateway", GATEWAY, toml=toml(callee))
    first = await ask(mesh, "llm", "k", headers=header(TRACE))
    again = await ask(mesh, "llm", "k", headers=header(OTHER))
    tool = await ask(mesh, "tool", "k2")
    assert (first.state, again.replayed, tool.state) == ("completed", True, "completed")
    records = (await show(mesh, first.call_id)).records
    processes.stop()

    spans = of_call(receiver, first.call_id)
    inside = [s for s in spans if not (s["name"].startswith("send") and s["trace_id"] == OTHER)]
    assert {s["trace_id"] for s in inside} == {TRACE}
    names = [s["name"] for s in inside]
    assert sorted(names) == ["chat tiny", "process HR_CALLS", "process HR_CALLS", "send HR_CALLS"]
    chat = next(s for s in inside if s["name"] == "chat tiny")
    usage = records[1]["usage"]
    assert chat["attributes"] == {
        "headrace.call.id": first.call_id,
        "headrace.tenant": "t",
        "headrace.callee": "llm",
        "gen_ai.agent.name": "a",
        "headrace.call.attempt": 1,
        "headrace.call.effect": "cost_bearing",
        "headrace.call.state": "completed",
        "headrace.call.cost_micro": records[1]["cost_micro"],
        "headrace.usage.source": "provider",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.response.id": "cmpl-k",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": usage["input_tokens"],
        "gen_ai.usage.output_tokens": usage["output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["cached_tokens"],
    }
    sent = next(s for s in inside if s["name"].startswith("send"))
    assert chat["parent_id"] == sent["span_id"]
    assert records[0]["request"]["traceparent"] == f"00-{TRACE}-{sent['span_id']}-01"
    assert callee.entries()[0]["trace"] == f"00-{TRACE}-{chat['span_id']}-01"  # the callee goes on in it
    replay = next(s for s in inside if s["attributes"].get("headrace.call.replayed"))
    assert replay["attributes"]["headrace.asked_in"] == OTHER
    executed = next(s for s in of_call(receiver, tool.call_id) if s["name"] == "execute_tool tool")
    assert executed["attributes"]["gen_ai.tool.name"] == "tool"
    assert executed["attributes"]["gen_ai.tool.call.id"] == tool.call_id
    assert SECRET not in str(receiver.spans())


async def test_one_trace_over_a_kill(mesh, processes, callee, receiver):
    """The first gateway is killed in the middle of an attempt: the second goes on in the trace that the intent has."""
    running = processes.start("gateway", GATEWAY, toml=toml(callee))
    asking = asyncio.create_task(ask(mesh, "again", "k", wait_s=1.0, headers=header(TRACE), behave="hangs"))

    async def heard() -> bool:
        return bool(callee.entries())

    await until(heard)
    running.kill()
    running.wait()
    await asyncio.gather(asking, return_exceptions=True)
    processes.start("gateway-2", GATEWAY, toml=toml(callee))
    answer = await asked_until(mesh, "again", "k", "completed", behave="hangs", headers=header(OTHER))
    assert answer.attempt >= 2
    processes.stop()
    assert {e["trace"].split("-")[1] for e in callee.entries()} == {TRACE}
    chats = [s for s in of_call(receiver, answer.call_id) if s["name"].startswith("chat")]
    assert chats
    assert {s["trace_id"] for s in chats} == {TRACE}
    assert chats[-1]["attributes"]["headrace.call.attempt"] == answer.attempt


async def test_without_a_trace_of_the_asker_a_call_has_one_all_the_same(mesh, processes, callee, receiver):
    """A call that is published by hand, with no header: its trace follows from its id."""
    from msgspec import Raw

    from headrace.contracts import codec
    from headrace.contracts.calls import CallMessage
    from headrace.mesh.publisher import publish

    processes.start("gateway", GATEWAY, toml=toml(callee))
    for request in ("r1", "r2"):
        message = CallMessage(
            request=request, callee="llm", body=Raw(b'{"messages":[]}'), tenant="t", agent="a", key="k"
        )
        await publish(mesh, "HR_CALLS", "hr.calls.t.a", codec.CALL.encode(message))
    receiver.wait("process HR_CALLS", 2)
    processes.stop()
    spans = receiver.spans()
    assert len({s["trace_id"] for s in spans}) == 1
    assert len([s for s in spans if s["name"].startswith("chat")]) == 1


async def test_a_call_to_our_own_worker_goes_on_in_its_trace(mesh, processes, callee, receiver):
    await register_function(mesh, FunctionSpec(name="generate", engine="echo", model="echo"))
    processes.start("worker", WORKER)
    processes.start("gateway", GATEWAY, toml=toml(callee))
    answer = await ask(mesh, "generate", "k", headers=header(TRACE), max_tokens=4, wait_s=30.0)
    assert answer.state == "completed", answer
    processes.stop()
    mine = {s["name"]: s for s in receiver.spans() if s["trace_id"] == TRACE}
    assert {"send HR_CALLS", "process HR_CALLS", "process HR_TASKS"} <= set(mine)
    outer = next(s for s in of_call(receiver, answer.call_id) if s["name"].startswith("chat"))
    assert mine["process HR_TASKS"]["parent_id"] == outer["span_id"]
    assert outer["attributes"]["gen_ai.usage.output_tokens"] == (answer.usage and answer.usage.output_tokens)


async def test_metrics(mesh, processes, callee, receiver):
    processes.start("gateway", GATEWAY, toml=toml(callee))
    await ask(mesh, "llm", "k1")
    await ask(mesh, "llm", "k1")
    await ask(mesh, "nobody", "k2")
    doubtful = await ask(mesh, "pay", "k3", behave="closes")
    assert doubtful.state == "in_doubt"

    def last(name: str, **attributes) -> dict | None:
        wanted = {k.replace("_", "."): v for k, v in attributes.items()}
        found = [p for p in receiver.points(name) if wanted.items() <= p["attributes"].items()]
        return found[-1] if found else None

    async def arrived() -> bool:
        counted = last("headrace.calls.in_doubt.age")
        return counted is not None and counted["value"] > 0 and last("headrace.calls.refused") is not None

    await until(arrived)
    states = {
        (p["attributes"]["headrace.call.state"], p["attributes"]["headrace.call.replayed"]): p["value"]
        for p in receiver.points("headrace.calls")
        if p["name"] == "headrace.calls"
    }
    assert states == {
        ("completed", False): 1,
        ("completed", True): 1,
        ("refused", False): 1,
        ("in_doubt", False): 1,
    }
    assert last("headrace.calls.refused")["attributes"]["error.type"] == "unknown_callee"
    assert (
        next(p for p in reversed(receiver.points()) if p["name"] == "headrace.calls.in_doubt")["value"] == 1
    )
    assert last("headrace.calls.in_doubt.held")["unit"] == "{micro}"
    tokens = {
        p["attributes"]["gen_ai.token.type"]: (p["value"], p["count"])
        for p in receiver.points("gen_ai.client.token.usage")
    }
    assert tokens == {"input": (11, 1), "output": (4, 1)}
    added = last("headrace.call.added.duration", headrace_callee="llm")
    assert added["count"] == 1
    assert added["value"] > 0


class Silent:
    """A collector that takes connections and never says anything."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.taken.append(self.server.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self.server.close()
        for one in self.taken:
            one.close()


async def test_a_collector_that_never_answers_holds_nobody_up(mesh, nats_server, tmp_path: Path, callee):
    """Each export waits ten seconds in vain; fifty calls, one after the other, do not."""
    silent = Silent()
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": silent.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    environ |= {
        "OTEL_METRIC_EXPORT_INTERVAL": "100",
        "OTEL_BSP_MAX_QUEUE_SIZE": "16",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4",
    }
    running = Processes(nats_server.url, tmp_path, environ)
    try:
        running.start("gateway", GATEWAY, toml=toml(callee))
        await ask(mesh, "llm", "first")

        async def tried() -> bool:
            return bool(silent.taken)

        await until(tried)
        began = time.monotonic()
        for i in range(50):
            assert (await ask(mesh, "llm", f"k{i}", wait_s=30.0)).state == "completed"
        assert time.monotonic() - began < 60  # ten seconds each would be five hundred
    finally:
        running.stop()
        silent.close()
