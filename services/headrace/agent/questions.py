"""Questions whose deadline passed without an answer: the asker sends itself the notice, on its own reply lane.

So a question that nobody answers ends as any other does, with the same handler, tries and record.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from headrace.agent.hosting import Host
from headrace.agent.outbox import tell
from headrace.contracts.mail import AgentState, Mail, MailError, Notice, Question
from headrace.mesh.mail import derived_id, now_us

GRACE_US = 500_000
"""An answer that was sent in time may still be on its way."""


def overdue(record: AgentState, at_us: int) -> list[tuple[str, Question]]:
    """Questions that are over."""
    return [
        (id_, q)
        for id_, q in record.questions.items()
        if q.deadline_us is not None and at_us > q.deadline_us + GRACE_US
    ]


async def expired(host: Host, agent: str, record: AgentState) -> None:
    """Send the notices that are due. Sent again, they are known by their ids."""
    for id_, question in overdue(record, now_us()):
        error = MailError(code="expired", message=f"{question.to} did not answer before the deadline")
        notice = Notice(mail=id_, to=question.to, kind=question.then, error=error)
        mail = Mail(
            id=derived_id("notice", id_, "expired"),
            to=agent,
            sender=agent,
            kind="expired",
            body=Raw(msgspec.json.encode(notice)),
            lane="reply",
            conversation=question.conversation,
            task=question.task,
            hops=question.hops,
            in_reply_to=id_,
            created_us=now_us(),
        )
        await tell(host.mesh, host.post, mail)
