"""What a running agent does with mail: order, answers, failures, endings. The broker is real, the agents are here."""

from __future__ import annotations

import asyncio
import itertools
import time

import msgspec
import pytest
from msgspec import Struct

from headrace.agent import Agent, Context, RetryLater
from headrace.contracts import codec
from headrace.contracts.codec import SCHEMA_HEADER
from headrace.contracts.errors import NotFound, Refused
from headrace.contracts.mail import Escalation, Notice
from headrace.mesh.connection import Mesh
from headrace.mesh.mail import now_us, send_mail, wait_reply
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.agent.world import dead_letters, hosting, is_empty, mail, send, state_of, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Number(Struct):
    n: int


class Numbers(Struct):
    seen: list[int] = []


def collector(name: str = "collector") -> Agent:
    """Keeps the numbers that it is sent, in its state."""
    agent = Agent(name, state=Numbers)

    @agent.on("number")
    async def number(ctx: Context[Numbers], msg: Number) -> None:
        ctx.state.seen.append(msg.n)

    @agent.on("total")
    async def total(ctx: Context[Numbers]) -> None:
        ctx.reply({"total": sum(ctx.state.seen)})

    return agent


async def numbers_of(mesh: Mesh, agent: str = "collector") -> list[int]:
    record = await state_of(mesh, agent)
    assert record is not None
    found = msgspec.json.decode(record.state, type=Numbers | None)
    return [] if found is None else found.seen


async def test_m1_a_stopped_agent_gets_a_hundred_in_order(mesh: Mesh, settings: Settings) -> None:
    """M1: started once so that it has a mailbox, stopped, sent to, started again."""
    async with hosting(settings, collector()):
        pass
    for n in range(100):
        await send(mesh, "collector", "number", {"n": n})
    async with hosting(settings, collector()) as host:
        await until(lambda: host.runners["collector"].handled == 100, "a hundred handled")
        assert await numbers_of(mesh) == list(range(100))
        await until(lambda: is_empty(mesh, "collector"), "all acked")


async def test_an_answer_is_kept_for_who_asked_from_outside(mesh: Mesh, settings: Settings) -> None:
    async with hosting(settings, collector()):
        for n in (1, 2, 3):
            await send(mesh, "collector", "number", {"n": n})
        await send(mesh, "collector", "total", request="r-1", conversation="c-1")
        reply = await wait_reply(mesh, "r-1", 40.0)
        assert reply is not None
        assert reply.body is not None
        assert msgspec.json.decode(reply.body) == {"total": 6}
        assert (reply.agent, reply.conversation, reply.error) == ("collector", "c-1", None)


async def test_m3_a_poison_message_dies_after_spaced_tries_and_the_others_are_done(
    mesh: Mesh, settings: Settings
) -> None:
    agent = collector()
    tries: list[float] = []

    @agent.on("poison")
    async def poison(ctx: Context[Numbers]) -> None:
        tries.append(time.monotonic())
        ctx.state.seen.append(-1)  # of no consequence, since it fails
        msg = "secret of the handler"
        raise ValueError(msg)

    async with hosting(settings, agent):
        for n in range(5):
            await send(mesh, "collector", "number", {"n": n})
            if n == 2:
                await send(mesh, "collector", "poison", request="r-poison")
        await until(lambda: is_empty(mesh, "collector"), "all settled")
        assert await numbers_of(mesh) == [0, 1, 2, 3, 4]
        assert len(tries) == settings.agent.message_tries
        gaps = [b - a for a, b in itertools.pairwise(tries)]
        assert all(gap >= settings.agent.retry_s * 0.9 for gap in gaps), gaps
        (letter,) = await dead_letters(mesh)
        assert letter.subject == "hr.mail.collector.work.tester"
        assert "ValueError: secret of the handler (after 3 tries)" in letter.reason
        reply = await wait_reply(mesh, "r-poison", 40.0)
        assert reply is not None
        assert reply.error is not None
        assert reply.error.code == "handler_failed"
        assert "secret" not in reply.error.message


async def test_m4_a_dependency_that_is_down_makes_no_dead_letter(mesh: Mesh, settings: Settings) -> None:
    """M4: it is down for longer than all tries would take, and is not counted as tries."""
    agent = collector()
    began = time.monotonic()
    runs: list[int] = []

    @agent.on("needs")
    async def needs(ctx: Context[Numbers]) -> None:
        runs.append(ctx.attempt)
        if time.monotonic() - began < 3.0:
            raise RetryLater("the dependency is down", delay_s=0.1)
        ctx.state.seen.append(7)

    async with hosting(settings, agent):
        await send(mesh, "collector", "needs", deadline_us=now_us() + 60_000_000)
        await send(mesh, "collector", "number", {"n": 8})
        await until(lambda: is_empty(mesh, "collector"), "all settled")
        assert await numbers_of(mesh) == [7, 8]
        assert set(runs) == {1}
        assert len(runs) > settings.agent.message_tries
        assert await dead_letters(mesh) == []


