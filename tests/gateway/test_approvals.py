"""Calls that a person has to allow: a wait that outlives gateways, one decision that counts, for one body."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts.calls import CallAnswer, CallsWaitingReply
from headrace.contracts.errors import Conflict, HeadraceError
from headrace.gateway.keys import call_id
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import count_subject
from headrace.mesh.microservice import call_api
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos.processes import Part
from tests.cli.harness import HEADRACE, clean_environment
from tests.gateway.callee_process import CalleeProcess
from tests.gateway.office import Office, office, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def place(mesh: Mesh, settings: Settings, tmp_path: Path) -> AsyncIterator[Office]:
    async with office(mesh, settings, tmp_path) as made:
        await made.open(
            callees={"pay": made.declared(effect="money", approval=True), "llm": made.declared()},
            policy={
                "rules": [
                    {"action": "approve", "agent": "new-*", "why": "it is new"},
                    {"action": "allow"},
                ]
            },
        )
        yield made


async def decide(place: Office, what: str, call: str, why: str = "because", by: str = "ann") -> CallAnswer:
    return await place.api(f"calls.{what}", {"call": call, "why": why, "by": by}, CallAnswer)


async def waiting(place: Office, **of: Any) -> list[str]:
    return [line.call for line in (await place.api("calls.waiting", of, CallsWaitingReply)).calls]


async def asked_until(place: Office, callee: str, key: str, state: str, **body: Any) -> CallAnswer:
    async def look() -> CallAnswer | None:
        answer = await place.ask(callee, key, wait_s=0.5, **body)
        return answer if answer.state == state else None

    return await until(look)


async def test_it_waits_and_is_made_once_it_is_approved(place: Office) -> None:
    first = await place.ask("pay", "k", secret="what it is about")
    assert (first.state, first.held_micro) == ("awaiting_approval", 0)
    assert first.call_id == call_id("t", "a", "k")
    assert await waiting(place) == [first.call_id]
    shown = await place.show(first.call_id)
    assert (shown.state, shown.callee, shown.agent, shown.effect) == (
        "awaiting_approval",
        "pay",
        "a",
        "money",
    )
    assert shown.evidence[0]["body"]["secret"] == "what it is about"
    assert await count_subject(place.mesh, "HR_LEDGER", f"hr.ledger.call.t.{first.call_id}") == 0
    assert place.callee.entries() == []
    assert (await decide(place, "approve", first.call_id)).state == "in_progress"
    done = await asked_until(place, "pay", "k", "completed", secret="what it is about")
    assert len(place.callee.entries()) == 1
    assert await waiting(place) == []
    told = (await place.show(done.call_id)).evidence
    assert [(e["kind"], e.get("why", ""), e["by"]) for e in told[:2]] == [
        ("approval_asked", "", "a"),
        ("approved", "because", "ann"),
    ]


async def test_nobody_has_to_ask_again_for_it_to_be_made(place: Office) -> None:
    call = (await place.ask("llm", "k", agent="new-1")).call_id
    await decide(place, "approve", call)

    async def heard() -> bool:
        return len(place.callee.entries()) == 1

    await until(heard)

    async def acked() -> bool:
        return await count_subject(place.mesh, "HR_CALLS", "hr.calls.>") == 0

    await until(acked)


async def test_denied_is_refused_for_good(place: Office) -> None:
    call = (await place.ask("pay", "k")).call_id
    assert (await decide(place, "deny", call, why="too much")).state == "refused"
    answer = await asked_until(place, "pay", "k", "refused")
    assert answer.error is not None
    assert answer.error["type"] == "denied"
    assert "too much" in answer.error["message"]
    before = len(await place.evidence(call))
    assert (await place.ask("pay", "k")).state == "refused"
    assert len(await place.evidence(call)) == before  # the decision is on record: asking again adds nothing
    assert place.callee.entries() == []
    assert await count_subject(place.mesh, "HR_LEDGER", f"hr.ledger.call.t.{call}") == 0
    assert await waiting(place) == []
    assert (await place.show(call)).state == "refused"


async def test_the_first_decision_counts(place: Office) -> None:
    one, two = (await place.ask("pay", "k1")).call_id, (await place.ask("pay", "k2")).call_id
    await decide(place, "approve", one)
    await decide(place, "approve", one, by="bob")  # the same again changes nothing
    with pytest.raises(Conflict, match="approved by ann"):
        await decide(place, "deny", one)
    await decide(place, "deny", two)
    with pytest.raises(Conflict, match="denied by ann"):
        await decide(place, "approve", two)
    assert [e.kind for e in await place.evidence(one)].count("approved") == 1
    assert (await asked_until(place, "pay", "k1", "completed")).replayed in (True, False)
    assert (await asked_until(place, "pay", "k2", "refused")).state == "refused"
    with pytest.raises(Conflict, match="does not wait"):
        await decide(place, "approve", (await place.ask("llm", "k3")).call_id)
    with pytest.raises(HeadraceError, match="no call"):
        await decide(place, "approve", "nobody")


async def test_two_who_decide_at_once(place: Office) -> None:
    for i in range(6):
        call = (await place.ask("pay", f"k{i}")).call_id
        said = await asyncio.gather(
            *(decide(place, what, call, by=f"{what}{n}") for n in range(3) for what in ("approve", "deny")),
            return_exceptions=True,
        )
        kinds = [e.kind for e in await place.evidence(call) if e.kind in ("approved", "denied")]
        assert len(kinds) == 1
        assert sum(isinstance(s, Conflict) for s in said) == 3


async def test_an_approval_is_for_one_body(place: Office) -> None:
    """Another body under the same key is another call, before and after the approval."""
    call = (await place.ask("pay", "k", amount=1)).call_id
    assert (await place.ask("pay", "k", amount=1_000_000)).state == "conflict"
    await decide(place, "approve", call)
    assert (await place.ask("pay", "k", amount=1_000_000)).state == "conflict"
    assert (await asked_until(place, "pay", "k", "completed", amount=1)).state == "completed"
    assert len(place.callee.entries()) == 1


async def test_the_deadline_passes_while_it_waits(place: Office) -> None:
    call = (await place.ask("pay", "k", deadline_s=0.3)).call_id

    async def refused() -> bool:
        return (await place.show(call)).state == "refused"

    await until(refused)
    assert await waiting(place) == []
    with pytest.raises(Conflict, match="does not wait"):
        await decide(place, "approve", call)
    assert [e.kind for e in await place.evidence(call)] == ["approval_asked", "rejected"]
    # Asked again without a deadline it waits again, and may be approved.
    assert (await place.ask("pay", "k")).state == "awaiting_approval"
    assert await waiting(place) == [call]
    await decide(place, "approve", call)
    assert (await asked_until(place, "pay", "k", "completed")).state == "completed"


async def test_who_waits_is_listed_by_tenant_oldest_first(place: Office) -> None:
    calls = [(await place.ask("pay", f"k{i}", tenant="t" if i % 2 else "u")).call_id for i in range(6)]
    assert await waiting(place) == calls
    assert await waiting(place, tenant="u") == calls[::2]
    assert await waiting(place, limit=2) == calls[:2]
    await decide(place, "deny", calls[0])
    assert await waiting(place) == calls[1:]


async def test_a_large_body_is_shown_from_an_object(place: Office) -> None:
    call = (await place.ask("pay", "k", filler="x" * 100_000)).call_id
    shown = (await place.show(call)).evidence[0]
    assert "body" not in shown
    assert shown["request"]["body"]["size"] > 100_000


# --- gateways that die ------------------------------------------------------------------------------------

TOML = """
url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0

