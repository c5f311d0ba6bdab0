"""The step that makes a handler's work count: one record with the new state, what it sends, and what it settles.

Whatever begins to be stored is brought to its end, though its handler be cancelled meanwhile: what may be stored has to
be known here, else the next record could not be told from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from headrace.agent.agent import Agent
from headrace.agent.book import Book, Change
from headrace.agent.context import Context
from headrace.agent.hosting import Host
from headrace.agent.intake import Memory, is_numbered
from headrace.agent.outbox import Outbox
from headrace.contracts.mail import STEPS, AgentState, Mail, MailReply, Question
from headrace.mesh.agent_spans import mail_sent
from headrace.mesh.tracing import TraceSpan


class Committer:
    """The state of one agent in one run, and what it has yet to send."""

    def __init__(self, host: Host, agent: Agent, run: str) -> None:
        self._agent = agent
        self._stream = host.mesh.topology.mail
        self._book = Book(host.mesh, agent.name, run, group=host.states)
        self._outbox = Outbox(host.mesh, host.post, agent.name, patience_s=host.settings.agent.patience_s)
        self._spans: list[TraceSpan] = []
        self.memory = Memory(self._book.record)

    @property
    def record(self) -> AgentState:
        """The last committed state."""
        return self._book.record

    async def take_over(self) -> AgentState:
        """Become the run that writes. What the run before left to be sent is in the outbox."""
        record = await self._book.take_over()
        self.memory = Memory(record)
        self._outbox.mails, self._outbox.replies = list(record.outbox), list(record.replies)
        return record

    async def change(self, what: Change) -> AgentState:
        """Store a change that no handler made; what is not sent yet stays in the record."""
        return await _to_the_end(self._book.commit(lambda record: self._with_unsent(what(record), [], [])))

    async def commit(
        self, mail: Mail, ctx: Context[Any] | None, question: Question | None, *, redriven: bool
    ) -> None:
        """Store what a handler did about `mail`, if it did anything that has to be stored; the mail is settled then.

        `question` is the one that the mail answers: it is over. Raise as `Book.commit`.
        """
        state = None if ctx is None else self._new_state(ctx)
        if state is not None or question is not None or (ctx is not None and ctx.effects):
            await _to_the_end(self._commit(mail, ctx, question, state, redriven=redriven))
        else:
            self.memory.note(mail, redriven=redriven)

    async def note_dead(self, mail: Mail, *, redriven: bool) -> None:
        """A mail is a dead letter: if its sender sends it again it is known, and if it is redriven it is not."""
        if is_numbered(mail, redriven=redriven):
            await self.change(lambda record: self.memory.written(record, mail, redriven=redriven))
            self.memory.note(mail, redriven=redriven)

    async def send_out(self) -> None:
        """Send what is in the outbox, and return when it is stored or given up. Cancelled, the rest stays there."""
        spans, self._spans = self._spans, []
        if self._outbox:
            await self._outbox.deliver()
        for span in spans:
            span.end()

    async def tidy(self) -> None:
        """At a stop: what was sent is taken out of the record, so that whoever starts next does not send it again."""
        await self._book.quiet()
        if not self._book.fenced and not self._outbox and (self.record.outbox or self.record.replies):
            await self.change(lambda record: record)

    # --- inside --------------------------------------------------------------------------------------
    async def _commit(
        self,
        mail: Mail,
        ctx: Context[Any] | None,
        question: Question | None,
        state: Raw | None,
        *,
        redriven: bool,
    ) -> None:
        stored = await self._book.commit(
            lambda record: self._written(record, mail, ctx, question, state, redriven=redriven)
        )
        self._outbox.mails, self._outbox.replies = list(stored.outbox), list(stored.replies)
        self.memory.note(mail, redriven=redriven)

    def _new_state(self, ctx: Context[Any]) -> Raw | None:
        """The state as the handler left it; None if it is as it was."""
        before, after = bytes(self.record.state), msgspec.json.encode(ctx.state)
        if before == b"null":
            before = msgspec.json.encode(self._agent.state_type())
        return None if after == before else Raw(after)

    def _written(
        self,
        record: AgentState,
        mail: Mail,
        ctx: Context[Any] | None,
        question: Question | None,
        state: Raw | None,
        *,
        redriven: bool,
    ) -> AgentState:
        mails: list[Mail] = []
        replies: list[MailReply] = []
        questions = record.questions
        if ctx is not None:
            first = (record.version + 1) * STEPS
            mails = [self._numbered(sent, first + i) for i, sent in enumerate(ctx.effects.mails)]
            replies = ctx.effects.replies
            questions = questions | ctx.effects.questions
        if question is not None:
            questions = {id_: q for id_, q in questions.items() if id_ != mail.in_reply_to}
        record = replace(
            record, state=record.state if state is None else state, settles=mail.id, questions=questions
        )
        return self.memory.written(self._with_unsent(record, mails, replies), mail, redriven=redriven)

    def _with_unsent(self, record: AgentState, mails: list[Mail], replies: list[MailReply]) -> AgentState:
        return replace(
            record, outbox=[*self._outbox.mails, *mails], replies=[*self._outbox.replies, *replies]
        )

    def _numbered(self, mail: Mail, seq: int) -> Mail:
        span = mail_sent(mail, self._stream)
        if span is None:
            return replace(mail, seq=seq)
        self._spans.append(span)
        return replace(mail, seq=seq, traceparent=span.traceparent)


async def _to_the_end(work: Coroutine[Any, Any, Any]) -> Any:
    """Await `work`; if the waiting task is cancelled, it goes on all the same, and then the cancellation is raised."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
