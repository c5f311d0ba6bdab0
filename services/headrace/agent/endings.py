"""Mails that will not be handled: whoever waits is told, somebody may be asked for help, and the mail is kept."""

from __future__ import annotations

import logging
from typing import Final

import msgspec
from msgspec import Raw

from headrace.agent.agent import Agent
from headrace.agent.outbox import tell
from headrace.contracts.errors import HeadraceError
from headrace.contracts.mail import (
    ESCALATION,
    Escalation,
    Mail,
    MailError,
    MailReply,
    Notice,
    NoticeKind,
    ReturnAddress,
)
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery
from headrace.mesh.mail import Post, derived_id, keep_reply, now_us
from headrace.mesh.settle import Reject, Settler

log = logging.getLogger("headrace.agent")

MAX_ESCALATED: Final = 256 << 10
"""A larger body is left out of an escalation: the dead letter has it."""


def origin_of(mail: Mail) -> ReturnAddress:
    """Whom the answer to a mail is for."""
    return ReturnAddress(
        mail=mail.id, agent=mail.reply_to, request=mail.request, deadline_us=mail.deadline_us
    )


class Endings:
    """Ends mails for one agent. Each step may be repeated after a crash: ids derive from the mail's."""

    def __init__(self, mesh: Mesh, agent: Agent, post: Post, settler: Settler) -> None:
        self._mesh = mesh
        self._agent = agent
        self._post = post
        self._settler = settler

    async def die(
        self,
        delivery: Delivery,
        mail: Mail,
        error: MailError,
        *,
        kind: NoticeKind,
        origin: ReturnAddress | None,
        detail: str = "",
    ) -> None:
        """Tell, escalate, and store it among the dead letters, from where it can be redriven.

        `detail` is for the operator alone.
        """
        await self.tell(mail, error, kind=kind, origin=origin, tries=delivery.delivered)
        await self._escalate(mail, error, delivery.delivered)
        await self._settler.settle(delivery, Reject(f"{error.code}: {detail or error.message}"))

    async def tell(
        self, mail: Mail, error: MailError, *, kind: NoticeKind, origin: ReturnAddress | None, tries: int = 0
    ) -> None:
        """Tell whoever waits for an answer, else whoever sent it as work. Of notices and answers nobody is told."""
        to = origin or origin_of(mail)
        if to.request is not None:
            reply = MailReply(
                request=to.request,
                agent=self._agent.name,
                error=MailError(code=error.code, message=error.message),
                conversation=mail.conversation or mail.id,
                task=mail.task,
                at_us=now_us(),
            )
            await keep_reply(self._mesh, reply)
        agent = to.agent or (mail.sender if mail.lane == "work" and to.request is None else None)
        if agent is None:
            return
        notice = Notice(mail=to.mail, to=self._agent.name, kind=mail.kind, error=error, tries=tries)
        body = Raw(msgspec.json.encode(notice))
        await tell(self._mesh, self._post, self._mail(mail, agent, kind, body, lane="reply", re=to.mail))

    async def _escalate(self, mail: Mail, error: MailError, tries: int) -> None:
        to = self._agent.escalate_to
        if to is None or mail.kind == ESCALATION:
            return
        escalation = Escalation(
            agent=self._agent.name,
            mail=mail.id,
            sender=mail.sender,
            kind=mail.kind,
            error=error,
            tries=tries,
            body=mail.body if len(bytes(mail.body)) <= MAX_ESCALATED else Raw(b"null"),
        )
        body = Raw(msgspec.json.encode(escalation))
        # A person's mailbox has no consumer before somebody looks into it.
        await tell(
            self._mesh,
            self._post,
            self._mail(mail, to, ESCALATION, body, lane="work", re=mail.id),
            unknown_ok=True,
        )

    def _mail(self, mail: Mail, to: str, kind: str, body: Raw, *, lane: str, re: str) -> Mail:
        return msgspec.structs.replace(
            mail,
            id=derived_id("notice", self._agent.name, mail.id, kind),
            to=to,
            sender=self._agent.name,
            kind=kind,
            body=body,
            lane=lane,
            conversation=mail.conversation or mail.id,
            hops=mail.hops + 1,
            seq=0,
            in_reply_to=re,
            reply_to=None,
            request=None,
            deadline_us=None,
            created_us=now_us(),
        )


def failure(error: BaseException) -> MailError:
    """What others may know of an exception: our own errors say what they say, of others only the kind is told."""
    if isinstance(error, HeadraceError):
        code = error.code if error.code.replace("_", "").isalnum() else "error"
        return MailError(code=code[:64].lower(), message=str(error)[:2_000])
    return MailError(code="handler_failed", message=f"the handler raised {type(error).__name__}")
