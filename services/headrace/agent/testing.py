"""Handlers tested without a broker: deliver a message, and look at what the handler did.

    bench = Bench(planner, calls={"llm": lambda body: {"text": "…"}})
    done = await bench.deliver("document", Document(text="…"))
    assert [sent.kind for sent in done.sent] == ["question", "question"]
    assert bench.state.open == 2

It keeps what the mesh keeps: bodies go through JSON, the state changes only if the handler returns, a call is made once
for its message and step, and a durable question is answered by `answer` or `refuse`. What it leaves out is time:
nothing is delivered by itself, no deadline ends a handler, and nothing is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from headrace.agent.agent import Agent
from headrace.agent.context import Context
from headrace.agent.ports import Asked, Port
from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import NotFound
from headrace.contracts.mail import ANSWER, Mail, MailError, MailReply, Notice, NoticeKind, Question
from headrace.mesh.mail import derived_id, now_us

Callee = Callable[[Any], Any]
"""What stands for a callee or another agent: gets the body, returns the outcome, a `CallAnswer` or a `MailError`."""


class Sent(Struct, frozen=True, kw_only=True):
    """A mail that a handler sends. `body` is what its receiver gets, as JSON comes."""

    to: str
    kind: str
    body: Any
    lane: str
    mail: Mail


class MadeCall(Struct, frozen=True, kw_only=True):
    """A governed call that a handler asked for; `replayed` if its outcome was there before."""

    callee: str
    body: Any
    key: str
    replayed: bool


class Done(Struct, kw_only=True):
    """What one run of a handler did."""

    message: Mail
    sent: list[Sent] = field(default_factory=list[Sent])
    reply: Any = None
    replied: bool = False
    questions: list[str] = field(default_factory=list[str])
    """Ids of the durable questions that it asked, for `Bench.answer`."""
    calls: list[MadeCall] = field(default_factory=list[MadeCall])
    records: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])


class Bench:
    """One agent on the bench. `calls` stands for callees by name, `agents` for other agents asked by `ask_now`."""

    def __init__(
        self,
        agent: Agent,
        *,
        state: Any = None,
        calls: Mapping[str, Callee] | None = None,
        agents: Mapping[str, Callee] | None = None,
    ) -> None:
        self._agent = agent
        self._stored = Raw(b"null") if state is None else Raw(msgspec.json.encode(state))
        self._callees = dict(calls or {})
        self._agents = dict(agents or {})
        self._outcomes: dict[str, tuple[bytes, CallAnswer]] = {}
        self._answers: dict[str, MailReply] = {}
        self._number = 0
        self.questions: dict[str, Question] = {}
        """What is asked and not answered, by id."""

    @property
    def state(self) -> Any:
        """The state as committed."""
        return self._agent.new_state(self._stored)

    async def deliver(
        self,
        kind: str,
        body: Any = None,
        *,
        sender: str = "tester",
        asked: bool = True,
        again: Mail | None = None,
        **fields: Any,
    ) -> Done:
        """Run the handler of `kind`; whatever it raises is raised here, and then nothing has changed.

        `asked`: the sender waits for an answer. `again` delivers an earlier message once more, as after a crash.
        Raise `NotFound` without a handler, `Undecodable` for a body that does not fit.
        """
        self._number += 1
        id_ = f"test-{self._number}"
        more: dict[str, Any] = {"id": id_, "request": id_ if asked else None, "created_us": now_us()} | fields
        mail = again or Mail(
            to=self._agent.name, sender=sender, kind=kind, body=Raw(msgspec.json.encode(body)), **more
        )
        return await self._run(mail, mail.kind, None, attempt=1 if again is None else 2)

    async def answer(self, question: str, body: Any = None) -> Done:
        """Answer a durable question: its `then` handler runs, with what it saved."""
        asked = self._question(question)
        return await self._run(self._back(question, asked, ANSWER, body), asked.then, asked)

    async def refuse(self, question: str, code: NoticeKind = "failed", message: str = "") -> Done:
        """A notice in place of an answer: the `otherwise` handler runs, else the one for `code`."""
        asked = self._question(question)
        error = MailError(code=code, message=message)
        notice = Notice(mail=question, to=asked.to, kind=asked.then, error=error)
        return await self._run(self._back(question, asked, code, notice), asked.otherwise or code, asked)

    def _question(self, id_: str) -> Question:
        if id_ not in self.questions:
            raise NotFound(f"no question {id_!r} is open", code="unknown_question")
        return self.questions[id_]

    def _back(self, id_: str, question: Question, kind: str, body: Any) -> Mail:
        self._number += 1
        return Mail(
            id=f"test-{self._number}",
            to=self._agent.name,
            sender=question.to,
            kind=kind,
            body=Raw(msgspec.json.encode(body)),
            lane="reply",
            conversation=question.conversation,
            hops=question.hops + 1,
            in_reply_to=id_,
        )

    async def _run(self, mail: Mail, kind: str, question: Question | None, *, attempt: int = 1) -> Done:
        handler = self._agent.handlers.get(kind)
        if handler is None:
            raise NotFound(f"{self._agent.name} has no handler for {kind!r}", code="no_handler")
        done = Done(message=mail)
        ctx: Context[Any] = Context(
            self._agent.name,
            mail,
            self.state,
            port=BenchPort(done, self._callees, self._agents, self._outcomes, self._answers),
            attempt=attempt,
            question=question,
            questions_open=len(self.questions),
        )
        body = handler.read(mail.body)
        await (handler.fn(ctx, body) if handler.takes_body else handler.fn(ctx))
        self._stored = Raw(msgspec.json.encode(ctx.state))
        self.state  # noqa: B018  (what cannot be read again is an error of this handler)
        if question is not None:
            self.questions.pop(mail.in_reply_to or "", None)
        self.questions |= ctx.effects.questions
        done.questions = list(ctx.effects.questions)
        done.sent = [_sent(m) for m in ctx.effects.mails if m.kind != ANSWER]
        bodies = [r.body for r in ctx.effects.replies] + [
            m.body for m in ctx.effects.mails if m.kind == ANSWER
        ]
        done.replied = bool(bodies)
        done.reply = msgspec.json.decode(bodies[0] or b"null") if bodies else None
        return done


class BenchPort:
    """What a context reaches on the bench."""

    def __init__(
        self,
        done: Done,
        callees: Mapping[str, Callee],
        agents: Mapping[str, Callee],
        outcomes: dict[str, tuple[bytes, CallAnswer]],
        answers: dict[str, MailReply],
    ) -> None:
        self._done = done
        self._callees = callees
        self._agents = agents
        self._outcomes = outcomes
        self._answers = answers

    def again(self) -> Port:
        """The same: it remembers anyway."""
        return self

    async def call(self, asked: Asked) -> CallAnswer:
        """The outcome that was recorded for this key, else what the callee gives."""
        data = asked.callee.encode() + bytes(asked.body)
        known = self._outcomes.get(asked.key)
        if known is not None and known[0] != data:
            error = {"type": "key_reused", "message": "the step asked for something else before"}
            return CallAnswer(call_id=derived_id(asked.key), state="conflict", error=error)
        body = msgspec.json.decode(asked.body)
        self._done.calls.append(
            MadeCall(callee=asked.callee, body=body, key=asked.key, replayed=known is not None)
        )
        if known is not None:
            return msgspec.structs.replace(known[1], replayed=True)
        if asked.callee not in self._callees:
            error = {"type": "unknown_callee", "message": f"no callee {asked.callee!r}"}
            return CallAnswer(call_id=derived_id(asked.key), state="refused", error=error)
        said = self._callees[asked.callee](body)
        answer = (
            said
            if isinstance(said, CallAnswer)
            else CallAnswer(
                call_id=derived_id(asked.key), state="completed", attempt=1, outcome={"body": said}
            )
        )
        self._outcomes[asked.key] = data, answer
        return answer

    async def ask_now(self, question: Mail, timeout_s: float) -> MailReply:  # noqa: ARG002  (no time passes here)
        """The answer that was kept for this question, else what the agent gives."""
        if question.id not in self._answers:
            if question.to not in self._agents:
                raise NotFound(f"no agent {question.to!r}", code="unknown_agent")
            said = self._agents[question.to](msgspec.json.decode(question.body))
            error = said if isinstance(said, MailError) else None
            body = Raw(b"null" if error is not None else msgspec.json.encode(said))
            self._answers[question.id] = MailReply(
                request=question.id, agent=question.to, body=body, error=error
            )
        return self._answers[question.id]

    def record(
        self,
        context: Context[Any],  # noqa: ARG002  (the port's form: all is of one message here)
        kind: str,
        name: str | None,
        data: Any,
    ) -> None:
        """Kept in `Done.records`: what the agent itself noted."""
        if kind == "note":
            self._done.records.append((name or "", data))


def _sent(mail: Mail) -> Sent:
    return Sent(to=mail.to, kind=mail.kind, body=msgspec.json.decode(mail.body), lane=mail.lane, mail=mail)
