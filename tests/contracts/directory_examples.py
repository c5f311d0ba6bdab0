"""Examples of how agents are found and asked, for the golden bytes."""

from __future__ import annotations

from typing import Any

from headrace.contracts import codec
from headrace.contracts.agents import (
    MAILBOX_EXTENSION,
    Accepted,
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentLimits,
    AgentPresence,
    AgentSkill,
    Mailbox,
)

AT = 1_764_547_200_000_000
URL = "nats:hr.api.agents.prompt.planner"
LIMITS = AgentLimits(max_tries=5, max_hops=64, mailbox_messages=10_000, ack_wait_s=30.0)

EXAMPLES: dict[str, tuple[codec.Schema[Any], Any]] = {
    "agent-card-1": (
        codec.AGENT_CARD,
        AgentCard(
            name="planner",
            description="Splits documents into questions",
            version="2",
            supported_interfaces=[
                AgentInterface(url=URL, protocol_binding="HTTP+JSON", protocol_version="1.1")
            ],
            capabilities=AgentCapabilities(
                streaming=True,
                push_notifications=True,
                extensions=[
                    AgentExtension(
                        uri=MAILBOX_EXTENSION,
                        description="mailbox",
                        required=True,
                        params=Mailbox(
                            lanes=["work", "control", "reply"],
                            kinds={"document": {"type": "object"}},
                            limits=LIMITS,
                            escalate_to="person",
                        ),
                    )
                ],
            ),
            skills=[
                AgentSkill(
                    id="document",
                    name="document",
                    description="Split a document",
                    tags=["text"],
                    examples=["Split this"],
                    input_modes=["text/plain"],
                    output_modes=["text/plain"],
                )
            ],
            default_input_modes=["application/json"],
            default_output_modes=["text/plain"],
        ),
    ),
    "agent-card-1.small": (
        codec.AGENT_CARD,
        AgentCard(
            name="a",
            description="",
            version="1",
            supported_interfaces=[AgentInterface(url=URL)],
            capabilities=AgentCapabilities(extensions=[]),
            skills=[],
        ),
    ),
    "agent-presence-1": (
        codec.AGENT_PRESENCE,
        AgentPresence(agent="a", life="l", at_us=AT, host="h", pid=7, started_us=AT - 1, stopped=True),
    ),
    "agent-presence-1.small": (codec.AGENT_PRESENCE, AgentPresence(agent="a", life="l", at_us=AT)),
    "accepted-1": (
        codec.ACCEPTED,
        Accepted(request="r", agent="a", mail="m", fingerprint="0" * 64, at_us=AT),
    ),
}
