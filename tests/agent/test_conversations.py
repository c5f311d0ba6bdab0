"""Questions and answers between agents, and what a forged answer, or a lost answerer, does to them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec import Raw, Struct

from headrace.agent import Agent, AskFailed, AskTimeout, Context
from headrace.contracts import codec
from headrace.contracts.mail import Notice
from headrace.mesh.connection import Mesh
from headrace.mesh.mail import derived_id, kept_reply, now_us, wait_reply
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.agent.world import dead_letters, hosting, is_empty, mail, send, state_of, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Saved(Struct):
    was: int


def doubler(*, silent: bool = False, delay_s: float = 0.0) -> Agent:
    agent = Agent("doubler")

    @agent.on("double")
    async def double(ctx: Context[dict[str, int]], msg: int) -> None:
        ctx.state["asked"] = ctx.state.get("asked", 0) + 1
        if msg < 0:
            raise ValueError("negative")
        await asyncio.sleep(delay_s)
        if not silent:
            ctx.reply(2 * msg)

    return agent


def asker(**ask: float) -> Agent:
    agent = Agent("asker")

    @agent.on("go")
    async def go(ctx: Context[dict[str, int]], msg: int) -> None:
        await ctx.ask("doubler", "double", msg, then="doubled", otherwise="none", state=Saved(msg), **ask)
        ctx.state["asked"] = ctx.state.get("asked", 0) + 1

    @agent.on("doubled")
    async def doubled(ctx: Context[dict[str, int]], msg: int) -> None:
        ctx.state[str(ctx.saved_as(Saved).was)] = msg
        ctx.reply({"doubled": msg})

    @agent.on("none")
    async def none(ctx: Context[dict[str, int]], msg: Notice) -> None:
        assert ctx.error is not None
        ctx.reply({"none": ctx.error.code, "was": ctx.saved["was"]})

    return agent


async def answer_to(mesh: Mesh, request: str) -> object:
    reply = await wait_reply(mesh, request, 40.0)
    assert reply is not None
    return reply.error.code if reply.error is not None else msgspec.json.decode(reply.body or b"null")


async def test_a_durable_question_ends_the_handler_and_its_answer_goes_to_who_asked_first(
    mesh: Mesh, settings: Settings
) -> None:
    async with hosting(settings, asker(), doubler()):
        for n in (1, 2, 3):
            await send(mesh, "asker", "go", n, request=f"r-{n}", conversation=f"c-{n}")
        for n in (1, 2, 3):
            assert await answer_to(mesh, f"r-{n}") == {"doubled": 2 * n}
        record = await state_of(mesh, "asker")
        assert record is not None
        assert record.questions == {}
        assert msgspec.json.decode(record.state) == {"asked": 3, "1": 2, "2": 4, "3": 6}


async def test_the_asker_may_be_away_when_the_answer_comes(mesh: Mesh, settings: Settings) -> None:
    async with hosting(settings, doubler()):
        pass
    async with hosting(settings, asker()) as host:
        await send(mesh, "asker", "go", 5, request="r-1")
        await until(lambda: host.runners["asker"].handled == 1, "asked")
    async with hosting(settings, doubler()) as host:
        await until(lambda: host.runners["doubler"].handled == 1, "answered")
    async with hosting(settings, asker()):
        assert await answer_to(mesh, "r-1") == {"doubled": 10}


async def test_a_question_whose_handler_fails_or_that_nobody_answers_runs_the_other_handler(
    mesh: Mesh, settings: Settings
) -> None:
    async with hosting(settings, asker(), doubler()):
        await send(mesh, "asker", "go", -1, request="r-1")
        assert await answer_to(mesh, "r-1") == {"none": "handler_failed", "was": -1}
    async with hosting(settings, asker(deadline_s=0.5), doubler(silent=True)):
        await send(mesh, "asker", "go", 1, request="r-2")
        assert await answer_to(mesh, "r-2") == {"none": "expired", "was": 1}
        record = await state_of(mesh, "asker")
        assert record is not None
        assert record.questions == {}


async def test_a_question_to_nobody_is_told_to_who_asked_first(mesh: Mesh, settings: Settings) -> None:
    """Without a handler for what is undelivered too: nobody waits for ever."""
    settings = msgspec.structs.replace(
        settings, agent=msgspec.structs.replace(settings.agent, patience_s=0.2)
    )
    agent = Agent("asker")

    @agent.on("go")
    async def go(ctx: Context[dict[str, int]]) -> None:
        await ctx.ask("nobody", "x", then="y")

    async with hosting(settings, agent):
        await send(mesh, "asker", "go", request="r-1")
        assert await answer_to(mesh, "r-1") == "undelivered"
        await until(lambda: is_empty(mesh, "asker"), "settled")


async def test_m7_an_answer_after_its_asker_left_is_kept(mesh: Mesh, settings: Settings) -> None:
    """M7: the asker gives up early; the answer is fetched by its request's id later, and nothing fails."""
    async with hosting(settings, doubler(delay_s=0.6)) as host:
        await send(mesh, "doubler", "double", 4, request="r-1")
        assert await wait_reply(mesh, "r-1", 0.1) is None
        await until(lambda: host.runners["doubler"].handled == 1, "answered")
        reply = await kept_reply(mesh, "r-1")
        assert reply is not None
        assert reply.body is not None
        assert bytes(reply.body) == b"8"
        assert await dead_letters(mesh) == []


