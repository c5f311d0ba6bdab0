"""What an agent's history says of its mails."""

from __future__ import annotations

from typing import Any, Final

from headrace.agent.context import Context
from headrace.agent.hosting import Recorder
from headrace.agent.judging import Case
from headrace.contracts.mail import ANSWER
from headrace.mesh.tracing import trace_id

MAX_HOP: Final = 10_000


class History:
    """Notes what becomes of mails; never waits, as its recorder does not."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def note(self, case: Case, kind: str, data: dict[str, Any] | None = None) -> None:
        """`kind` happened to a mail."""
        mail = case.mail
        conversation = case.question.conversation if case.question is not None else mail.conversation
        self._recorder.record(
            conversation or mail.id,
            kind,
            {"attempt": case.delivery.delivered, "body": mail.body, **(data or {})},
            name=mail.kind,
            message=mail.id,
            peer=mail.sender,
            hop=min(mail.hops, MAX_HOP),
            trace_id=trace_id(mail.traceparent),
        )

    def note_sent(self, ctx: Context[Any]) -> None:
        """What a handler sent and answered is sent."""
        for reply in ctx.effects.replies:
            self._recorder.record(
                ctx.conversation,
                "replied",
                {"body": reply.body},
                message=ctx.message.id,
                peer=ctx.message.sender,
            )
        for mail in ctx.effects.mails:
            self._recorder.record(
                ctx.conversation,
                "replied" if mail.kind == ANSWER else "sent",
                {"mail": mail.id, "body": mail.body},
                name=mail.kind,
                message=ctx.message.id,
                peer=mail.to,
                hop=min(mail.hops, MAX_HOP),
                trace_id=trace_id(mail.traceparent),
            )
