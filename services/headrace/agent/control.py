"""The control lane: always read, whatever the agent is doing. What it says is committed, so it holds over restarts."""

from __future__ import annotations

import logging
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from headrace.agent.book import Change
from headrace.contracts.errors import Undecodable
from headrace.contracts.mail import CONTROL, MAX_CANCELLED, AgentState, ControlBody, Mail
from headrace.mesh.consumer import Delivery

log = logging.getLogger("headrace.agent")

_BODY: Final = msgspec.json.Decoder(ControlBody | None)


class Controlled(Protocol):
    """What can be controlled: a runner."""

    def halt_soon(self, grace_s: float) -> None:
        """Handle nothing more from now on."""
        ...

    async def resume(self) -> None:
        """Take mail again."""
        ...

    async def change(self, what: Change) -> AgentState:
        """Store a change of the state."""
        ...

    def give_up(self, mail: str | None, conversation: str | None) -> bool:
        """Cancel the running handler if it is about that."""
        ...


async def obey(agent: Controlled, mail: Mail, *, grace_s: float, longest_s: float) -> None:
    """Do what a control mail says. Doing it twice changes nothing. Raise `Undecodable` for what it cannot be.

    `grace_s` is how long a stopped handler may go on unless the mail says so, `longest_s` how long a paused one may.
    """
    if mail.kind not in CONTROL:
        raise Undecodable(f"the control lane knows {', '.join(CONTROL)}, and not {mail.kind!r}")
    try:
        body = _BODY.decode(mail.body) or ControlBody()
    except (msgspec.MsgspecError, ValueError) as e:
        raise Undecodable(f"the body of {mail.kind!r} is wrong: {str(e)[:200]}") from None
    log.info("control", extra={"agent": mail.to, "kind": mail.kind, "by": mail.sender, "why": body.why[:200]})
    if mail.kind == "cancel":
        names = [name for name in (body.mail, body.conversation) if name is not None]
        if not names:
            raise Undecodable("`cancel` has to name a mail or a conversation")
        await agent.change(lambda record: _cancelled(record, names))
        agent.give_up(body.mail, body.conversation)
    elif mail.kind == "resume":
        await agent.change(lambda record: replace(record, stopped=False))
        await agent.resume()
    else:
        stop_s = grace_s if body.grace_s is None else body.grace_s
        agent.halt_soon(stop_s if mail.kind == "stop" else longest_s)
        await agent.change(lambda record: replace(record, stopped=True))


def _cancelled(record: AgentState, names: list[str]) -> AgentState:
    others = [name for name in record.cancelled if name not in names]
    return replace(record, cancelled=[*others, *names][-MAX_CANCELLED:])


def is_control(delivery: Delivery) -> bool:
    """Whether a delivery came on a control lane."""
    return delivery.consumer.endswith("-control")
