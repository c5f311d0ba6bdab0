"""An agent's card, made from what its author wrote: one skill for each handler, one schema for each kind."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.agent.agent import Agent, Handler
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
from headrace.contracts.subjects import Subjects
from headrace.mesh.settings import Settings


def card_of(agent: Agent, settings: Settings) -> AgentCard:
    """The card of `agent` as it runs with `settings`."""
    mailbox = Mailbox(
        lanes=["work", "control", "reply"],
        kinds={kind: schema_of(handler) for kind, handler in sorted(agent.handlers.items())},
        limits=AgentLimits(
            max_tries=agent.max_tries or settings.agent.message_tries,
            max_hops=settings.agent.max_hops,
            mailbox_messages=settings.mailbox_messages,
            ack_wait_s=settings.ack_wait_s,
        ),
        escalate_to=agent.escalate_to,
    )
    subject = Subjects(settings.prefix).api(f"agents.prompt.{agent.name}")
    return AgentCard(
        name=agent.name,
        description=agent.description[:2_048],
        version=agent.version[:256],
        supported_interfaces=[AgentInterface(url=f"nats:{subject}")],
        capabilities=AgentCapabilities(
            extensions=[
                AgentExtension(
                    uri=MAILBOX_EXTENSION,
                    params=mailbox,
                    description="kinds of message with the schemas of their bodies, lanes, limits",
                )
            ]
        ),
        skills=[_skill(handler) for _, handler in sorted(agent.handlers.items())],
    )


def schema_of(handler: Handler) -> dict[str, Any]:
    """JSON Schema of the bodies that a handler takes; `{}`, which takes anything, where its type has none."""
    if not handler.takes_body:
        return {}
    try:
        return msgspec.json.schema(handler.body_type)
    except (TypeError, msgspec.MsgspecError):
        return {}


def _skill(handler: Handler) -> AgentSkill:
    doc = handler.doc[:2_048]
    return AgentSkill(id=handler.kind, name=handler.kind, description=doc or f"takes {handler.kind!r}")
