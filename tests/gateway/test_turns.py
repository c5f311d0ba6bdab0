"""Lines at callees and buckets of rules by themselves: who comes when, and that nothing is taken and not given back."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from headrace.contracts.calls import CallMessage
from headrace.contracts.errors import Refused
from headrace.gateway.callees import Callee, read_body
from headrace.gateway.limits import LONGEST_S, Limits
from headrace.gateway.records import Asked
from headrace.gateway.turns import LINE, Turns
from headrace.gateway.way import NotYet
from headrace.mesh.callee_settings import CalleeSettings, PolicyRule

pytestmark = pytest.mark.anyio


def a_callee(name: str = "llm", **settings: object) -> Callee:
    return Callee(name, msgspec.convert({"kind": "openai", "effect": "read", **settings}, CalleeSettings))


def asked(call: str = "c", agent: str = "a", tenant: str = "t", max_tokens: int = 100) -> Asked:
    raw = Raw(msgspec.json.encode({"messages": [], "max_tokens": max_tokens}))
    callee = a_callee()
    message = CallMessage(request=call, callee="llm", body=raw, tenant=tenant, agent=agent)
    return Asked(message, callee, read_body(callee, raw), call, "0" * 64)


async def test_a_line_is_first_come_first_served_and_bounded() -> None:
    turns, callee = Turns(most_waiting=1_000), a_callee(concurrency=LINE)
    frees = [await turns.take(callee, ("t", f"at{i}")) for i in range(LINE)]
    order: list[int] = []

    async def wait(i: int) -> None:
        free = await turns.take(callee, ("t", f"w{i}"))
        order.append(i)
        free()

    tasks = [asyncio.create_task(wait(i)) for i in range(LINE)]
    await asyncio.sleep(0)
    assert (turns.at_callees, turns.waiting) == (LINE, LINE)
    with pytest.raises(NotYet):
        await turns.take(callee, ("t", "one too many"))
    other = await turns.take(a_callee("other"), ("t", "x"))  # it is in nobody else's way
    other()
    frees[0]()
    frees[0]()  # giving back twice gives one place
    await asyncio.gather(*tasks)
    assert order == list(range(LINE))
    for free in frees:
        free()
    assert (turns.at_callees, turns.waiting) == (0, 0)


async def test_lines_together_are_bounded_too() -> None:
    turns = Turns(most_waiting=2)
    for name in ("a", "b"):
        await turns.take(a_callee(name, concurrency=1), ("t", name))
    waiting = [
        asyncio.create_task(turns.take(a_callee(n, concurrency=1), ("t", f"w{n}"))) for n in ("a", "b")
    ]
    await asyncio.sleep(0)
    third = a_callee("c", concurrency=1)
    await turns.take(third, ("t", "c1"))  # who need not wait takes no room
    with pytest.raises(NotYet):
        await turns.take(third, ("t", "c2"))
    turns.close()
    for task in waiting:
        with pytest.raises(NotYet):
            await task


async def test_a_new_call_does_not_pass_by_those_that_were_sent_back() -> None:
    turns, callee = Turns(most_waiting=100), a_callee(concurrency=2)
    frees = [await turns.take(callee, ("t", f"at{i}")) for i in range(2)]
    waiting = [asyncio.create_task(turns.take(callee, ("t", f"w{i}"))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(NotYet):
        await turns.take(callee, ("t", "sent back"))
    frees[0]()
    await waiting[0]
    with pytest.raises(NotYet):  # there is room in the line, for whoever was there before
        await turns.take(callee, ("t", "new"))
    back = asyncio.create_task(turns.take(callee, ("t", "sent back")))
    await asyncio.sleep(0)
    assert turns.waiting == 2
    for task in (waiting[1], back):
        frees.pop()()
        frees.append(await task)


async def test_one_who_leaves_the_line_takes_no_place() -> None:
    turns, callee = Turns(most_waiting=100), a_callee(concurrency=1)
    free = await turns.take(callee, ("t", "a"))
    leaves = asyncio.create_task(turns.take(callee, ("t", "b")))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    free()
    (await turns.take(callee, ("t", "c")))()
    assert turns.at_callees == 0


def rule(**fields: object) -> PolicyRule:
    return msgspec.convert({"action": "allow", **fields}, PolicyRule)


def taken(limits: Limits, one: PolicyRule, call: Asked) -> bool:
    delay_s = 0.0
    try:
        limits.take(0, one, call)
    except NotYet as e:
        delay_s = e.later.delay_s
    assert delay_s <= LONGEST_S * 1.1
    return delay_s == 0


@pytest.mark.parametrize(
    ("per", "others"), [("agent", (True, True)), ("tenant", (False, True)), ("rule", (False, False))]
)
def test_whom_a_rate_counts(per: str, others: tuple[bool, bool]) -> None:
    limits, one = Limits(lambda: 0.0), rule(calls_per_min=1.0, per=per)
    assert taken(limits, one, asked("c1"))
    assert not taken(limits, one, asked("c2"))
    assert (taken(limits, one, asked("c3", agent="b")), taken(limits, one, asked("c4", tenant="u"))) == others


def test_what_was_not_made_or_not_needed_is_given_back() -> None:
    limits, one = Limits(lambda: 0.0), rule(calls_per_min=2.0, tokens_per_min=1_000)
    limits.take(0, one, asked("c1", max_tokens=600))()
    limits.take(0, one, asked("c1", max_tokens=600))
    assert not taken(limits, one, asked("c2", max_tokens=600))
    limits.used("t", "c1", 10)
    assert taken(limits, one, asked("c2", max_tokens=600))
    limits.used("t", "c2", None)  # nobody knows: all of it is gone
    assert not taken(limits, one, asked("c3", max_tokens=100))  # and so are the two calls of this minute
    with pytest.raises(Refused):
        limits.take(0, rule(tokens_per_min=100), asked("c4", max_tokens=101))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 300), st.sampled_from(["made", "undone"])), max_size=60
    )
)
def test_never_more_than_a_bucket_and_what_flows_into_it(steps: list[tuple[float, int, str]]) -> None:
    now, through = 0.0, 0
    limits, one = Limits(lambda: now), rule(tokens_per_min=600)
    for i, (pause, tokens, end) in enumerate(steps):
        now += pause
        call = asked(f"c{i}", max_tokens=tokens)
        try:
            give_back = limits.take(0, one, call)
        except NotYet:
            continue
        if end == "undone":
            give_back()
        else:
            limits.used("t", f"c{i}", None)
            through += call.body.input_tokens + tokens
        assert through <= 600 + 10.0 * now + 1e-6
