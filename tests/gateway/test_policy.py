"""The policy at real gateways: who is let through, what waits, and that a refusal leaves nothing but a decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import InvalidInput
from headrace.gateway.keys import call_id
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import count_subject
from headrace.mesh.settings import Settings, load_settings
from tests.gateway.office import Office, office, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def place(mesh: Mesh, settings: Settings, tmp_path: Path) -> AsyncIterator[Office]:
    async with office(mesh, settings, tmp_path) as made:
        yield made


def rules(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"policy": {"rules": list(rules), **more}}


# --- who ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "asked", "allowed"),
    [
        ({"tenant": "t"}, {}, True),
        ({"tenant": "other"}, {}, False),
        ({"agent": "a"}, {}, True),
        ({"agent": "pay*"}, {"agent": "payer"}, True),
        ({"agent": "pay*"}, {"agent": "a"}, False),
        ({"callee": "llm"}, {}, True),
        ({"callee": "tool"}, {}, False),
        ({"model": "small*"}, {"model": "small-1"}, True),
        ({"model": "small*"}, {"model": "large-1"}, False),
        ({"effect": "cost_bearing"}, {}, True),
        ({"effect": "money"}, {}, False),
        ({"tenant": "t", "agent": "a", "callee": "llm", "model": "m"}, {"model": "m"}, True),
    ],
)
def test_what_a_rule_fits(rule: dict[str, Any], asked: dict[str, Any], *, allowed: bool) -> None:
    from headrace.contracts.calls import CallMessage
    from headrace.gateway.callees import Callee, read_body
    from headrace.gateway.gate import fits
    from headrace.gateway.records import Asked
    from headrace.mesh.callee_settings import CalleeSettings, PolicyRule

    raw = msgspec.Raw(msgspec.json.encode({"messages": [], "model": asked.get("model", "x")}))
    message = CallMessage(request="r", callee="llm", body=raw, tenant="t", agent=asked.get("agent", "a"))
    callee = Callee("llm", CalleeSettings(kind="openai", effect="cost_bearing"))
    one = Asked(message, callee, read_body(callee, raw), "c", "0" * 64)
    assert fits(msgspec.convert({"action": "allow", **rule}, PolicyRule), one) is allowed


async def test_the_first_rule_decides_and_what_none_names_is_denied(place: Office) -> None:
    """A refused call: a decision in the evidence, and no key burned, no record, no money, no dial."""
    policy = rules(
        {"action": "deny", "agent": "bad*", "why": "it was told to stop"},
        {"action": "allow", "tenant": "t", "callee": "llm"},
        {"action": "deny", "callee": "llm"},
    )
    callees = {"llm": place.declared(), "tool": place.declared(kind="http", effect="read")}
    await place.open(callees=callees, **policy)
    assert (await place.ask("llm", "k1")).state == "completed"
    for asked in ({"agent": "bad-1"}, {"tenant": "other"}, {"callee": "tool"}):
        agent, tenant = asked.get("agent", "a"), asked.get("tenant", "t")
        answer = await place.ask(asked.get("callee", "llm"), "k2", agent=agent, tenant=tenant)
        assert (answer.state, answer.held_micro, answer.attempt) == ("refused", 0, 0), asked
        assert answer.error is not None
        assert answer.error["type"] == "denied"
        call = call_id(tenant, agent, "k2")
        found = await place.evidence(call, tenant)
        assert [e.kind for e in found] == ["rejected"]
        assert await count_subject(place.mesh, "HR_LEDGER", f"hr.ledger.call.{tenant}.{call}") == 0
        assert (await place.api("calls.show", {"call": call, "tenant": tenant}, dict[str, Any]))[
            "state"
        ] == "refused"
    told = await place.ask("llm", "k3", agent="bad-1")
    assert told.error is not None
    assert "it was told to stop" in told.error["message"]
    assert [e["call"] for e in place.callee.entries()] == ["k1"]
    # The key is not burned: whoever may, calls with it, and with any body.
    assert (await place.ask("llm", "k2", extra="another body")).state == "completed"


async def test_without_rules_everything_is_allowed_and_a_default_can_be_said(place: Office) -> None:
    one = await place.open(callees={"llm": place.declared()})
    assert (await place.ask("llm", "k1")).state == "completed"
    await one.stop()
    await place.open(callees={"llm": place.declared()}, **rules(default="deny"))
    assert (await place.ask("llm", "k2")).state == "refused"
    again = await place.ask("llm", "k1")
    assert (again.state, again.replayed) == ("completed", True)  # what is on record may be read


def test_rules_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for policy, named in (
        ('[[policy.rules]]\naction = "allow"\ncallee = "typo"', "typo"),
        ('[[policy.rules]]\naction = "deny"\ncalls_per_min = 5', "limits"),
        ('[policy]\nredact = ["("]', "regular expression"),
        ('[[policy.rules]]\naction = "allow"\nagnet = "a"', "agnet"),
    ):
        (tmp_path / "headrace.toml").write_text(policy)
        with pytest.raises(InvalidInput, match=named):
            load_settings(tmp_path, need_url=False, environ={})


# --- how much -------------------------------------------------------------------------------------------


async def test_a_call_that_may_take_too_many_tokens_is_refused(place: Office) -> None:
    policy = rules({"action": "allow", "max_tokens_per_call": 500})
    unbounded = place.declared()
    del unbounded["max_output_tokens"]
    await place.open(callees={"llm": place.declared(), "unbounded": unbounded}, **policy)
    assert (await place.ask("llm", "k1")).state == "completed"
    for callee, body in (("llm", {"max_tokens": 450}), ("llm", {"filler": "x" * 500}), ("unbounded", {})):
        answer = await place.ask(callee, "k2", **body)
        assert answer.state == "refused"
        assert answer.error is not None
        assert answer.error["type"] == "token_limit"
    assert len(place.callee.entries()) == 1


async def test_rates_of_a_rule_make_calls_wait_and_count_each_agent_by_itself(place: Office) -> None:
    """Two at once, then one in 0.6 s: a third waits in the queue without an intent, another agent does not."""
    policy = rules({"action": "allow", "calls_per_min": 2.0, "agent": "s*"}, {"action": "allow"})
    await place.open(callees={"llm": place.declared()}, **policy)
    for key in ("k1", "k2"):
        assert (await place.ask("llm", key, agent="s1")).state == "completed"
    third = await place.ask("llm", "k3", agent="s1", wait_s=0.5)
    assert third.state == "in_progress"
    assert await count_subject(place.mesh, "HR_LEDGER", f"hr.ledger.call.t.{third.call_id}") == 0
    assert await count_subject(place.mesh, "HR_CALLS", "hr.calls.t.s1") == 1
    assert (await place.ask("llm", "k4", agent="s2")).state == "completed"
    assert (await place.ask("llm", "k5")).state == "completed"
    assert [e["call"] for e in place.callee.entries()] == ["k1", "k2", "k4", "k5"]


async def test_a_waiting_call_is_made_once_its_rate_allows(place: Office) -> None:
    policy = rules({"action": "allow", "calls_per_min": 60.0, "per": "tenant"})
    await place.open(callees={"llm": place.declared()}, **policy)
    began = time.monotonic()
    answers = await asyncio.gather(
        *(place.ask("llm", f"k{i}", agent=f"a{i % 7}", wait_s=60.0) for i in range(64))
    )
    assert {a.state for a in answers} == {"completed"}
    assert time.monotonic() - began > 3.0  # 60 at once, and four more at one a second
    assert len(place.callee.entries()) == 64


async def test_tokens_that_were_not_needed_are_given_back(place: Office) -> None:
    """Each may take some 200 tokens and takes 15: twenty of them fit into 1,000 a minute one after the other."""
    policy = rules({"action": "allow", "tokens_per_min": 1_000})
    await place.open(callees={"llm": place.declared()}, **policy)
    for i in range(20):
        assert (await place.ask("llm", f"k{i}", wait_s=10.0)).state == "completed"


# --- one callee is not in the way of another -------------------------------------------------------------


async def test_a_callee_at_its_limit_does_not_block_the_others(place: Office) -> None:
    """Two hanging callees with all places taken, a hundred more waiting for them: others are answered meanwhile."""
    callees = {
        "slow": place.declared(concurrency=8),
        "slower": place.declared(concurrency=8, rate_per_s=20.0),
        "quick": place.declared(),
    }
    await place.open(callees=callees, gateway={"concurrency": 8}, grace_s=0.2)
    hanging = [
        asyncio.create_task(place.ask(name, f"{name}{i}", wait_s=0.5, behave="hangs"))
        for i in range(60)
        for name in ("slow", "slower")
    ]
    await asyncio.gather(*hanging)
    for i in range(20):
        answer = await place.ask("quick", f"q{i}", wait_s=15.0)
        assert answer.state == "completed"
    heard = [e["call"] for e in place.callee.entries()]
    assert sum(c.startswith("slow") and not c.startswith("slower") for c in heard) == 8
    assert sum(c.startswith("slower") for c in heard) == 8


async def test_a_callee_is_never_given_more_than_it_takes_and_all_get_their_turn(place: Office) -> None:
    await place.open(callees={"llm": place.declared(concurrency=2)}, gateway={"concurrency": 16})
    answers = await asyncio.gather(
        *(place.ask("llm", f"k{i}", wait_s=60.0, behave="late", delay=0.05) for i in range(60))
    )
    assert {a.state for a in answers} == {"completed"}
    entries = place.callee.entries()
    assert len({e["call"] for e in entries}) == len(entries) == 60
    # Of any three that began after one another the first had ended before the third began.
    began = sorted(e["at"] for e in entries)
    assert all(third - first > 0.04 for first, third in zip(began, began[2:], strict=False))


async def test_a_rate_spaces_the_calls_of_a_gateway(place: Office) -> None:
    await place.open(callees={"llm": place.declared(rate_per_s=20.0)})
    await asyncio.gather(*(place.ask("llm", f"k{i}", wait_s=60.0) for i in range(30)))
    began = sorted(e["at"] for e in place.callee.entries())
    assert len(began) == 30
    assert began[-1] - began[0] > 29 / 20.0 * 0.9


async def test_a_gateway_that_stops_gives_back_what_waits(place: Office) -> None:
    callees = {"llm": place.declared(concurrency=1)}
    first = await place.open(callees=callees)
    asking = [
        asyncio.create_task(place.ask("llm", f"k{i}", wait_s=4.0, behave="late", delay=0.2))
        for i in range(12)
    ]

    async def heard() -> bool:
        return bool(place.callee.entries())

    await until(heard)
    second = await place.open(callees=callees)
    await first.stop()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    done = [a for a in answers if isinstance(a, CallAnswer)]
    assert all(a.state in ("completed", "in_progress") for a in done)

    async def all_made() -> bool:
        return len(place.callee.entries()) == 12

    await until(all_made)
    assert len({e["call"] for e in place.callee.entries()}) == 12
    assert second.failure is None


async def test_a_callee_that_asks_to_be_left_alone_holds_no_place(place: Office) -> None:
    """Its retry-after of seven seconds is spent in the queue, on record; meanwhile the only place serves others."""
    callees = {"busy": place.declared(max_attempts=2), "quick": place.declared()}
    await place.open(callees=callees, gateway={"concurrency": 1})
    waits = await place.ask("busy", "k", wait_s=0.5, behave="429")
    assert waits.state == "in_progress"
    assert (await place.ask("quick", "q")).state == "completed"
    assert (
        await place.ask("busy", "k", wait_s=0.5, behave="429")
    ).state == "in_progress"  # asking is no way around it
    assert [e["call"] for e in place.callee.entries()] == ["k", "q"]

    async def tried_again() -> bool:
        return len(place.callee.entries()) == 3

    await until(tried_again)
    at = {e["at"] for e in place.callee.entries() if e["call"] == "k"}
    assert max(at) - min(at) > 6.5
    assert (await place.ask("busy", "k", behave="429")).state == "failed"
