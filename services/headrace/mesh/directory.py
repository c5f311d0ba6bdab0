"""Which agents there are: their cards, kept by name, and who runs now, for people to look at.

A card outlives its agent's process, and so does its mailbox. Presence is forgotten by the broker within seconds, and
losing it deletes nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Final

from headrace.contracts import codec
from headrace.contracts.agents import AgentCard, AgentPresence
from headrace.contracts.codec import SCHEMA_HEADER
from headrace.contracts.errors import HeadraceError, NotFound, Undecodable
from headrace.contracts.names import check_token
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import last_message
from headrace.mesh.publisher import publish
from headrace.mesh.tail import read_all
from headrace.mesh.wire import OutMessage, header_block

EVERY_S: Final = 5.0
"""How often presence is said; the broker keeps it three times as long."""
_SHOWN: Final = 20


async def put_card(mesh: Mesh, card: AgentCard) -> bool:
    """Make `card` the agent's card; False if it was already. Raise `Refused` if it is too large for the broker."""
    subject, stream = _card(mesh, card.name)
    data = codec.AGENT_CARD.encode(card)
    stored = await last_message(mesh, stream, subject)
    if stored is not None and stored.data == data:
        return False
    await publish(mesh, stream, subject, data, headers={SCHEMA_HEADER: codec.AGENT_CARD.name})
    return True


async def find_card(mesh: Mesh, agent: str) -> AgentCard | None:
    """The agent's card, None if there is none that can be read."""
    subject, stream = _card(mesh, agent)
    stored = await last_message(mesh, stream, subject)
    if stored is None or not stored.data:
        return None
    try:
        return codec.AGENT_CARD.decode(stored.data, stored.headers)
    except Undecodable:
        return None


async def remove_card(mesh: Mesh, agent: str) -> None:
    """Forget an agent's card; its mailbox stays."""
    subject, stream = _card(mesh, agent)
    await publish(mesh, stream, subject, b"", headers={"KV-Operation": "DEL"})


async def list_cards(mesh: Mesh) -> list[AgentCard]:
    """Every card, by name."""
    bucket = mesh.topology.cards_bucket
    found: dict[str, AgentCard] = {}
    async for batch in read_all(mesh, f"KV_{bucket}", f"$KV.{bucket}.>"):
        for m in batch:
            found.pop(m.subject, None)
            if m.data:
                try:
                    found[m.subject] = codec.AGENT_CARD.decode(m.data, m.headers)
                except Undecodable:
                    continue
    return sorted(found.values(), key=lambda card: card.name)


async def unknown_agent(mesh: Mesh, agent: str) -> NotFound:
    """The error of an agent that is not there, with those that are."""
    names = [card.name for card in await list_cards(mesh)]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    msg = f"no agent {agent!r}; known: {shown or 'none yet: start one with `headrace agent run`'}"
    return NotFound(msg, code="unknown_agent")


# --- presence ---------------------------------------------------------------------------------------


class Presence:
    """Says every few seconds that an agent runs. Nothing depends on it, so nothing of it is an error."""

    def __init__(self, mesh: Mesh, agent: str, *, life: str) -> None:
        self._mesh = mesh
        self._agent = check_token("agent", agent)
        self._life = life
        self._started_us = time.time_ns() // 1_000
        self.stopped = False

    async def run(self) -> None:
        """Say so for ever."""
        while True:
            await self.say()
            await asyncio.sleep(EVERY_S)

    async def say(self) -> None:
        """Say so once; never raises."""
        bucket = self._mesh.topology.presence_bucket
        data = codec.AGENT_PRESENCE.encode(
            AgentPresence(
                agent=self._agent,
                life=self._life,
                at_us=time.time_ns() // 1_000,
                host=socket.gethostname()[:256],
                pid=os.getpid(),
                started_us=self._started_us,
                stopped=self.stopped,
            )
        )
        headers = header_block({SCHEMA_HEADER: codec.AGENT_PRESENCE.name})
        if self._mesh.connected:
            try:
                await self._mesh.publish(OutMessage(f"$KV.{bucket}.{self._agent}", data, headers))
            except HeadraceError:
                return

    async def gone(self) -> None:
        """Say that it runs no more; never raises."""
        bucket = self._mesh.topology.presence_bucket
        headers = header_block({"KV-Operation": "DEL"})
        if self._mesh.connected:
            try:
                await self._mesh.publish(OutMessage(f"$KV.{bucket}.{self._agent}", b"", headers))
            except HeadraceError:
                return


async def who_is_there(mesh: Mesh) -> dict[str, AgentPresence]:
    """The running agents, as far as they said so in the last seconds."""
    bucket = mesh.topology.presence_bucket
    found: dict[str, AgentPresence] = {}
    async for batch in read_all(mesh, f"KV_{bucket}", f"$KV.{bucket}.>"):
        for m in batch:
            name = m.subject.rpartition(".")[2]
            found.pop(name, None)
            if m.data:
                try:
                    found[name] = codec.AGENT_PRESENCE.decode(m.data, m.headers)
                except Undecodable:
                    continue
    return found


def _card(mesh: Mesh, agent: str) -> tuple[str, str]:
    bucket = mesh.topology.cards_bucket
    return f"$KV.{bucket}.{check_token('agent', agent)}", f"KV_{bucket}"