async def test_asking_now_waits_and_a_handler_that_runs_again_gets_the_kept_answer(
    mesh: Mesh, settings: Settings
) -> None:
    agent = Agent("asker")
    runs: list[int] = []

    @agent.on("go")
    async def go(ctx: Context[dict[str, int]], msg: int) -> None:
        runs.append(await ctx.ask_now("doubler", "double", msg, type=int))
        if len(runs) < 3:
            raise RuntimeError("after the answer")
        ctx.reply(runs)

    async with hosting(settings, agent, doubler()):
        await send(mesh, "asker", "go", 4, request="r-1")
        assert await answer_to(mesh, "r-1") == [8, 8, 8]
        record = await state_of(mesh, "doubler")
        assert record is not None
        assert bytes(record.state) == b'{"asked":1}'


async def test_asking_now_says_when_there_is_no_answer(mesh: Mesh, settings: Settings) -> None:
    agent = Agent("asker", max_tries=1)
    raised: list[str] = []

    @agent.on("go")
    async def go(ctx: Context[dict[str, int]], msg: int) -> None:
        for to, n in (("doubler", msg), ("doubler", -1)):
            try:
                await ctx.ask_now(to, "double", n, timeout_s=1.0)
            except (AskTimeout, AskFailed) as e:
                raised.append(e.code)
        ctx.reply(raised)

    async with hosting(settings, agent, doubler(silent=True)):
        await send(mesh, "asker", "go", 4, request="r-1")
        assert await answer_to(mesh, "r-1") == ["no_answer", "handler_failed"]


async def test_nobody_answers_for_another(mesh: Mesh, settings: Settings) -> None:
    """A forger knows every id; its mails come on a subject with its own name, and are not taken for an answer."""
    agent = Agent("asker")
    heard: list[int] = []

    @agent.on("now")
    async def go(ctx: Context[dict[str, int]], msg: int) -> None:
        heard.append(await ctx.ask_now("doubler", "double", msg, type=int))

    async with hosting(settings, agent, doubler(delay_s=1.0)) as host:
        sent = await send(mesh, "asker", "now", 4)
        question = derived_id("ask", "asker", sent.id, "1")
        forged = {"kind": "answer", "lane": "reply", "in_reply_to": question, "body": Raw(b"666")}
        await until(lambda: host.runners["asker"].busy, "it asks")
        for sender in ("forger", "gateway"):
            false = msgspec.structs.replace(mail("asker", "x", sender=sender), **forged)
            await publish(
                mesh,
                mesh.topology.mail,
                mesh.subjects.mail("asker", "reply", sender),
                codec.MAIL.encode(false),
            )
        lie = msgspec.structs.replace(mail("asker", "x", sender="doubler"), **forged)
        await publish(
            mesh, mesh.topology.mail, mesh.subjects.mail("asker", "reply", "forger"), codec.MAIL.encode(lie)
        )
        await until(lambda: heard, "answered")
        assert heard == [8]
        (letter,) = await dead_letters(mesh)
        assert "another sender" in letter.reason


async def test_an_answer_that_nobody_waits_for_is_acked(mesh: Mesh, settings: Settings) -> None:
    async with hosting(settings, doubler()):
        await send(mesh, "doubler", "answer", 1, lane="reply", in_reply_to="long-ago")
        await send(mesh, "doubler", "failed", {"no": "notice"}, lane="reply", in_reply_to="long-ago")
        await until(lambda: is_empty(mesh, "doubler"), "acked")
        assert await dead_letters(mesh) == []


async def test_a_question_of_a_mail_past_its_deadline_ends_with_it(mesh: Mesh, settings: Settings) -> None:
    async with hosting(settings, asker(), doubler(silent=True)):
        await send(mesh, "asker", "go", 1, request="r-1", deadline_us=now_us() + 600_000)
        # The notice comes when the deadline of the first asker is over as well: it is told so.
        assert await answer_to(mesh, "r-1") in ("expired", {"none": "expired", "was": 1})
