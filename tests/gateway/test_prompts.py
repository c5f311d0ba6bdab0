"""`hr.api.agents.prompt.<agent>` on a real broker, over raw requests, as `nats request` sends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts import codec
from headrace.contracts.agents import prompt_body
from headrace.contracts.errors import InvalidInput, Unavailable
from headrace.contracts.mail import Mail
from headrace.gateway.service import GatewayService
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import count_subject, last_message
from headrace.mesh.provision import provision
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos.processes import Part
from tests.gateway.hand_agent import card, hand_agent, open_mailbox

pytestmark = pytest.mark.anyio

NATS_REQUEST_S = 5.0
"""What `nats request` waits by default."""


@pytest.fixture
def anyio_backend() -> object:
    """The gateway's loop in production: waiting for what is slow by intention is enough once."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def gateway(mesh: Mesh, settings: Settings) -> AsyncIterator[GatewayService]:
    service = GatewayService(settings)
    await service.start()
    yield service
    await service.stop()
    assert service.failure is None


async def request(
    mesh: Mesh,
    name: str,
    data: bytes,
    headers: dict[str, str] | None = None,
    *,
    timeout_s: float = NATS_REQUEST_S,
) -> tuple[dict[str, Any], dict[str, str]]:
    """One request with an inbox of its own, as a client makes it: the reply, its headers. More than one reply fails."""
    replies: list[Any] = []
    inbox = mesh.inbox()

    async def on_reply(msg: Any) -> None:
        replies.append(msg)

    subscription = await mesh.nc.subscribe(inbox, cb=on_reply)
    await mesh.nc.publish(f"hr.api.{name}", data, reply=inbox, headers=headers)
    deadline = time.monotonic() + timeout_s
    while not replies and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    if not replies:
        raise Unavailable("no reply in time")
    await asyncio.sleep(0.1)
    await subscription.unsubscribe()
    assert len(replies) == 1, [r.data for r in replies]
    return msgspec.json.decode(replies[0].data), dict(replies[0].headers or {})