async def test_what_waits_for_a_dependency_ends_at_its_deadline(mesh: Mesh, settings: Settings) -> None:
    agent = collector()

    @agent.on("needs")
    async def needs(ctx: Context[Numbers]) -> None:
        raise RetryLater(delay_s=0.1)

    async with hosting(settings, agent):
        await send(mesh, "collector", "needs", deadline_us=now_us() + 700_000, request="r-1")
        reply = await wait_reply(mesh, "r-1", 40.0)
        assert reply is not None
        assert reply.error is not None
        assert reply.error.code == "expired"
        await until(lambda: is_empty(mesh, "collector"), "settled")


async def test_m6_a_full_mailbox_refuses_and_stop_goes_by(mesh: Mesh, settings: Settings) -> None:
    """M6: 150 to a mailbox of 100, then stop: 50 refusals, and stop is what is handled next."""
    async with hosting(settings, collector()):
        pass
    refused = 0
    await _bound(mesh, 100)
    for n in range(150):
        try:
            await send(mesh, "collector", "number", {"n": n})
        except Refused as e:
            refused += e.code == "mailbox_full"
    assert refused == 50
    await send(mesh, "collector", "number", {"n": -1}, sender="another")  # each sender has its own room
    await send(mesh, "collector", "stop", lane="control")
    async with hosting(settings, collector()) as host:
        await until(lambda: host.runners["collector"].record.stopped, "stopped")
        handled = host.runners["collector"].handled
        assert handled < 100
        await send(mesh, "collector", "resume", lane="control")
        await until(lambda: is_empty(mesh, "collector"), "all handled after it was resumed")
        assert await numbers_of(mesh) == [*range(100), -1]


async def _bound(mesh: Mesh, messages: int) -> None:
    from headrace.mesh.jsapi import call, stream_info

    config = (await stream_info(mesh, mesh.topology.mail))["config"]
    await call(mesh, f"STREAM.UPDATE.{mesh.topology.mail}", config | {"max_msgs_per_subject": messages})


async def test_stop_reaches_an_agent_under_a_full_backlog(mesh: Mesh, settings: Settings) -> None:
    agent = collector()

    @agent.on("slow")
    async def slow(ctx: Context[Numbers]) -> None:
        await asyncio.sleep(60)

    async with hosting(settings, agent) as host:
        runner = host.runners["collector"]
        await send(mesh, "collector", "slow")
        for n in range(300):
            await send(mesh, "collector", "number", {"n": n})
        await until(lambda: runner.give_up("no such mail", None) or runner.busy, "the slow one runs")
        began = time.monotonic()
        await send(mesh, "collector", "stop", {"grace_s": 0.0}, lane="control")
        await until(lambda: runner.record.stopped and not runner.busy, "stopped")
        took = time.monotonic() - began
        print(f"stopped after {took:.3f} s")
        assert (
            took < 30.0
        )  # one second is the goal, and the benchmark's to show; here other processes may be busy
        assert runner.handled == 0
    async with hosting(settings, agent) as host:
        assert host.runners["collector"].record.stopped, "a stop holds over restarts"


async def test_cancel_ends_the_running_mail_and_those_that_wait(mesh: Mesh, settings: Settings) -> None:
    agent = collector()
    started = asyncio.Event()

    @agent.on("slow")
    async def slow(ctx: Context[Numbers]) -> None:
        started.set()
        await asyncio.sleep(60)

    async with hosting(settings, agent):
        running = await send(mesh, "collector", "slow", request="r-1")
        queued = await send(mesh, "collector", "slow", request="r-2", conversation="c-2")
        await send(mesh, "collector", "number", {"n": 1})
        await started.wait()
        await send(mesh, "collector", "cancel", {"conversation": "c-2"}, lane="control")
        await send(mesh, "collector", "cancel", {"mail": running.id}, lane="control")
        for request in ("r-1", "r-2"):
            reply = await wait_reply(mesh, request, 40.0)
            assert reply is not None
            assert reply.error is not None
            assert reply.error.code == "cancelled", queued
        await until(lambda: is_empty(mesh, "collector"), "settled")
        assert await numbers_of(mesh) == [1]


