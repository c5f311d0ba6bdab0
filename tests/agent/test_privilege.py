"""Agents with users of least privilege, as `deploy/agents-permissions.conf` has them: each is itself and no other."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from headrace.agent import Agent, Context
from headrace.agent.service import open_mailbox
from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.mail import Mail
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer
from headrace.mesh.directory import list_cards, who_is_there
from headrace.mesh.mail import kept_reply, new_id, send_mail
from headrace.mesh.provision import provision
from headrace.mesh.publisher import publish
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from headrace.mesh.wire import OutMessage
from tests.agent.world import hosting, send, state_of, until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


def authorization() -> str:
    """The snippet as it is deployed, with its one user made two."""
    text = (ROOT / "deploy/agents-permissions.conf").read_text("utf-8")
    text = re.sub(r"\$HEADRACE_\w+_PASSWORD", "secret", text)
    start, end = text.index("    { user: A,"), text.index("    } }") + len("    } }\n")
    user = text[start:end]
    return text[:start] + user + re.sub(r"\bA\b", "B", user) + text[end:]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path / "nats", durability="relaxed", extra_config=authorization())
    made.start()
    yield made
    made.kill()


@pytest.fixture
def admin_settings(server: NatsServer, tmp_path: Path) -> Settings:
    return Settings(
        url=server.url,
        dir=str(tmp_path),
        durability="relaxed",
        ack_wait_s=2.0,
        user="admin",
        password="secret",
    )


@pytest.fixture
async def admin(admin_settings: Settings) -> AsyncIterator[Mesh]:
    async with await Mesh.connect(admin_settings, name="admin") as mesh:
        await provision(mesh)
        for agent in ("A", "B"):
            await open_mailbox(mesh, agent)
        yield mesh


def as_user(settings: Settings, user: str) -> Settings:
    return msgspec.structs.replace(settings, user=user)


def agent(name: str, friend: str) -> Agent:
    made = Agent(name)

    @made.on("start")
    async def start(ctx: Context[dict[str, Any]], msg: dict[str, Any]) -> None:
        ctx.state["started"] = True
        ctx.record("started", msg)
        await ctx.ask(friend, "question", {"n": 1}, then="told")

    @made.on("question")
    async def question(ctx: Context[dict[str, Any]], msg: dict[str, Any]) -> None:
        ctx.reply({"n": msg["n"] + 1})

    @made.on("told")
    async def told(ctx: Context[dict[str, Any]], msg: dict[str, Any]) -> None:
        ctx.state["told"] = msg
        ctx.reply(msg)

    return made


async def test_m11_agents_of_least_privilege_do_all_that_agents_do(
    admin: Mesh, admin_settings: Settings
) -> None:
    async with (
        hosting(as_user(admin_settings, "A"), agent("A", "B")),
        hosting(as_user(admin_settings, "B"), agent("B", "A")),
    ):
        await send(admin, "A", "start", {"x": 1}, request="r", sender="operator")
        reply = await until(lambda: kept_reply(admin, "r"), "the answer over both agents")
        assert msgspec.json.decode(reply.body) == {"n": 2}
        state = await state_of(admin, "A")
        assert state is not None
        assert msgspec.json.decode(state.state) == {"started": True, "told": {"n": 2}}
        await until(lambda: mail_is_gone(admin), "everything is acked")
        assert [card.name for card in await list_cards(admin)] == ["A", "B"]
        assert set(await who_is_there(admin)) == {"A", "B"}
        await until(lambda: captured(admin), "records of both")
    # A second life reads its own state, which it may.
    async with hosting(as_user(admin_settings, "A"), agent("A", "B")) as service:
        assert msgspec.json.decode(service.runners["A"].record.state) == {"started": True, "told": {"n": 2}}


async def mail_is_gone(mesh: Mesh) -> bool:
    return await jsapi.count_subject(mesh, "HR_MAIL", "hr.mail.>") == 0


async def captured(mesh: Mesh) -> bool:
    info = await jsapi.stream_info(mesh, "HR_CAPTURE", subjects_filter="hr.capture.>")
    return {subject.split(".")[2] for subject in info["state"]["subjects"]} == {"A", "B"}


FOREIGN = {
    "pull its mail": ("$JS.API.CONSUMER.MSG.NEXT.HR_MAIL.B-work", b'{"batch":1,"expires":200000000}'),
    "pull its control lane": (
        "$JS.API.CONSUMER.MSG.NEXT.HR_MAIL.B-control",
        b'{"batch":1,"expires":200000000}',
    ),
    "read the stream of mail": ("$JS.API.STREAM.MSG.GET.HR_MAIL", b'{"seq":1}'),
    "read the stream directly": ("$JS.API.DIRECT.GET.HR_MAIL", b'{"seq":1}'),
    "read its mail by subject": ("$JS.API.DIRECT.GET.HR_MAIL.hr.mail.B.work.A", b""),
    "make a consumer": ("$JS.API.CONSUMER.CREATE.HR_MAIL", b'{"stream_name":"HR_MAIL","config":{}}'),
    "remove its consumer": ("$JS.API.CONSUMER.DELETE.HR_MAIL.B-work", b""),
    "purge its mail": ("$JS.API.STREAM.PURGE.HR_MAIL", b'{"filter":"hr.mail.B.>"}'),
    "read its state": ("$JS.API.DIRECT.GET.HR_AGENTS.hr.agents.state.B", b""),
    "read any state": ("$JS.API.STREAM.MSG.GET.HR_AGENTS", b'{"last_by_subj":"hr.agents.state.B"}'),
}


@pytest.mark.parametrize("what", FOREIGN)
async def test_m11_an_agent_may_not(admin: Mesh, admin_settings: Settings, what: str) -> None:
    await send(admin, "B", "note", {}, sender="operator")
    await publish(admin, "HR_AGENTS", "hr.agents.state.B", b"{}")
    async with await Mesh.connect(as_user(admin_settings, "A"), name="agent-A") as mesh:
        subject, body = FOREIGN[what]
        with pytest.raises(Unavailable) as refused:
            await mesh.request(subject, body, timeout_s=3.0)
        assert refused.value.code == "denied"
    info = await jsapi.consumer_info(admin, "HR_MAIL", "B-work")
    assert (info["num_pending"], info["num_ack_pending"], info["delivered"]["consumer_seq"]) == (1, 0, 0)


async def test_m11_an_agent_may_not_ack_what_another_one_holds(admin: Mesh, admin_settings: Settings) -> None:
    await send(admin, "B", "note", {}, sender="operator")
    async with await Mesh.connect(as_user(admin_settings, "B"), name="agent-B") as b:
        got: list[Delivery] = []
        consumer = PullConsumer(b, b.topology.mail_consumer("B", "work"), got.append)
        await consumer.start()
        consumer.ask(1)
        await until(lambda: got, "B holds its mail")
        held = got[0]
        async with await Mesh.connect(as_user(admin_settings, "A"), name="agent-A") as a:
            for word in (b"+ACK", b"+TERM", b"-NAK"):
                await a.publish(OutMessage(held.reply, word))
            await a.flush()
            info = await jsapi.consumer_info(admin, "HR_MAIL", "B-work")
            assert (info["num_ack_pending"], info["ack_floor"]["stream_seq"]) == (1, 0)
        await b.publish(OutMessage(held.reply, b"+ACK"))  # its owner may
        await b.flush()
        await until(lambda: mail_is_gone(admin), "the ack of the owner counts")
        await consumer.stop()


async def test_m11_an_agent_may_not_speak_as_another(admin: Mesh, admin_settings: Settings) -> None:
    before = await counts(admin)
    as_b = Mail(id=new_id(), to="B", sender="B", kind="note", body=Raw(b"1"))
    control = Mail(id=new_id(), to="B", sender="A", kind="stop", lane="control", body=Raw(b"{}"))
    async with await Mesh.connect(as_user(admin_settings, "A"), name="agent-A") as mesh:
        for mail in (as_b, control):
            with pytest.raises(HeadraceError):
                await send_mail(mesh, mail, unknown_ok=True, timeout_s=1.0)
        for subject in (
            "hr.mail.B.work.operator", "hr.agents.state.B", "hr.capture.B.run", "hr.calls.default.B", "$KV.HR_cards.B",
            "$KV.HR_presence.B", "hr.replies.r.accepted", "hr.ledger.call.t.c",
        ):  # fmt: skip
            await mesh.publish(OutMessage(subject, b"{}"))
        await mesh.flush()
    assert await counts(admin) == before


async def counts(mesh: Mesh) -> dict[str, int]:
    return {
        s.name: (await jsapi.stream_info(mesh, s.name))["state"]["last_seq"] for s in mesh.topology.streams()
    }


async def test_m11_a_sender_that_the_subject_does_not_name_is_believed_by_nobody(
    admin: Mesh, admin_settings: Settings
) -> None:
    """A may write any body: the subject is what counts, and a body that says otherwise is a dead letter."""
    got: list[str] = []
    made = Agent("B")

    @made.on("note")
    async def note(ctx: Context[dict[str, Any]], msg: Any) -> None:
        got.append(ctx.message.sender)

    lie = Mail(id=new_id(), to="B", sender="operator", kind="note", body=Raw(b"1"))
    async with hosting(as_user(admin_settings, "B"), made):
        async with await Mesh.connect(as_user(admin_settings, "A"), name="agent-A") as mesh:
            await publish(mesh, "HR_MAIL", "hr.mail.B.work.A", codec.MAIL.encode(lie))
            await send_mail(mesh, Mail(id=new_id(), to="B", sender="A", kind="note", body=Raw(b"2")))
        await until(lambda: got == ["A"], "the honest one is handled")
        await until(lambda: dead(admin), "the other one is kept")
    assert got == ["A"]


async def dead(mesh: Mesh) -> bool:
    return await jsapi.count_subject(mesh, "HR_DEAD", "hr.dead.>") == 1


async def test_m11_an_agent_does_not_hear_what_is_delivered_to_another(
    admin: Mesh, admin_settings: Settings
) -> None:
    async with await Mesh.connect(as_user(admin_settings, "A"), name="agent-A") as mesh:
        heard: list[str] = []
        for subject in ("_INBOX.agent-B.>", "_INBOX.>", "hr.mail.>", "hr.mail.B.work.*", "$JS.ACK.>"):
            await mesh.subscribe(subject, heard.append)
        await mesh.flush()
        done: list[str] = []
        made = Agent("B")

        @made.on("note")
        async def note(ctx: Context[dict[str, Any]], msg: Any) -> None:
            done.append(ctx.message.id)

        async with hosting(as_user(admin_settings, "B"), made):
            await send(admin, "B", "note", {}, sender="operator")
            await until(lambda: done, "B got it")
            await until(lambda: mail_is_gone(admin), "and acked it")
        await mesh.flush()
        assert heard == []
