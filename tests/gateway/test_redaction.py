"""What must not be kept is nowhere: not in the broker's files, the logs or the data plane. The live answer has it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts.calls import CallAnswer
from headrace.mesh.callee_settings import CalleeSettings
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.redact import REPLACED, Redactor
from headrace.mesh.server import NatsServer
from tests.chaos.processes import Part
from tests.gateway.leaky import OWN, leaky
from tests.gateway.office import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

API_KEY = "sk-live-9b1deb4d3b7d"
IN_REQUEST = "SECRET-ASKED1"
TOML = """
url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0

[gateway]
name = "g1"
outcome_bytes = 20000

[policy]
redact = ['SECRET-[A-Z0-9]+', '\\b4[0-9]{{15}}\\b']
capture_requests = true

[[policy.rules]]
action = "approve"
agent = "new"

[[policy.rules]]
action = "allow"

[callees.llm]
kind = "openai"
effect = "cost_bearing"
base_url = "{callee}"
api_key_env = "TOOL_KEY"
max_output_tokens = 50
free = true
timeout_s = 10.0
"""


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


def files_with(secret: str, *places: Path) -> list[str]:
    files = [f for p in places for f in ([p] if p.is_file() else p.rglob("*")) if f.is_file()]
    assert files
    return [str(f) for f in files if secret.encode() in f.read_bytes()]


async def test_no_secret_is_in_any_file(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOL_KEY", API_KEY + "\n")  # as a file's content is often put there
    folder = tmp_path / "m"
    folder.mkdir()
    async with leaky() as callee:
        (folder / "headrace.toml").write_text(TOML.format(url=nats_server.url, callee=callee.url))
        parts = [Part(name, folder) for name in ("gateway", "completion")]

        async def ask(key: str, agent: str = "a", **body: Any) -> CallAnswer:
            body = {"messages": [{"role": "user", "content": f"hi {IN_REQUEST}"}]} | body
            request = {
                "callee": "llm",
                "body": body,
                "tenant": "t",
                "agent": agent,
                "key": key,
                "wait_s": 20.0,
            }
            return msgspec.json.decode(await call_api(mesh, "call", request, timeout_s=25.0), type=CallAnswer)

        try:
            for part in parts:
                part.start()
            await asyncio.gather(*(part.ready() for part in parts))
            cases: dict[str, dict[str, Any]] = {
                "whole": {}, "text": {"behave": "text"}, "stream": {"behave": "stream", "stream": True},
                "object": {"size": 50_000}, "huge": {"size": 1_500_000},
            }  # fmt: skip
            for key, body in cases.items():
                live = await ask(key, **body)
                assert live.state == "completed", (key, live)
                assert live.outcome is not None
                told = msgspec.json.encode(live.outcome).decode()
                if key != "huge":  # too large for a message: what is kept is what can be fetched
                    assert OWN in str(live.outcome["body"])  # the caller gets what the callee said
                assert API_KEY not in told  # and never the gateway's own secret
                again = await ask(key, **body)
                assert (again.replayed, again.outcome and again.outcome["redacted"]) == (True, True)
                assert OWN not in str(again.outcome)
                if key != "huge":
                    assert REPLACED in str(again.outcome and again.outcome["body"])
                assert (again.outcome or {})["digest"] == live.outcome["digest"]  # of what the callee sent
            for status in ("400", "500", "429"):
                for long in (False, True):
                    failed = await ask(f"{status}-{long}", behave=status, long=long)
                    assert failed.error is not None
                    assert OWN not in failed.error["message"]
                    assert long or REPLACED in failed.error["message"]
            waits = await ask("waits", agent="new")
            assert waits.state == "awaiting_approval"
            shown = (await call_api(mesh, "calls.show", {"call": waits.call_id})).decode()
            assert REPLACED in shown
            assert IN_REQUEST not in shown
            assert (
                callee.heard[0]["messages"][0]["content"] == f"hi {IN_REQUEST}"
            )  # the callee gets what was asked

            async def projected() -> bool:
                sql = "SELECT count(*) FROM calls WHERE state IN ('completed', 'failed')"
                reply = msgspec.json.decode(await call_api(mesh, "query", {"sql": sql}))
                return reply["rows"][0][0] >= 11

            await until(projected)
        finally:
            for part in parts:
                part.kill()
    nats_server.kill()
    store, logs = tmp_path / "nats", [part.log for part in parts]
    assert files_with(REPLACED, store)  # it would be found
    assert files_with(API_KEY, store, folder) == []
    assert files_with(OWN, store, folder) == []
    # What is asked waits as it is: it has to be sent. So the queue has it, and nothing else.
    assert [f for f in files_with(IN_REQUEST, store, folder) if "HR_CALLS" not in f] == []
    assert all(log.stat().st_size for log in logs)


def test_a_key_that_could_not_be_sent_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.contracts.errors import InvalidInput
    from headrace.gateway.callees import Callee

    monkeypatch.setenv("TOOL_KEY", "sk-\x01-quoted")
    callee = Callee("llm", CalleeSettings(kind="openai", effect="read", api_key_env="TOOL_KEY"))
    with pytest.raises(InvalidInput) as raised:
        callee.api_key()
    assert "quoted" not in str(raised.value)


def test_redacting_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", 'k"ey-1')
    redactor = Redactor(["[0-9]{16}", "pin"], ["A_KEY"])
    value = {"pin": ["a pin", 4_111_111_111_111_111, 7, None, True, 1.5], "k": 'k"ey-1'}
    assert redactor.kept(value) == {
        REPLACED: [f"a {REPLACED}", REPLACED, 7, None, True, 1.5],
        "k": REPLACED,
    }
    clean = {"a": [1, "b"]}
    assert redactor.kept(clean) is clean
    encoded = msgspec.json.encode(value)
    assert redactor.live(value, encoded)["k"] == REPLACED
    assert redactor.live(value, encoded)["pin"] == value["pin"]
    assert redactor.live(clean, msgspec.json.encode(clean)) is clean
