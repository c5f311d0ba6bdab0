"""M5: what died is handled when it is redriven, though later mails of its sender went by meanwhile."""

from __future__ import annotations

import pytest

from headrace.agent import Agent, Context
from headrace.mesh.connection import Mesh
from headrace.mesh.mail import now_us
from headrace.mesh.settings import Settings
from tests.agent.world import dead_letters, hosting, is_empty, send, state_of, until
from tests.completion.again import redrive
from tests.completion.world import error_of, serving

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


async def test_m5_a_redriven_mail_is_handled(mesh: Mesh, settings: Settings) -> None:
    """From an agent (which numbers its mails) and from outside (which does not); in vain first, then with success."""
    broken = True
    done: list[str] = []
    sender, agent = Agent("sender"), Agent("taker", max_tries=1)

    @sender.on("go")
    async def go(ctx: Context[dict[str, int]]) -> None:
        ctx.send("taker", "fragile", "from an agent")
        ctx.send("taker", "sound", "later")

    @agent.on("fragile")
    async def fragile(ctx: Context[dict[str, int]], msg: str) -> None:
        if broken:
            raise RuntimeError("not yet mended")
        done.append(msg)
        ctx.state[msg] = ctx.state.get(msg, 0) + 1

    @agent.on("sound")
    async def sound(ctx: Context[dict[str, int]], msg: str) -> None:
        done.append(msg)
        ctx.state[msg] = 1

    async with serving(settings), hosting(settings, sender, agent):
        await send(mesh, "sender", "go")
        await until(lambda: done == ["later"], "the later one is handled")
        await send(mesh, "taker", "fragile", "from outside", deadline_us=now_us() + 300_000)
        await until(lambda: is_empty(mesh, "taker"), "both are dead letters")
        assert len(await dead_letters(mesh)) == 2
        await until(lambda: _redriven(mesh, "1"), "the letter has landed and is redriven")
        await until(lambda: is_empty(mesh, "taker"), "dead again")
        assert len(await dead_letters(mesh)) == 3
        await until(
            lambda: _redriven(mesh, "2", again=False), "redriven"
        )  # its deadline is over: it is asked for all the same
        await until(lambda: is_empty(mesh, "taker"), "dead again")
        broken = False
        for id_ in ("1", "2"):
            assert (await redrive(mesh, id=id_, again=True)).redriven == 1
        await until(lambda: len(done) == 3, "both handled")
        assert done == ["later", "from an agent", "from outside"]
        await until(lambda: is_empty(mesh, "taker"), "acked")
        record = await state_of(mesh, "taker")
        assert record is not None
        assert bytes(record.state) == b'{"later":1,"from an agent":1,"from outside":1}'


async def _redriven(mesh: Mesh, id_: str, **more: bool) -> bool:
    try:
        return (await redrive(mesh, id=id_, **more)).redriven == 1
    except Exception as e:  # noqa: BLE001  (not landed yet)
        return "no dead" in str(e) and False


async def test_a_letter_that_names_no_mailbox_stays(mesh: Mesh, settings: Settings) -> None:
    from tests.completion.test_dead import letter

    async with serving(settings):
        for subject in ("hr.mail.a.work", "hr.mail.a.nolane.b", "hr.mail.a.work.b.c", "hr.mail.a.work.*"):
            await letter(mesh, subject, b"{}")
        await until(lambda: _landed(mesh, 4), "landed")
        for id_ in ("1", "2", "3", "4"):
            assert (await error_of(redrive(mesh, id=id_))).code == "foreign_subject"


async def _landed(mesh: Mesh, n: int) -> bool:
    from tests.completion.again import dead

    return len((await dead(mesh)).entries) == n