async def refused(
    mesh: Mesh, name: str, data: bytes, code: str, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    reply, said = await request(mesh, name, data, headers)
    assert set(reply) == {"error"}, reply
    assert reply["error"]["code"] == code, reply
    assert said["Nats-Service-Error"]
    assert said["Nats-Service-Error-Code"].isdigit()
    return reply["error"]


async def echo(mail: Mail) -> Any:
    return {"you said": msgspec.json.decode(mail.body)}


async def test_m8_a_fast_agent_answers_in_the_one_reply(mesh: Mesh, gateway: GatewayService) -> None:
    async with hand_agent(mesh, "helper", echo) as got:
        reply, headers = await request(mesh, "agents.prompt.helper", b"say hello")
        assert (reply["state"], reply["agent"], reply["answer"]) == (
            "answered",
            "helper",
            {"you said": {"prompt": "say hello"}},
        )
        assert "Nats-Service-Error" not in headers
        reply, _ = await request(mesh, "agents.prompt.helper", b'{"prompt": "x", "n": [1]}')
        assert reply["answer"] == {"you said": {"prompt": "x", "n": [1]}}
    assert [m.kind for m in got] == ["prompt", "prompt"]
    assert all(m.sender == "front-door" and m.request for m in got)
    assert await count_subject(mesh, "HR_MAIL", "hr.mail.>") == 0


async def test_m8_a_slow_agent_is_accepted_in_time_and_fetched_later(
    mesh: Mesh, gateway: GatewayService
) -> None:
    go_on = asyncio.Event()

    async def slow(mail: Mail) -> Any:
        await go_on.wait()
        return "at last"

    async with hand_agent(mesh, "slow", slow):
        began = time.monotonic()
        reply, headers = await request(mesh, "agents.prompt.slow", b"think")
        assert 3.0 < time.monotonic() - began < NATS_REQUEST_S
        assert "Nats-Service-Error" not in headers
        assert reply["state"] == "accepted"
        # The command that it names is what fetches the answer.
        words = reply["fetch"].split(" ", 3)
        assert words[:2] == ["nats", "request"]
        name, body = words[2].removeprefix("hr.api."), words[3].strip("'").encode()
        assert body == msgspec.json.encode({"request": reply["request"]})
        early, _ = await request(mesh, name, body)
        assert early["state"] == "accepted"
        go_on.set()
        waited = msgspec.json.encode({"request": reply["request"], "wait_s": 4})
        late, _ = await request(mesh, name, waited)
        assert (late["state"], late["answer"]) == ("answered", "at last")
        again, _ = await request(mesh, name, body)
        assert again == late


async def test_m7_the_asker_leaves_and_the_answer_is_fetched_by_the_requests_id(
    mesh: Mesh, gateway: GatewayService, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async def three_seconds(mail: Mail) -> Any:
        await asyncio.sleep(3)
        return 42

    async with hand_agent(mesh, "slow", three_seconds) as got:
        async with await Mesh.connect(settings, name="asker") as asker:
            with pytest.raises(Unavailable):
                await request(asker, "agents.prompt.slow", b"x", {"Headrace-Request": "mine"}, timeout_s=1.0)
        deadline = time.monotonic() + 30
        while True:
            reply, _ = await request(mesh, "agents.answer", b'{"request":"mine","wait_s":1}')
            if reply["state"] == "answered":
                break
            assert time.monotonic() < deadline
        assert reply["answer"] == 42
        assert len(got) == 1
    assert [r for r in caplog.records if r.levelname in {"ERROR", "CRITICAL"}] == []
    assert await count_subject(mesh, "HR_MAIL", "hr.mail.>") == 0


async def test_the_same_request_again_is_the_same_request(mesh: Mesh, gateway: GatewayService) -> None:
    async with hand_agent(mesh, "helper", echo) as got:
        headers = {"Headrace-Request": "r-1"}
        first, _ = await request(mesh, "agents.prompt.helper", b"one", headers)
        asked = [request(mesh, "agents.prompt.helper", b"one", headers) for _ in range(5)]
        assert all(reply == first for reply, _ in await asyncio.gather(*asked))
        assert len(got) == 1
        error = await refused(mesh, "agents.prompt.helper", b"two", "request_reused", headers)
        assert "r-1" in error["message"]


async def test_many_at_once_under_one_id_are_one_mail(mesh: Mesh, gateway: GatewayService) -> None:
    async with hand_agent(mesh, "helper", echo) as got:
        headers = {"Headrace-Request": "burst"}
        asked = [request(mesh, "agents.prompt.helper", b"one", headers) for _ in range(20)]
        replies = [reply for reply, _ in await asyncio.gather(*asked)]
        assert {msgspec.json.encode(r) for r in replies} == {msgspec.json.encode(replies[0])}
        assert replies[0]["state"] == "answered"
        assert len(got) == 1


async def test_an_unknown_agent_is_not_found_and_the_known_ones_are_named(
    mesh: Mesh, gateway: GatewayService
) -> None:
    async with hand_agent(mesh, "helper", echo), hand_agent(mesh, "writer", echo):
        error = await refused(mesh, "agents.prompt.nobody", b"x", "unknown_agent")
        assert "helper, writer" in error["message"]
        error = await refused(mesh, "agents.prompt.nobody!", b"x", "invalid_name")
        listed, _ = await request(mesh, "agents.list", b"")
        assert [a["card"]["name"] for a in listed["agents"]] == ["helper", "writer"]


async def test_bad_prompts_are_refused_and_named(mesh: Mesh, gateway: GatewayService) -> None:
    async with hand_agent(mesh, "helper", echo, "prompt", "summarise") as got:
        await refused(mesh, "agents.prompt.helper", b"", "missing_field")
        await refused(mesh, "agents.prompt.helper", b" \n", "missing_field")
        await refused(mesh, "agents.prompt.helper", b"\xff\xfe", "invalid_json")
        bad = {"Headrace-Request": "no token."}
        await refused(mesh, "agents.prompt.helper", b"x", "invalid_name", bad)
        error = await refused(mesh, "agents.prompt.helper", b"x", "unknown_kind", {"Headrace-Kind": "dance"})
        assert "prompt, summarise" in error["message"]
        await refused(mesh, "agents.prompt.helper", b"x", "invalid_name", {"Headrace-Kind": "a b"})
        await refused(mesh, "agents.prompt.helper", b"x" * (mesh.max_payload - 600), "too_large")
        await refused(mesh, "agents.answer", b'{"request":"unheard-of"}', "unknown_request")
        await refused(mesh, "agents.answer", b"{", "invalid")
        assert got == []
        reply, _ = await request(mesh, "agents.prompt.helper", b'{"a":1}', {"Headrace-Kind": "summarise"})
        assert reply["state"] == "answered"
        assert got[0].kind == "summarise"
        deep, _ = await request(mesh, "agents.prompt.helper", b"[" * 5_000 + b"]" * 5_000)
        assert deep["answer"]["you said"]["prompt"].startswith("[[")  # too deep to be JSON to anybody: text


async def test_an_agent_that_fails_says_so_in_the_one_reply(mesh: Mesh, gateway: GatewayService) -> None:
    async def fails(mail: Mail) -> Any:
        raise ValueError("I cannot")

    async with hand_agent(mesh, "helper", fails):
        error = await refused(mesh, "agents.prompt.helper", b"x", "failed", {"Headrace-Request": "f"})
        assert "I cannot" in error["message"]
        await refused(mesh, "agents.answer", b'{"request":"f"}', "failed")


async def test_a_full_mailbox_refuses_and_says_so(settings: Settings) -> None:
    settings = msgspec.structs.replace(settings, mailbox_messages=3)
    async with await Mesh.connect(settings, name="test") as mesh:
        await provision(mesh)
        await open_mailbox(mesh, "busy")
        service = GatewayService(settings)
        await service.start()
        try:
            asked = [
                asyncio.ensure_future(
                    request(mesh, "agents.prompt.busy", b"x", {"Headrace-Request": f"r{i}"})
                )
                for i in range(6)
            ]
            replies = [reply for reply, _ in await asyncio.gather(*asked)]
            states = sorted(r.get("state") or r["error"]["code"] for r in replies)
            assert states == ["accepted"] * 3 + ["mailbox_full"] * 3
            # A refused request was not taken in: its id is as good as new.
            n = next(i for i, r in enumerate(replies) if "error" in r)
            assert await last_message(mesh, "HR_REPLIES", f"hr.replies.r{n}.accepted") is None
        finally:
            await service.stop()


@pytest.mark.parametrize("point", ["prompt-stored", "prompt-accepted"])
async def test_a_gateway_that_dies_took_the_prompt_in_once(
    mesh: Mesh, nats_server: NatsServer, tmp_path: Path, point: str
) -> None:
    folder = tmp_path / "mesh"
    folder.mkdir()
    (folder / "headrace.toml").write_text(f'url = "{nats_server.url}"\ndurability = "relaxed"\n', "utf-8")
    part = Part("gateway", folder)
    part.start(crash_at=point)
    try:
        await part.ready()
        async with hand_agent(mesh, "helper", echo) as got:
            headers = {"Headrace-Request": "r"}
            with pytest.raises(Unavailable):
                await request(mesh, "agents.prompt.helper", b"x", headers, timeout_s=2.0)
            assert await part.died(20) is not None
            part.start()
            await part.ready()
            reply, _ = await request(mesh, "agents.prompt.helper", b"x", headers)
            assert (reply["state"], reply["answer"]) == ("answered", {"you said": {"prompt": "x"}})
            await refused(mesh, "agents.prompt.helper", b"y", "request_reused", headers)
            assert len(got) == 1
    finally:
        part.kill()


def test_what_a_prompt_becomes() -> None:
    assert bytes(prompt_body(b'"quoted"')) == b'{"prompt":"quoted"}'
    assert bytes(prompt_body(b"42")) == b'{"prompt":"42"}'
    assert bytes(prompt_body(b"[1]")) == b"[1]"
    with pytest.raises(InvalidInput):
        prompt_body(b"\xff")


def test_a_card_is_json_as_a2a_names_it() -> None:
    found = msgspec.json.decode(codec.AGENT_CARD.encode(card("a", "prompt")))
    required = {
        "name", "description", "supportedInterfaces", "version", "capabilities", "skills", "defaultInputModes",
        "defaultOutputModes",
    }  # fmt: skip
    assert required <= set(found)
    assert set(found["supportedInterfaces"][0]) == {"url", "protocolBinding", "protocolVersion"}
    assert {"id", "name", "description", "tags"} <= set(found["skills"][0])