[gateway]
name = "g1"

[callees.pay]
kind = "openai"
effect = "money"
base_url = "{callee}"
timeout_s = 5.0
max_output_tokens = 50
free = true
approval = true
"""


@pytest.mark.parametrize("point", ["approval-asked", "approval-decided"])
async def test_the_wait_and_the_decision_outlive_a_kill(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, point: str
) -> None:
    """Killed right after either is stored: waiting is still listed, the decision still counts; one call is made."""
    callee = CalleeProcess(tmp_path)
    (tmp_path / "headrace.toml").write_text(TOML.format(url=nats_server.url, callee=callee.url))
    gateway = Part("gateway", tmp_path)
    body = {"messages": [{"role": "user", "content": "hi"}], "id": "k"}
    request = {"callee": "pay", "body": body, "tenant": "t", "agent": "a", "key": "k", "wait_s": 1.0}
    call = call_id("t", "a", "k")

    def command(*words: str, code: int = 0) -> Any:
        done = subprocess.run(
            [*HEADRACE, *words, "--dir", str(tmp_path), "--json"], env=clean_environment(),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    async def answer() -> CallAnswer | None:
        try:
            return msgspec.json.decode(await call_api(mesh, "call", request, timeout_s=3.0), type=CallAnswer)
        except HeadraceError:
            return None

    try:
        gateway.start(crash_at=point)
        await gateway.ready()
        first = await answer()
        if point == "approval-decided":
            assert first is not None
            assert first.state == "awaiting_approval"
            with pytest.raises(HeadraceError):
                await call_api(mesh, "calls.approve", {"call": call}, timeout_s=3.0)
        assert await gateway.died(20) == -signal.SIGKILL, gateway.tail()
        gateway.start()
        await gateway.ready()
        if point == "approval-asked":
            listed = await asyncio.to_thread(command, "calls", "list", "--state", "awaiting_approval")
            assert [(line["call"], line["state"]) for line in listed] == [(call, "awaiting_approval")]
            await asyncio.to_thread(command, "calls", "approve", call, "--why", "fine")

        async def completed() -> bool:
            said = await answer()
            return said is not None and said.state == "completed"

        await until(completed, 60)
        assert len(callee.entries()) == 1
        assert await asyncio.to_thread(command, "calls", "list", "--state", "awaiting_approval") == []
    finally:
        gateway.kill()
        callee.stop()
