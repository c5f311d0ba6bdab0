"""Agents of a test in the test's own process, and what was sent, kept and given up, as the broker has it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from msgspec import Raw

from headrace.agent.agent import Agent
from headrace.agent.service import AgentService
from headrace.contracts import codec
from headrace.contracts.mail import AgentState, Mail
from headrace.contracts.messages import DeadLetter
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import consumer_info, count_subject, last_message
from headrace.mesh.mail import new_id, now_us, send_mail
from headrace.mesh.settings import Settings
from headrace.mesh.tail import read_all

PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def hosting(settings: Settings, *agents: Agent) -> AsyncIterator[AgentService]:
    """A host of `agents` within the block."""
    service = AgentService(settings, agents)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Return what `condition` gives (awaited if need be) once it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(0.02)


def mail(to: str, kind: str, body: Any = None, **more: Any) -> Mail:
    """A mail from outside."""
    fields: dict[str, Any] = {"id": new_id(), "sender": "tester", "created_us": now_us()} | more
    return Mail(to=to, kind=kind, body=Raw(msgspec.json.encode(body)), **fields)


async def send(mesh: Mesh, to: str, kind: str, body: Any = None, **more: Any) -> Mail:
    """Send a mail from outside."""
    sent = mail(to, kind, body, **more)
    await send_mail(mesh, sent)
    return sent


async def state_of(mesh: Mesh, agent: str) -> AgentState | None:
    """What an agent has committed."""
    stored = await last_message(mesh, mesh.topology.agents, mesh.subjects.agent_state(agent))
    return None if stored is None else codec.AGENT_STATE.decode(stored.data, stored.headers)


async def dead_letters(mesh: Mesh) -> list[DeadLetter]:
    """All of them, in order."""
    found: list[DeadLetter] = []
    async for batch in read_all(mesh, mesh.topology.dead, "hr.dead.>"):
        found += [codec.DEAD_LETTER.decode(m.data, m.headers) for m in batch]
    return found


async def waiting(mesh: Mesh, agent: str) -> int:
    """Mails of an agent that are not acked."""
    return await count_subject(mesh, mesh.topology.mail, mesh.subjects.mail_of(agent))


async def leased(mesh: Mesh, agent: str, lane: str = "work") -> int:
    """Mails of a lane that are delivered and not acked."""
    return int((await consumer_info(mesh, mesh.topology.mail, f"{agent}-{lane}"))["num_ack_pending"])


async def is_empty(mesh: Mesh, agent: str) -> bool:
    """Whether every mail of an agent is acked."""
    return await waiting(mesh, agent) == 0
