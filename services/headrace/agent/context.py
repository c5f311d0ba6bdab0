"""What a handler sees of its message and of the mesh, and where what it does is collected until it is committed.

Sends, answers, questions and the state are only noted here; one record makes them happen together once the handler has
returned, and nothing of a handler that failed remains. Calls and `ask_now` go out at once: they are named by the
message's id and their step, so that a handler that runs again gets the outcome that was recorded.
"""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw

from headrace.agent.errors import AskFailed
from headrace.agent.ports import Asked, Called, Effects, Port, call_error
from headrace.contracts import codec
from headrace.contracts.errors import InvalidInput, Refused, Undecodable
from headrace.contracts.mail import (
    ANSWER,
    MAX_OUTBOX,
    MAX_QUESTIONS,
    Mail,
    MailError,
    MailLane,
    MailReply,
    Notice,
    Question,
    ReturnAddress,
)
from headrace.contracts.names import check_token
from headrace.mesh.mail import derived_id, now_us

S = TypeVar("S")
MAX_STEP = 100
_encode = msgspec.json.encode


class Context(Generic[S]):
    """Given to a handler, for one try at one message.

    `message` is the mail, `state` the agent's own (change it as you like), `attempt` counts tries from 1, `budget`
    names what pays, `error` is set where a question got no answer and this handler is its `otherwise`.
    """

    def __init__(
        self,
        agent: str,
        message: Mail,
        state: S,
        *,
        port: Port,
        attempt: int = 1,
        question: Question | None = None,
        questions_open: int = 0,
        max_bytes: int = 900_000,
        traceparent: str | None = None,
    ) -> None:
        self.agent = agent
        self.message = message
        self.state = state
        self.attempt = attempt
        self.question = question
        self.effects = Effects()
        self.traceparent = traceparent or message.traceparent
        self._port = port
        self._questions_open = questions_open
        self._max_bytes = max_bytes
        self._steps: set[str] = set()
        self._numbered = 0
        self._answered = False
        self.origin = (
            question.origin
            if question is not None
            else ReturnAddress(
                mail=message.id,
                agent=message.reply_to,
                request=message.request,
                deadline_us=message.deadline_us,
            )
        )

    # --- what the message says -----------------------------------------------------------------------
    @property
    def conversation(self) -> str:
        """What this message belongs to: its own id where it is the first."""
        named = self.question.conversation if self.question is not None else None
        return named or self.message.conversation or self.message.id

    @property
    def task(self) -> str | None:
        """What it is for, as spending is grouped."""
        return self.message.task or (self.question.task if self.question is not None else None)

    @property
    def budget(self) -> str | None:
        """The budget that travels with the conversation."""
        return self.message.budget or (self.question.budget if self.question is not None else None)

    @property
    def deadline_us(self) -> int | None:
        """When nobody waits any more, in microseconds since the epoch."""
        return self.origin.deadline_us if self.origin is not None else self.message.deadline_us

    @property
    def deadline(self) -> float | None:
        """The deadline in seconds since the epoch."""
        return None if self.deadline_us is None else self.deadline_us / 1e6

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, 0 after it."""
        return None if self.deadline is None else max(0.0, self.deadline - time.time())

    @property
    def saved(self) -> Any:
        """What `ask` was given as `state`, as JSON; `saved_as` for a type of your own."""
        return None if self.question is None else msgspec.json.decode(self.question.saved)

    def saved_as(self, type_: type[Any]) -> Any:
        """What `ask` was given as `state`, as that type."""
        return msgspec.json.decode(self.question.saved if self.question is not None else b"null", type=type_)

    @property
    def error(self) -> MailError | None:
        """Why a question has no answer."""
        if self.message.kind == ANSWER or self.message.lane != "reply":
            return None
        try:
            return msgspec.json.decode(self.message.body, type=Notice).error
        except msgspec.MsgspecError:
            return None

    # --- what happens when the handler has returned --------------------------------------------------
    def send(
        self,
        to: str,
        kind: str,
        body: Any = None,
        *,
        lane: MailLane = "work",
        deadline_s: float | None = None,
        task: str | None = None,
    ) -> str:
        """Send a mail once the handler has returned; return its id.

        Raise `InvalidInput` for a name that is none, `Refused` (`too_large`, `outbox_full`) beyond a record's bounds.
        """
        return self._note(self._mail(to, kind, body, lane=lane, deadline_s=deadline_s, task=task)).id

    def reply(self, body: Any = None) -> bool:
        """Answer whoever asked; False if nobody waits for an answer. A message is answered once."""
        if self._answered:
            raise InvalidInput(f"message {self.message.id} was answered already", field="body")
        to = self.origin
        if to is None or (to.agent is None and to.request is None):
            return False
        self._answered = True
        encoded = Raw(_encode(body))
        if to.request is not None:
            self._room(len(encoded))
            self.effects.replies.append(
                MailReply(
                    request=to.request,
                    agent=self.agent,
                    body=encoded,
                    conversation=self.conversation,
                    task=self.task,
                    at_us=now_us(),
                )
            )
        if to.agent is not None:
            mail = self._mail(to.agent, ANSWER, encoded, lane="reply", deadline_s=None, task=None)
            self._note(msgspec.structs.replace(mail, in_reply_to=to.mail, deadline_us=None))
        return True

    async def ask(
        self,
        to: str,
        kind: str,
        body: Any = None,
        *,
        then: str,
        otherwise: str | None = None,
        state: Any = None,
        deadline_s: float | None = None,
    ) -> str:
        """Ask a durable question and go on; return its id.

        The answer comes as a message to the handler of kind `then`, with `state` in `ctx.saved`, whatever is restarted
        meanwhile. If there will be none, the handler of kind `otherwise` gets a `Notice`, and `ctx.error` says why.
        """
        if self._questions_open + len(self.effects.questions) >= MAX_QUESTIONS:
            msg = f"agent {self.agent} has {MAX_QUESTIONS} questions open, the most that it may"
            raise Refused(msg, code="too_many_questions")
        mail = self._mail(to, kind, body, lane="work", deadline_s=deadline_s, task=None)
        mail = self._note(msgspec.structs.replace(mail, reply_to=self.agent))
        saved = Raw(_encode(state))
        self._room(len(saved))
        self.effects.questions[mail.id] = Question(
            to=to,
            then=then,
            otherwise=otherwise,
            saved=saved,
            origin=self.origin,
            conversation=self.conversation,
            task=self.task,
            hops=mail.hops,
            deadline_us=mail.deadline_us,
            budget=self.budget,
            asked_us=mail.created_us,
        )
        return mail.id

    # --- what happens at once ------------------------------------------------------------------------
    async def ask_now(
        self,
        to: str,
        kind: str,
        body: Any = None,
        *,
        timeout_s: float = 30.0,
        step: str | None = None,
        type: Any = Any,  # noqa: A002  (the name that msgspec gives it)
    ) -> Any:
        """Ask and wait for the answer, the lease renewed meanwhile. For short questions: the agent does nothing else.

        Raise `AskTimeout`, or `AskFailed` if there will be no answer. A handler that runs again asks the same question
        again, and gets the answer that was kept.
        """
        if to == self.agent:
            msg = "an agent that waits handles nothing, its own question neither: use `ask`"
            raise InvalidInput(msg, field="to")
        name = self._step(step)
        asked = msgspec.structs.replace(
            self._mail(to, kind, body, lane="work", deadline_s=None, task=None),
            id=derived_id("ask", self.agent, self.message.id, name),
            reply_to=self.agent,
        )
        question = msgspec.structs.replace(asked, request=asked.id)
        reply = await self._port.ask_now(question, timeout_s)
        self._port.record(self, "asked", kind, {"to": to, "step": name, "answered": reply.error is None})
        if reply.error is not None:
            raise AskFailed(f"{to} does not answer {kind!r}: {reply.error.message}", code=reply.error.code)
        return msgspec.json.decode(reply.body, type=type)

    async def call(self, callee: str, body: Any, *, step: str | None = None) -> Called:
        """Make a governed call, once for this message and step, whatever happens. Steps are numbered in their order.

        Raise `CallRefused`, `CallFailed`, `CallInDoubt` or `CallConflict`, each with the gateway's `code`.
        """
        name = self._step(step)
        check_token("callee", callee)
        answer = await self._port.call(
            Asked(
                key=f"{self.message.id}:{name}",
                callee=callee,
                body=body if isinstance(body, Raw) else Raw(_encode(body)),
                message=self.message,
                step=name,
                deadline_us=self.deadline_us,
                traceparent=self.traceparent,
            )
        )
        self._port.record(
            self,
            "called",
            callee,
            {"call": answer.call_id, "state": answer.state, "step": name, "usage": answer.usage},
        )
        if answer.state != "completed":
            raise call_error(answer, callee)
        return Called(body=(answer.outcome or {}).get("body"), answer=answer)

    def record(self, kind: str, data: Any = None) -> None:
        """Note something in the agent's history. Never waits; what finds the buffer full is dropped and counted."""
        self._port.record(self, "note", kind, data)

    # --- inside --------------------------------------------------------------------------------------
    def _mail(
        self, to: str, kind: str, body: Any, *, lane: MailLane, deadline_s: float | None, task: str | None
    ) -> Mail:
        check_token("agent", to)
        now = now_us()
        own_us = None if deadline_s is None else now + int(deadline_s * 1e6)
        known = [d for d in (own_us, self.deadline_us) if d is not None]
        return Mail(
            id=derived_id("mail", self.agent, self.message.id, str(len(self.effects.mails))),
            to=to,
            sender=self.agent,
            kind=kind,
            body=body if isinstance(body, Raw) else Raw(_encode(body)),
            lane=lane,
            conversation=self.conversation,
            task=task or self.task,
            hops=self.message.hops + 1,
            deadline_us=min(known, default=None),
            budget=self.budget,
            created_us=now,
            traceparent=self.traceparent,
        )

    def _note(self, mail: Mail) -> Mail:
        if len(self.effects.mails) >= MAX_OUTBOX:
            msg = f"a handler sends {MAX_OUTBOX} mails at most: split the work over several messages"
            raise Refused(msg, code="outbox_full")
        data = _encode(mail)
        try:
            codec.MAIL.decode(data)  # its bounds, here where the traceback names the line that sent it
        except Undecodable as e:
            raise InvalidInput(str(e), field="mail") from None
        self._room(len(data))
        self.effects.mails.append(mail)
        return mail

    def _room(self, size: int) -> None:
        self.effects.bytes += size
        if self.effects.bytes > self._max_bytes:
            msg = (
                f"what this handler sends has more than {self._max_bytes} bytes, which one record does not hold: "
                "send references to large things, or split the work"
            )
            raise Refused(msg, code="too_large")

    def _step(self, given: str | None) -> str:
        if given is None:
            self._numbered += 1
            given = str(self._numbered)
        if not 0 < len(given) <= MAX_STEP or given in self._steps:
            raise InvalidInput(f"step {given[:80]!r} is empty, too long, or used before", field="step")
        self._steps.add(given)
        return given