async def test_m10_two_agents_that_answer_each_other_for_ever(mesh: Mesh, settings: Settings) -> None:
    """M10: the hop limit ends it, and says so: to whoever sent the last one, and in the dead letters."""
    settings = msgspec.structs.replace(settings, agent=msgspec.structs.replace(settings.agent, max_hops=12))
    told: list[Notice] = []
    seen: list[int] = []

    def player(name: str, other: str) -> Agent:
        agent = Agent(name)

        @agent.on("ball")
        async def ball(ctx: Context[dict[str, int]]) -> None:
            seen.append(ctx.message.hops)
            ctx.send(other, "ball")

        @agent.on("hop_limit", body=Notice)
        async def limit(ctx: Context[dict[str, int]], msg: Notice) -> None:
            told.append(msg)

        return agent

    async with hosting(settings, player("ping", "pong"), player("pong", "ping")):
        await send(mesh, "ping", "ball")
        await until(lambda: told, "told of the hop limit")
        assert seen == list(range(13))
        assert told[0].error.code == "hop_limit"
        letters = await dead_letters(mesh)
        assert len(letters) == 1
        assert "hop_limit" in letters[0].reason


async def test_what_is_past_its_deadline_is_not_handled_and_its_sender_is_told(
    mesh: Mesh, settings: Settings
) -> None:
    told: list[Notice] = []
    sender = Agent("sender")

    @sender.on("go")
    async def go(ctx: Context[dict[str, int]]) -> None:
        ctx.send("collector", "number", {"n": 1}, deadline_s=0.001)

    @sender.on("expired")
    async def expired(ctx: Context[dict[str, int]], msg: Notice) -> None:
        told.append(msg)

    async with hosting(settings, collector()):
        pass
    async with hosting(settings, sender):
        await send(mesh, "sender", "go")
        await until(lambda: _has(mesh, "collector"), "sent")
        async with hosting(settings, collector()):
            await until(lambda: told, "told")
            assert (told[0].kind, told[0].error.code) == ("number", "expired")
            assert await numbers_of(mesh) == []
            await until(lambda: is_empty(mesh, "collector"), "acked")


async def _has(mesh: Mesh, agent: str) -> bool:
    return not await is_empty(mesh, agent)


async def test_undecodable_mail_and_bodies_are_dead_letters_after_one_try(
    mesh: Mesh, settings: Settings
) -> None:
    async with hosting(settings, collector()):
        subject = mesh.subjects.mail("collector", "work", "tester")
        await publish(mesh, mesh.topology.mail, subject, b"not a mail")
        await publish(mesh, mesh.topology.mail, subject, b"{}", headers={SCHEMA_HEADER: "task/1"})
        await publish(
            mesh, mesh.topology.mail, subject, codec.MAIL.encode(mail("collector", "number", sender="x"))
        )
        await send(mesh, "collector", "number", {"n": "three"}, request="r-1")
        await send(mesh, "collector", "no-such-kind", request="r-2")
        await publish(mesh, mesh.topology.mail, mesh.subjects.mail("collector", "control", "tester"), b"[")
        await send(mesh, "collector", "explode", lane="control")
        await send(mesh, "collector", "number", {"n": 4})
        await until(lambda: is_empty(mesh, "collector"), "all settled")
        assert await numbers_of(mesh) == [4]
        letters = await dead_letters(mesh)
        assert len(letters) == 7
        assert [letter.tries for letter in letters] == [1] * 7
        reasons = " | ".join(letter.reason for letter in letters)
        for part in (
            "names another sender",
            "task/1",
            "`int`, got `str`",
            "no handler for 'no-such-kind'",
            "explode",
        ):
            assert part in reasons, reasons
        assert letters[0].data == b"not a mail"
        for request, code in (("r-1", "undecodable"), ("r-2", "no_handler")):
            reply = await wait_reply(mesh, request, 40.0)
            assert reply is not None
            assert reply.error is not None
            assert reply.error.code == code


async def test_mail_to_nobody_is_refused_outside_and_undelivered_inside(
    mesh: Mesh, settings: Settings
) -> None:
    settings = msgspec.structs.replace(
        settings, agent=msgspec.structs.replace(settings.agent, patience_s=0.3)
    )
    with pytest.raises(NotFound) as nobody:
        await send(mesh, "nobody", "x")
    assert nobody.value.code == "unknown_agent"
    told: list[Notice] = []
    agent = Agent("sender", state=Numbers)

    @agent.on("go")
    async def go(ctx: Context[Numbers]) -> None:
        ctx.send("nobody", "x", {"a": 1})
        ctx.send("sender", "number", {"n": 1})
        ctx.state.seen.append(0)

    @agent.on("number")
    async def number(ctx: Context[Numbers], msg: Number) -> None:
        ctx.state.seen.append(msg.n)

    @agent.on("undelivered")
    async def undelivered(ctx: Context[Numbers], msg: Notice) -> None:
        told.append(msg)

    async with hosting(settings, agent):
        await send(mesh, "sender", "go")
        await until(lambda: told, "told that it is undelivered")
        assert (told[0].to, told[0].error.code) == ("nobody", "unknown_agent")
        await until(lambda: is_empty(mesh, "sender"), "all handled")
        assert await numbers_of(mesh, "sender") == [0, 1]
        (letter,) = await dead_letters(mesh)
        assert letter.subject == "hr.mail.nobody.work.sender"
        assert codec.MAIL.decode(letter.data).kind == "x"


