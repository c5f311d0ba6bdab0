"""One trace for what follows from one mail: over agents, governed calls, workers, redelivery and restarts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import uvloop

from headrace.agent import Agent, Context
from headrace.mesh import tracing
from headrace.mesh.connection import Mesh
from headrace.mesh.mail import wait_reply
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import AgentSettings, Settings
from tests.agent.world import hosting, is_empty, send, until
from tests.chaos.processes import Part

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SETTINGS = """
url = "{url}"
durability = "relaxed"
ack_wait_s = 2.0
[worker]
engine = "echo"
[callees.generate]
effect = "read"
kind = "function"
free = true
max_output_tokens = 16
"""


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def on(receiver, monkeypatch):
    """Tracing switched on here, and in the processes that are started."""
    for name, value in receiver.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRACEPARENT", raising=False)
    tracing.setup_tracing("test")
    yield receiver
    tracing.shutdown_tracing()


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    return Settings(
        url=nats_server.url,
        dir=str(tmp_path),
        durability="relaxed",
        ack_wait_s=2.0,
        agent=AgentSettings(retry_s=0.05, message_tries=3),
    )


def first() -> Agent:
    agent = Agent("first")

    @agent.on("go")
    async def go(ctx: Context[dict[str, int]]) -> None:
        await ctx.ask("second", "question", then="answered")

    @agent.on("answered")
    async def answered(ctx: Context[dict[str, int]], msg: object) -> None:
        ctx.reply(msg)

    return agent


async def test_a_conversation_has_one_trace_over_a_redelivery(mesh: Mesh, settings: Settings, on) -> None:
    second, tries = Agent("second"), [0]

    @second.on("question")
    async def question(ctx: Context[dict[str, int]]) -> None:
        tries[0] += 1
        if tries[0] == 1:
            raise RuntimeError("the first time")
        ctx.reply("so")

    async with hosting(settings, first(), second):
        sent = await send(mesh, "first", "go", request="r-1")
        assert await wait_reply(mesh, "r-1", 20.0) is not None
        await until(lambda: is_empty(mesh, "first"), "settled")
    tracing.shutdown_tracing()
    sends = on.wait("send HR_MAIL", 2)
    processes = on.wait("process HR_MAIL", 4)
    invoked = on.wait("invoke_agent", 4)
    assert {s["trace_id"] for s in on.spans()} == {sends[0]["trace_id"]}
    assert tracing.trace_id(sent.traceparent) is None, "it came without a context"
    asked = next(s for s in sends if s["attributes"]["headrace.mail.to"] == "second")
    tried = [p for p in processes if p["attributes"]["headrace.mail.kind"] == "question"]
    assert [p["attributes"]["headrace.delivery.attempt"] for p in tried] == [1, 2]
    for p in tried:
        assert p["parent_id"] == asked["span_id"]
        assert [link["span_id"] for link in p["links"]] == [asked["span_id"]]
    assert [i["name"] for i in invoked].count("invoke_agent second") == 2
    assert tried[0]["attributes"]["error.type"] == "handler_failed"


async def test_m9_one_trace_over_two_agents_the_gateway_and_a_worker_with_a_redelivery(
    nats_server: NatsServer, mesh: Mesh, settings: Settings, tmp_path: Path, on
) -> None:
    """M9: with one redelivery of the mail whose handler calls the model."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "headrace.toml").write_text(SETTINGS.format(url=nats_server.url), "utf-8")
    parts = [Part(name, folder) for name in ("worker", "gateway")]
    second, tries = Agent("second"), [0]

    @second.on("question")
    async def question(ctx: Context[dict[str, int]]) -> None:
        tries[0] += 1
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        called = await ctx.call("generate", body)
        if tries[0] == 1:
            raise RuntimeError("after the call")
        ctx.reply({"call": called.answer.call_id, "replayed": called.replayed})

    try:
        for part in parts:
            part.start()
            await part.ready()
        async with hosting(settings, first(), second):
            await send(mesh, "first", "go", request="r-1")
            reply = await wait_reply(mesh, "r-1", 40.0)
            assert reply is not None, [part.tail() for part in parts]
            assert reply.error is None, reply.error
            assert msgspec.json.decode(reply.body)["replayed"] is True
            await until(lambda: is_empty(mesh, "first"), "settled")
        for part in parts:
            assert part.process is not None
            part.process.terminate()
            part.process.wait(20)
    finally:
        for part in parts:
            part.kill()
    tracing.shutdown_tracing()
    on.wait("process HR_TASKS", 1)
    on.wait("process HR_MAIL", 4)
    spans = on.spans()
    assert len({s["trace_id"] for s in spans}) == 1, {(s["name"], s["trace_id"]) for s in spans}
    tried = [
        s
        for s in spans
        if s["attributes"].get("headrace.mail.kind") == "question" and s["name"].startswith("process")
    ]
    assert len(tried) == 2
    assert len({link["span_id"] for s in tried for link in s["links"]}) == 1
