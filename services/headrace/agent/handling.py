"""One mail, from its delivery to its end: judged, handled, committed, sent out, acked; or given up, and that told.

    handler → one record by compare-and-set (state, what it sends, that the mail is settled) → sends it → ack

Whatever dies between two of these steps, the next run goes on: before the record nothing happened, after it the mail is
known as settled, and what the record sends is sent (again, with the same numbers). A handler that changed and sent
nothing writes no record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

from headrace.agent.agent import Agent, Handler
from headrace.agent.committing import Committer
from headrace.agent.context import Context
from headrace.agent.endings import Endings, failure
from headrace.agent.errors import Fenced, RetryLater
from headrace.agent.history import History
from headrace.agent.hosting import Host
from headrace.agent.judging import Case, Dies, Ends, Runs, Unheard, case_of, judge
from headrace.agent.ports import Port
from headrace.contracts.mail import NOTICES, Mail, MailError, NoticeKind
from headrace.mesh.agent_spans import agent_invoked, mail_processed
from headrace.mesh.connection import backoff_s
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.mail import now_us
from headrace.mesh.tracing import TraceSpan

log = logging.getLogger("headrace.agent")

EFFECT_BYTES: Final = 64 << 10
"""Kept free in a record for what is remembered beside the state and the mails."""
QUESTION_BYTES: Final = 1_024
LATER_CAP_S: Final = 30.0
BACK_S: Final = 0.1
"""Delay of what is given back unhandled."""
MAX_ERRORS: Final = 1_000


class _DeadlinePassed(Exception):
    """In the middle of a handler."""


class _Halted(Exception):
    """While a handler waited for its next run."""


class Handling:
    """Handles the mails of one agent, one at a time."""

    def __init__(self, host: Host, agent: Agent, committer: Committer) -> None:
        self._host = host
        self._agent = agent
        self._settings = host.settings.agent
        self._max_tries = agent.max_tries or self._settings.message_tries
        self._committer = committer
        self._endings = Endings(host.mesh, agent, host.post, host.settler)
        self._history = History(host.recorder(agent.name))
        self._last_error: dict[str, str] = {}
        self._running: tuple[Mail, asyncio.Task[Any]] | None = None
        self._given_up = ""
        self.halting = asyncio.Event()
        """Set while nothing new may be handled: what waits for something to come back waits no longer."""
        self.handled = 0

    def case(self, delivery: Delivery, mail: Mail) -> Case:
        """What there is to know of a mail."""
        return case_of(self._agent.name, self._committer.record, delivery, mail)

    @property
    def busy(self) -> bool:
        """Whether a handler is running."""
        return self._running is not None

    def is_settled(self, case: Case) -> bool:
        """Whether the mail was settled before."""
        return self._committer.memory.knows(case.mail, redriven=case.redriven)

    def give_up(self, mail: str | None, conversation: str | None) -> bool:
        """Cancel the running handler if it is about that; the mail is ended then."""
        if self._running is None:
            return False
        running, task = self._running
        if running.id != mail and (conversation is None or running.conversation != conversation):
            return False
        self._given_up = running.id
        task.cancel()
        return True

    async def handle(self, case: Case, port: Port) -> None:
        """Bring the mail to its end. Raise `Fenced`; `Unavailable` if that cannot be told or stored now."""
        verdict = judge(
            case,
            self._agent,
            self._committer.record,
            max_tries=self._max_tries,
            max_hops=self._settings.max_hops,
            last_error=self._last_error.get(case.mail.id, ""),
            at_us=now_us(),
        )
        if isinstance(verdict, Unheard):
            await self._unheard(case)
            return
        crash_point("mail-received")
        span = mail_processed(case.delivery, case.mail, client=self._host.mesh.name)
        error: str | None = "not_settled"
        try:
            match verdict:
                case Runs(handler, body):
                    error = await self._try(case, handler, body, port, span)
                case Ends(kind, why):
                    error = await self._end(case, kind, why)
                case Dies(error=said, kind=kind, detail=detail):
                    error = await self._die(case, said, kind=kind, detail=detail)
        finally:
            if span is not None:
                span.end(error=error)

    async def _unheard(self, case: Case) -> None:
        """The question, if there is one, is over: whoever waits for an answer of ours is told."""
        mail, question = case.mail, case.question
        if mail.kind in NOTICES:
            extra = {"agent": self._agent.name, "kind": mail.kind, "about": mail.in_reply_to}
            log.warning("a notice has no handler", extra=extra)
        if question is not None:
            why = MailError(code=mail.kind, message=f"{self._agent.name} got no answer from {question.to}")
            await self._endings.tell(mail, why, kind="failed", origin=case.origin)
            await self._committer.commit(mail, None, question, redriven=case.redriven)
        self._host.settler.ack_soon(case.delivery)

    # --- running a handler ---------------------------------------------------------------------------
    async def _try(
        self, case: Case, handler: Handler, body: Any, port: Port, parent: TraceSpan | None
    ) -> str | None:
        span = agent_invoked(parent, self._agent.name, handler.kind)
        began_us = now_us()
        error: str | None = "not_settled"
        try:
            ctx = await self._invoke(case, handler, body, port, span)
            crash_point("agent-handled")
            await self._committer.commit(case.mail, ctx, case.question, redriven=case.redriven)
            error = None
        except Fenced:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._given_up != case.mail.id or task is None or self.is_settled(case):
                raise
            task.uncancel()
            error = await self._end(case, "cancelled", f"{self._agent.name} was told to give it up")
        except _DeadlinePassed:
            error = await self._end(
                case, "expired", f"its deadline passed while {self._agent.name} handled it"
            )
        except _Halted:
            self._host.settler.nak(case.delivery, BACK_S)
        except Exception as e:  # noqa: BLE001  (whatever a handler raises is one failed try)
            error = await self._failed(case, e)
        else:
            crash_point("agent-committed")
            await self._committer.send_out()
            crash_point("agent-sent")
            self._host.settler.ack_soon(case.delivery)
            crash_point("agent-acked")
            self.handled += 1
            took_us = now_us() - began_us
            self._history.note(case, "handled", {"took_us": took_us, "outcome": "done"})
            self._history.note_sent(ctx)
        finally:
            if span is not None:
                span.end(error=error)
        return error

    async def _invoke(
        self, case: Case, handler: Handler, body: Any, port: Port, span: TraceSpan | None
    ) -> Context[Any]:
        """Run the handler until it returns or fails; `RetryLater` runs it again, as the same try.

        A deadline ends it, unless the mail was redriven, or it ends a question of ours: that the agent has to know.
        """
        deadline_us = None if case.redriven or case.question is not None else case.mail.deadline_us
        attempt = 0
        while True:
            ctx = self._context(case, port, span)
            left = None if deadline_us is None else (deadline_us - now_us()) / 1e6
            task = asyncio.current_task()
            assert task is not None  # noqa: S101  (a coroutine always runs in one)
            self._running = case.mail, task
            limit = asyncio.timeout(left)
            try:
                async with limit:
                    try:
                        await (handler.fn(ctx, body) if handler.takes_body else handler.fn(ctx))
                    except RetryLater as e:
                        if attempt == 0:
                            extra = {"agent": self._agent.name, "mail": case.mail.id, "reason": str(e)[:200]}
                            log.warning("a handler waits", extra=extra)
                        await self._pause(backoff_s(attempt, base=e.delay_s, cap=max(e.delay_s, LATER_CAP_S)))
                        attempt += 1
                        port = port.again()
                        continue
                return ctx
            except TimeoutError:
                if limit.expired():
                    raise _DeadlinePassed from None
                raise
            finally:
                self._running = None

    async def _pause(self, delay_s: float) -> None:
        """Wait; raise `_Halted` once nothing may be handled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self.halting.wait()
            raise _Halted

    def _context(self, case: Case, port: Port, span: TraceSpan | None) -> Context[Any]:
        record = self._committer.record
        held = sum(len(bytes(q.saved)) + QUESTION_BYTES for q in record.questions.values())
        free = self._host.mesh.max_payload - held - len(bytes(record.state)) - EFFECT_BYTES
        return Context(
            self._agent.name,
            case.mail,
            self._agent.new_state(record.state),
            port=port,
            attempt=case.delivery.delivered,
            question=case.question,
            questions_open=len(record.questions),
            max_bytes=max(0, free),
            traceparent=span.traceparent if span is not None else None,
        )

    # --- what does not go well -----------------------------------------------------------------------
    async def _failed(self, case: Case, error: Exception) -> str:
        text, tries = f"{type(error).__name__}: {error}"[:1_000], case.delivery.delivered
        extra = {"agent": self._agent.name, "mail": case.mail.id, "kind": case.mail.kind, "try": tries}
        log.warning("a handler failed", extra=extra, exc_info=error)
        if tries >= self._max_tries:
            return await self._die(case, failure(error), detail=f"{text} (after {tries} tries)")
        if len(self._last_error) > MAX_ERRORS:
            self._last_error.clear()
        self._last_error[case.mail.id] = text
        delay_s = min(self._settings.retry_cap_s, self._settings.retry_s * 2.0 ** (tries - 1))
        self._history.note(case, "failed", {"error": type(error).__name__, "retry_in_s": delay_s})
        self._host.settler.nak(case.delivery, delay_s)
        return "handler_failed"

    async def _die(
        self, case: Case, error: MailError, *, kind: NoticeKind = "failed", detail: str = ""
    ) -> str:
        await self._endings.die(case.delivery, case.mail, error, kind=kind, origin=case.origin, detail=detail)
        await self._committer.note_dead(case.mail, redriven=case.redriven)
        self._last_error.pop(case.mail.id, None)
        self._history.note(case, "dead", {"code": error.code})
        return error.code

    async def _end(self, case: Case, kind: NoticeKind, why: str) -> str:
        """Tell whoever waits, and ack: nobody wants it any more."""
        await self._endings.tell(
            case.mail,
            MailError(code=kind, message=why),
            kind=kind,
            origin=case.origin,
            tries=case.delivery.delivered,
        )
        await self._committer.commit(case.mail, None, case.question, redriven=case.redriven)
        self._host.settler.ack_soon(case.delivery)
        self._history.note(case, kind)
        return kind
