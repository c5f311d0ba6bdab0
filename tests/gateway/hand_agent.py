"""An agent by hand: its mailbox, its card, and a loop that answers. Nothing of the agents' own code is in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw

from headrace.contracts import codec
from headrace.contracts.agents import (
    MAILBOX_EXTENSION,
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentLimits,
    AgentSkill,
    Mailbox,
)
from headrace.contracts.mail import Mail, MailError, MailReply
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import BatchConsumer
from headrace.mesh.directory import put_card
from headrace.mesh.jsapi import call
from headrace.mesh.mail import keep_reply
from headrace.mesh.settle import Settler

Answer = Callable[[Mail], Awaitable[Any]]


def card(name: str, *kinds: str) -> AgentCard:
    """The card of an agent that takes `kinds`."""
    limits = AgentLimits(max_tries=5, max_hops=64, mailbox_messages=100, ack_wait_s=5.0)
    mailbox = Mailbox(lanes=["work", "control", "reply"], kinds={k: {} for k in kinds}, limits=limits)
    return AgentCard(
        name=name,
        description=f"{name} by hand",
        version="1",
        supported_interfaces=[AgentInterface(url=f"nats:hr.api.agents.prompt.{name}")],
        capabilities=AgentCapabilities(extensions=[AgentExtension(uri=MAILBOX_EXTENSION, params=mailbox)]),
        skills=[AgentSkill(id=k, name=k, description=k) for k in kinds],
    )


async def open_mailbox(mesh: Mesh, name: str) -> None:
    """The consumers of an agent's lanes."""
    for lane in ("work", "control", "reply"):
        spec = mesh.topology.mail_consumer(name, lane)
        body = {"stream_name": spec.stream, "config": spec.config(), "action": "create"}
        await call(mesh, f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}", body)


@contextlib.asynccontextmanager
async def hand_agent(mesh: Mesh, name: str, answer: Answer, *kinds: str) -> AsyncIterator[list[Mail]]:
    """An agent that answers while the block lasts; what it got stands in the list."""
    await open_mailbox(mesh, name)
    await put_card(mesh, card(name, *(kinds or ("prompt",))))
    got: list[Mail] = []
    consumer = BatchConsumer(mesh, mesh.topology.mail_consumer(name, "work"), batch=1, wait_s=0.0)
    settler = Settler(mesh)

    async def run() -> None:
        await consumer.start()
        async for batch in consumer:
            for delivery in batch:
                mail = codec.MAIL.decode(delivery.data, delivery.headers)
                got.append(mail)
                said: dict[str, Any]
                try:
                    said = {"body": Raw(msgspec.json.encode(await answer(mail)))}
                except ValueError as e:
                    said = {"error": MailError(code="failed", message=str(e))}
                if mail.request is not None:
                    await keep_reply(mesh, MailReply(request=mail.request, agent=name, **said))
                await settler.ack_all([delivery])
            consumer.release(batch)

    task = asyncio.ensure_future(run())
    try:
        yield got
    finally:
        await consumer.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