async def test_an_agent_waits_for_room_in_a_full_mailbox(mesh: Mesh, settings: Settings) -> None:
    """Its mails go in order, and none is lost or doubled."""
    sender = Agent("sender")

    @sender.on("go")
    async def go(ctx: Context[dict[str, int]]) -> None:
        for n in range(20):
            ctx.send("collector", "number", {"n": n})

    async with hosting(settings, collector()):
        pass
    await _bound(mesh, 5)
    async with hosting(settings, sender) as host:
        await send(mesh, "sender", "go")
        await until(lambda: _count(mesh, "collector", 5), "the mailbox is full")
        assert host.runners["sender"].handled == 0
        async with hosting(settings, collector()):
            await until(lambda: host.runners["sender"].handled == 1, "sent")
            await until(lambda: is_empty(mesh, "collector"), "handled")
            assert await numbers_of(mesh) == list(range(20))
    assert await dead_letters(mesh) == []


async def _count(mesh: Mesh, agent: str, n: int) -> bool:
    from tests.agent.world import waiting

    return await waiting(mesh, agent) == n


async def test_escalation_tells_another_agent_what_died(mesh: Mesh, settings: Settings) -> None:
    told: list[Escalation] = []
    chief = Agent("chief")

    @chief.on("escalation")
    async def escalated(ctx: Context[dict[str, int]], msg: Escalation) -> None:
        told.append(msg)

    agent = Agent("fragile", escalate_to="chief", max_tries=1)

    @agent.on("x")
    async def x(ctx: Context[dict[str, int]]) -> None:
        raise OSError("disk")

    async with hosting(settings, chief, agent):
        sent = await send(mesh, "fragile", "x", {"a": 1})
        await until(lambda: told, "escalated")
        assert (told[0].agent, told[0].mail, told[0].sender, told[0].kind) == (
            "fragile",
            sent.id,
            "tester",
            "x",
        )
        assert told[0].error.code == "handler_failed"
        assert told[0].body is not None
        assert msgspec.json.decode(told[0].body) == {"a": 1}


async def test_a_mail_that_is_sent_twice_is_handled_once(mesh: Mesh, settings: Settings) -> None:
    """By its id from outside, beyond what the stream itself recognises."""
    async with hosting(settings, collector()):
        sent = mail("collector", "number", {"n": 1})
        subject, data = mesh.subjects.mail("collector", "work", "tester"), codec.MAIL.encode(sent)
        for _ in range(3):
            await publish(mesh, mesh.topology.mail, subject, data)
        await send_mail(mesh, mail("collector", "number", {"n": 2}))
        await until(lambda: is_empty(mesh, "collector"), "handled")
        assert await numbers_of(mesh) == [1, 2]
    async with hosting(settings, collector()):
        await publish(mesh, mesh.topology.mail, subject, data)
        await until(lambda: is_empty(mesh, "collector"), "handled")
        assert await numbers_of(mesh) == [1, 2], "remembered over a restart"


async def test_a_handler_without_effects_writes_nothing(mesh: Mesh, settings: Settings) -> None:
    agent = collector()

    @agent.on("look")
    async def look(ctx: Context[Numbers]) -> None:
        ctx.record("looked", len(ctx.state.seen))

    async with hosting(settings, agent) as host:
        before = await state_of(mesh, "collector")
        for _ in range(5):
            await send(mesh, "collector", "look")
        await until(lambda: host.runners["collector"].handled == 5, "looked")
        assert await state_of(mesh, "collector") == before


async def test_a_state_that_does_not_fit_is_told_at_the_start(mesh: Mesh, settings: Settings) -> None:
    async with hosting(settings, collector()):
        await send(mesh, "collector", "number", {"n": 1})
        await until(lambda: is_empty(mesh, "collector"), "handled")

    class Other(Struct):
        seen: str

    with pytest.raises(Exception, match="does not fit Other"):
        async with hosting(settings, Agent("collector", state=Other)):
            pass
