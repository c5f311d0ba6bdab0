"""Cards and presence: what others see of an agent, what stays when it goes, and what nothing depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from headrace.agent import Agent, Context
from headrace.agent.cards import card_of
from headrace.contracts import codec
from headrace.contracts.errors import NotFound
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.directory import find_card, list_cards, put_card, remove_card, unknown_agent, who_is_there
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.agent.processes import crew
from tests.agent.world import hosting, send, state_of, until

pytestmark = pytest.mark.anyio


class Document(Struct):
    text: str
    pages: int = 1


def planner() -> Agent:
    made = Agent("planner", description="Splits documents", escalate_to="person", max_tries=2, version="7")

    @made.on("document")
    async def document(ctx: Context[dict[str, Any]], msg: Document) -> None:
        """Split a document into questions."""
        ctx.state["pages"] = msg.pages

    @made.on("anything")
    async def anything(ctx: Context[dict[str, Any]]) -> None:
        pass

    return made


async def test_a_card_says_what_an_agent_takes_and_bears(mesh: Mesh, settings: Settings) -> None:
    async with hosting(settings, planner()):
        card = await find_card(mesh, "planner")
        assert card is not None
        assert (card.name, card.description, card.version) == ("planner", "Splits documents", "7")
        assert [(s.id, s.description) for s in card.skills] == [
            ("anything", "takes 'anything'"),
            ("document", "Split a document into questions."),
        ]
        mailbox = card.mailbox
        assert mailbox is not None
        assert mailbox.kinds["anything"] == {}
        schema = mailbox.kinds["document"]
        assert schema["$defs"]["Document"]["required"] == ["text"]
        assert (mailbox.escalate_to, mailbox.limits.max_tries) == ("person", 2)
        assert mailbox.limits.mailbox_messages == settings.mailbox_messages
        await until(lambda: _is_there(mesh), "it says that it is there")
        assert (await who_is_there(mesh))["planner"].stopped is False
    # It has gone, and said so; its card and its mailbox stay.
    await until(lambda: _all_there(mesh, set()), "nobody is there")
    assert [c.name for c in await list_cards(mesh)] == ["planner"]
    await send(mesh, "planner", "document", {"text": "t", "pages": 3})
    async with hosting(settings, planner()):
        await until(lambda: _pages(mesh, 3), "what was sent meanwhile is handled")


async def _pages(mesh: Mesh, pages: int) -> bool:
    state = await state_of(mesh, "planner")
    return state is not None and msgspec.json.decode(state.state) == {"pages": pages}


async def test_losing_presence_and_card_deletes_nothing(mesh: Mesh, settings: Settings) -> None:
    async with hosting(settings, planner()):
        await until(lambda: _is_there(mesh), "it has said that it is there")
        for bucket in ("HR_presence", "HR_cards"):
            assert await jsapi.purge(mesh, f"KV_{bucket}", filter_=f"$KV.{bucket}.>") == 1
        assert await list_cards(mesh) == []
        await send(mesh, "planner", "document", {"text": "t", "pages": 4})
        await until(lambda: _pages(mesh, 4), "it works all the same")
        await until(lambda: _is_there(mesh), "and says again that it is there")


async def _all_there(mesh: Mesh, names: set[str]) -> bool:
    return set(await who_is_there(mesh)) == names


async def _is_there(mesh: Mesh) -> bool:
    return "planner" in await who_is_there(mesh)


async def test_a_killed_agent_is_forgotten_by_itself(mesh: Mesh, nats_server: Any, tmp_path: Path) -> None:
    with crew(nats_server, tmp_path / "crew", ("sink",)) as (host,):
        await host.restart()
        if host.code is not None:
            pytest.fail(host.tail())
        names = {card.name for card in await list_cards(mesh)}
        assert names
        await until(lambda: _all_there(mesh, names), "all say that they are there")
        host.kill()
        info = await jsapi.stream_info(mesh, "KV_HR_presence")
        assert info["config"]["max_age"] == 15_000_000_000  # the broker's own clock does it
        assert {card.name for card in await list_cards(mesh)} == names


async def test_cards_are_written_when_they_change_and_read_when_they_can_be(
    mesh: Mesh, settings: Settings
) -> None:
    card = card_of(planner(), settings)
    assert await put_card(mesh, card) is True
    assert await put_card(mesh, card) is False
    await publish(mesh, "KV_HR_cards", "$KV.HR_cards.odd", b"{")
    assert await find_card(mesh, "odd") is None
    assert [c.name for c in await list_cards(mesh)] == ["planner"]
    error = await unknown_agent(mesh, "nobody")
    assert isinstance(error, NotFound)
    assert "planner" in str(error)
    await remove_card(mesh, "planner")
    assert await find_card(mesh, "planner") is None
    assert await list_cards(mesh) == []
    assert "none yet" in str(await unknown_agent(mesh, "nobody"))


def test_a_type_without_a_schema_takes_anything(settings: Settings) -> None:
    made = Agent("a")

    @made.on("k", body=Any)
    async def k(ctx: Context[dict[str, Any]], msg: Any) -> None:
        pass

    card = card_of(made, settings)
    assert card.mailbox is not None
    assert card.mailbox.kinds == {"k": {}}
    assert codec.AGENT_CARD.decode(codec.AGENT_CARD.encode(card)) == card
