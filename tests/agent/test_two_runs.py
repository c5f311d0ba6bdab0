"""Two runs of one agent at once: the later one takes over, and nothing that the older one does counts any more."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from headrace.agent import Agent, Context
from headrace.agent.book import Book
from headrace.agent.errors import Fenced
from headrace.agent.service import AgentService
from headrace.contracts.errors import Conflict, Refused
from headrace.contracts.mail import AgentState
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import call, consumer_info
from headrace.mesh.settings import Settings
from tests.agent.world import hosting, is_empty, send, state_of, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def test_the_older_run_is_fenced_and_its_work_dropped(mesh: Mesh, settings: Settings) -> None:
    """The older run is in the middle of a handler when the later one takes over."""
    started, go_on = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    def agent(run: str) -> Agent:
        made = Agent("one")

        @made.on("x")
        async def x(ctx: Context[dict[str, str]]) -> None:
            ran.append(run)
            if run == "older":
                started.set()
                await go_on.wait()
            ctx.state["by"] = run
            ctx.send("other", "heard", run)

        return made

    other = Agent("other")

    @other.on("heard")
    async def heard(ctx: Context[dict[str, int]], msg: str) -> None:
        ctx.state[msg] = ctx.state.get(msg, 0) + 1

    older = AgentService(settings, [agent("older")])
    await older.start()
    async with hosting(settings, other):
        await send(mesh, "one", "x")
        await started.wait()
        async with hosting(settings, agent("later")):
            go_on.set()
            await until(older.stopping.is_set, "the older one ends")
            await older.stop()
            assert isinstance(older.failure, Fenced)
            await until(lambda: is_empty(mesh, "one"), "handled")
            await until(lambda: is_empty(mesh, "other"), "handled")
            assert ran == ["older", "later"]
            record = await state_of(mesh, "one")
            assert record is not None
            assert bytes(record.state) == b'{"by":"later"}'
            record = await state_of(mesh, "other")
            assert record is not None
            assert bytes(record.state) == b'{"later":1}'


async def test_writes_of_two_books(mesh: Mesh) -> None:
    first, second = Book(mesh, "a", "run-1"), Book(mesh, "a", "run-2")
    began_ms = time.time_ns() // 1_000_000
    version = (await first.take_over()).version
    assert version >= began_ms, "an agent whose records are lost numbers its mails higher than before"
    assert (await first.commit(lambda r: msgspec.structs.replace(r, stopped=True))).version == version + 1
    taken = await second.take_over()
    assert (taken.owner, taken.stopped) == ("run-2", True)
    assert taken.version > version + 1
    with pytest.raises(Fenced):
        await first.commit(lambda r: r)
    with pytest.raises(Fenced):
        await first.commit(lambda r: r)
    assert (await second.commit(lambda r: r)).version == taken.version + 1
    assert (await first.take_over()).version > taken.version + 1


async def test_a_lost_ack_of_a_commit_is_settled_by_reading(mesh: Mesh) -> None:
    """What is stored, though its PubAck never came, is our own write, and not another run's."""
    book = Book(mesh, "a", "run-1")
    await book.take_over()
    record = await book.commit(lambda r: r)
    book.seq -= 1  # as after a publish whose answer was lost: the broker is one record ahead
    book.record = msgspec.structs.replace(record, version=record.version - 1)
    again = await book.commit(lambda r: r)
    assert again.version == record.version
    assert (await book.commit(lambda r: r)).version == record.version + 1


async def test_many_changes_at_once_are_written_one_after_another(mesh: Mesh) -> None:
    book = Book(mesh, "a", "run-1")
    before = await book.take_over()

    def add(n: int):
        def change(record: AgentState) -> AgentState:
            return msgspec.structs.replace(record, recent=[*record.recent, str(n)])

        return change

    await asyncio.gather(*(book.commit(add(n)) for n in range(50)))
    record = await state_of(mesh, "a")
    assert record is not None
    assert record.recent == [str(n) for n in range(50)]
    assert record.version == before.version + 50


async def test_a_record_too_large_is_refused_and_changes_nothing(mesh: Mesh, settings: Settings) -> None:
    agent = Agent("big", state=dict, max_tries=1)

    @agent.on("grow")
    async def grow(ctx: Context[dict[str, str]], msg: int) -> None:
        ctx.state["x"] = "y" * msg

    book = Book(mesh, "other", "run-1")
    await book.take_over()
    with pytest.raises(Refused, match="has 1"):
        await book.commit(
            lambda r: msgspec.structs.replace(r, state=msgspec.Raw(b'"%b"' % (b"y" * 1_100_000)))
        )
    async with hosting(settings, agent):
        await send(mesh, "big", "grow", 1_100_000)
        await send(mesh, "big", "grow", 3)
        await until(lambda: is_empty(mesh, "big"), "handled")
        record = await state_of(mesh, "big")
        assert record is not None
        assert bytes(record.state) == b'{"x":"yyy"}'


async def test_a_mailbox_that_leases_several_at_once_is_refused(mesh: Mesh, settings: Settings) -> None:
    agent = Agent("one")
    async with hosting(settings, agent):
        pass
    config = (await consumer_info(mesh, mesh.topology.mail, "one-work"))["config"]
    body = {"stream_name": mesh.topology.mail, "config": config | {"max_ack_pending": 5}, "action": "update"}
    await call(mesh, f"CONSUMER.CREATE.{mesh.topology.mail}.one-work.{config['filter_subject']}", body)
    with pytest.raises(Conflict, match="order would not hold"):
        async with hosting(settings, agent):
            pass
