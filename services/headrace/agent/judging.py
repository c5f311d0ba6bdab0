"""What is to become of a mail, before anything is done about it: run, ended, dead, or of no interest to anybody."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.agent.agent import Agent, Handler
from headrace.agent.endings import failure, origin_of
from headrace.agent.intake import is_redriven
from headrace.contracts.errors import Undecodable
from headrace.contracts.mail import (
    NOTICES,
    AgentState,
    Mail,
    MailError,
    NoticeKind,
    Question,
    ReturnAddress,
)
from headrace.mesh.consumer import Delivery


class Case(Struct, frozen=True, kw_only=True):
    """A mail in hand. `question` is the one of ours that it answers, `origin` whom our own answer is for."""

    delivery: Delivery
    mail: Mail
    question: Question | None
    origin: ReturnAddress | None
    redriven: bool


class Runs(Struct, frozen=True):
    """A handler takes it."""

    handler: Handler
    body: Any


class Ends(Struct, frozen=True):
    """Nobody wants it any more: whoever waits is told."""

    kind: NoticeKind
    why: str


class Dies(Struct, frozen=True, kw_only=True):
    """It can not be handled: a dead letter. `detail` is for the operator alone."""

    error: MailError
    kind: NoticeKind = "failed"
    detail: str = ""


class Unheard(Struct, frozen=True):
    """An answer that nobody waits for, or a notice that no handler wants."""


Verdict = Runs | Ends | Dies | Unheard


def case_of(agent: str, record: AgentState, delivery: Delivery, mail: Mail) -> Case:
    """What there is to know of a mail. An answer counts if it comes from whom was asked, or from us as a notice."""
    question = record.questions.get(mail.in_reply_to or "") if mail.lane == "reply" else None
    if question is not None and mail.sender not in (question.to, agent):
        question = None
    origin = question.origin if question is not None else origin_of(mail)
    return Case(
        delivery=delivery,
        mail=mail,
        question=question,
        origin=origin,
        redriven=is_redriven(delivery.headers),
    )


def judge(
    case: Case,
    agent: Agent,
    record: AgentState,
    *,
    max_tries: int,
    max_hops: int,
    last_error: str,
    at_us: int,
) -> Verdict:
    """The verdict on a mail at its delivery; `last_error` is that of its try before, if this run has seen it."""
    mail, question, cancelled = case.mail, case.question, record.cancelled
    kind = mail.kind
    if question is not None:
        kind = (question.otherwise or mail.kind) if mail.kind in NOTICES else question.then
    handler = agent.handlers.get(kind)
    if handler is None and mail.lane == "reply" and (question is None or mail.kind in NOTICES):
        return Unheard()
    if cancelled and (mail.id in cancelled or mail.conversation in cancelled):
        return Ends("cancelled", f"{agent.name} was told to give it up")
    if not case.redriven and mail.deadline_us is not None and at_us > mail.deadline_us:
        return Ends("expired", f"its deadline passed before {agent.name} could handle it")
    if mail.hops > max_hops and mail.kind not in NOTICES:
        why = f"{mail.hops} mails went before it, of at most {max_hops}: the conversation is ended"
        return Dies(error=MailError(code="hop_limit", message=why), kind="hop_limit")
    if handler is None:
        return Dies(error=MailError(code="no_handler", message=f"{agent.name} has no handler for {kind!r}"))
    if case.delivery.delivered > max_tries:
        why = f"given up after {max_tries} tries"
        detail = f"{why}; the last: {last_error or 'the process died, or its lease was over'}"
        return Dies(error=MailError(code="tries_exhausted", message=why), detail=detail)
    try:
        return Runs(handler, handler.read(mail.body))
    except Undecodable as e:
        return Dies(error=failure(e))
