"""Examples of mail, states of agents and kept answers, for the golden bytes."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from headrace.contracts import codec
from headrace.contracts.calls import CallMessage
from headrace.contracts.mail import AgentState, Mail, MailError, MailReply, Question, ReturnAddress

AT = 1_764_547_200_000_000
MAIL = Mail(
    id="5ie5dqblndjqbh6rqljvqiqgmu",
    to="worker",
    sender="planner",
    kind="question",
    body=Raw(b'{"role":"ROLE_AGENT","parts":[{"text":"why?"}]}'),
    lane="reply",
    conversation="c-1",
    task="t-1",
    hops=3,
    seq=1_764_547_200_000 * 1_024 + 2,
    in_reply_to="m-1",
    reply_to="planner",
    request="r-1",
    deadline_us=AT + 1,
    budget="spend",
    created_us=AT,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
REPLY = MailReply(
    request="r-1",
    agent="worker",
    body=Raw(b'{"parts":[{"text":"so"}]}'),
    error=MailError(code="expired", message="its deadline passed"),
    conversation="c-1",
    task="t-1",
    at_us=AT,
)

EXAMPLES: dict[str, tuple[codec.Schema[Any], Any]] = {
    "mail-1.full": (codec.MAIL, MAIL),
    "mail-1.small": (codec.MAIL, Mail(id="m", to="a", sender="b", kind="k")),
    "mail-reply-1.full": (codec.MAIL_REPLY, REPLY),
    "mail-reply-1.small": (codec.MAIL_REPLY, MailReply(request="r", agent="a")),
    "agent-state-1.full": (
        codec.AGENT_STATE,
        AgentState(
            agent="planner",
            version=1_764_547_200_000,
            owner="run-1",
            state=Raw(b'{"open":2}'),
            settles="m-1",
            outbox=[MAIL],
            replies=[REPLY],
            seen={"worker": 41},
            recent=["m-0", "m-1"],
            questions={
                "q-1": Question(
                    to="worker",
                    then="answered",
                    otherwise="lost",
                    saved=Raw(b'{"part":1}'),
                    origin=ReturnAddress(mail="m-1", agent="chief", request="r-0", deadline_us=AT + 2),
                    conversation="c-1",
                    task="t-1",
                    hops=4,
                    deadline_us=AT + 1,
                    budget="spend",
                    asked_us=AT,
                )
            },
            cancelled=["m-9", "c-9"],
            stopped=True,
            at_us=AT,
        ),
    ),
    "agent-state-1.small": (codec.AGENT_STATE, AgentState(agent="a", version=1, owner="r")),
    "call-1.to-mailbox": (
        codec.CALL,
        CallMessage(
            request="r", callee="llm", body=Raw(b"{}"), agent="planner", key="m-1:1", to_mailbox=True
        ),
    ),
}
