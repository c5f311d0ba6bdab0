"""Asking while a handler waits: governed calls, and questions to other agents. Both can be asked again at any time.

What is asked is named by the message and the step, so whoever answers knows a repeat: the gateway by its ledger, an
agent by the question's id, and its answer is kept under that id. Answers come on the reply lane; the gateway's come by
a core message too, which is quicker and may be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

import msgspec
from msgspec import Raw

from headrace.agent.errors import AskTimeout
from headrace.agent.ports import Asked
from headrace.contracts import codec
from headrace.contracts.calls import CallAnswer, CallMessage
from headrace.contracts.codec import SCHEMA_HEADER, TRACEPARENT
from headrace.contracts.errors import HeadraceError, NotFound, Refused, Unavailable
from headrace.contracts.mail import ANSWER, GATEWAY, Mail, MailError, MailReply, Notice
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.mail import Post, derived_id, kept_reply, now_us
from headrace.mesh.publisher import publish

log = logging.getLogger("headrace.agent")

PATIENT_US: Final = 24 * 3_600 * 1_000_000
"""How long a gateway is to wait for a call that another asking runs already."""
ASK_AGAIN_S, ASK_SELDOM_S = 60.0, 3_600.0
"""When a call is asked once more that nobody has answered, at first and at last: both answers may be lost. Each asking
is one more message that waits, for a gateway that is away or a person who has to approve.
"""


class Waiting:
    """Who waits for which answer on the reply lane, by the id that the answer names and who is to give it."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._futures: dict[str, tuple[str, asyncio.Future[Mail]]] = {}

    def expect(self, id_: str, sender: str) -> asyncio.Future[Mail]:
        """What a mail in reply to `id_` sets, if it comes from `sender`, or from the agent itself (as notices do)."""
        future: asyncio.Future[Mail] = asyncio.get_running_loop().create_future()
        self._futures[id_] = sender, future
        return future

    def forget(self, id_: str) -> None:
        """Nobody waits any more."""
        self._futures.pop(id_, None)

    def take(self, mail: Mail) -> bool:
        """Give a mail to whoever waits for it; False if nobody does."""
        sender, future = self._futures.get(mail.in_reply_to or "", ("", None))
        if future is None or mail.sender not in (sender, self._agent):
            return False
        if not future.done():
            future.set_result(mail)
        return True


async def call(mesh: Mesh, waiting: Waiting, agent: str, asked: Asked) -> CallAnswer:
    """Ask the gateway for a call and return how it ended; waits as long as that takes.

    While the gateway is away the call waits in its stream, and so does a call that a person has to approve.
    """
    request = derived_id("call", agent, asked.key)
    future = waiting.expect(request, GATEWAY)
    try:
        attempt, again_s = 0, ASK_AGAIN_S
        while True:
            with mesh.listen() as (inbox, hint):
                await _ask_gateway(mesh, agent, asked, request, inbox)
                done, _ = await asyncio.wait(
                    (future, hint), timeout=again_s, return_when=asyncio.FIRST_COMPLETED
                )
                again_s = min(2 * again_s, ASK_SELDOM_S)
                # Without a message: the connection was lost, and the durable answer will come all the same.
                heard = hint.result().data if hint in done and hint.exception() is None else None
                answer = _answer(future, heard)
                if answer is not None and answer.state == "awaiting_approval":
                    await asyncio.wait((future,), timeout=ASK_SELDOM_S)
                    answer = _answer(future, None)
            if answer is not None and answer.state not in ("in_progress", "awaiting_approval"):
                return answer
            if answer is not None:
                await asyncio.sleep(backoff_s(attempt, base=0.2))
                attempt += 1
            if future.done():
                future = waiting.expect(request, GATEWAY)
    finally:
        waiting.forget(request)


def _answer(future: asyncio.Future[Mail], hint: bytes | None) -> CallAnswer | None:
    """What came, the durable one first; None if that is no answer."""
    data = bytes(future.result().body) if future.done() else hint
    with contextlib.suppress(msgspec.MsgspecError):
        return None if data is None else msgspec.json.decode(data, type=CallAnswer)
    return None


async def _ask_gateway(mesh: Mesh, agent: str, asked: Asked, request: str, inbox: str) -> None:
    tenant, mail = mesh.settings.tenant, asked.message
    message = CallMessage(
        request=request,
        callee=asked.callee,
        body=asked.body,
        tenant=tenant,
        agent=agent,
        key=asked.key,
        reply_to=inbox,
        to_mailbox=True,
        message_id=mail.id,
        step=asked.step,
        conversation=mail.conversation or mail.id,
        task=mail.task,
        asked_us=now_us(),
        until_us=now_us() + PATIENT_US,
        deadline_us=asked.deadline_us,
    )
    headers = {SCHEMA_HEADER: codec.CALL.name} | (
        {TRACEPARENT: asked.traceparent} if asked.traceparent else {}
    )
    data = codec.CALL.encode(message)
    subject = mesh.subjects.call(tenant, agent)
    attempt = 0
    while True:
        try:
            await publish(mesh, mesh.topology.calls, subject, data, headers=headers)
        except Refused:
            raise
        except HeadraceError as e:  # away or full: nothing is called twice by asking twice
            if mesh.closed.is_set():
                raise
            log.warning("a call is not stored yet", extra={"agent": agent, "reason": str(e)[:200]})
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1
        else:
            return


async def ask_now(
    mesh: Mesh, post: Post, waiting: Waiting, question: Mail, timeout_s: float, *, again: bool
) -> MailReply:
    """Ask an agent and return its answer, or what is there in its place; raise `AskTimeout`.

    `again`: it may have been asked before, so the answer may be kept already. Raise `NotFound` or `Refused` if the
    question cannot be sent.
    """
    until = time.monotonic() + timeout_s
    future = waiting.expect(question.id, question.to)  # before looking: what comes in between is not missed
    try:
        if again and (kept := await _kept(mesh, question.id)) is not None:
            return kept
        await _send(mesh, post, question, until)
        done, _ = await asyncio.wait((future,), timeout=max(0.0, until - time.monotonic()))
        if done:
            return _reply(question, future.result())
    finally:
        waiting.forget(question.id)
    if (kept := await _kept(mesh, question.id)) is not None:
        return kept
    raise AskTimeout(f"{question.to} did not answer {question.kind!r} within {timeout_s:g} s")


async def _send(mesh: Mesh, post: Post, question: Mail, until: float) -> None:
    attempt = 0
    while True:
        try:
            await post.send(question)
        except (NotFound, Refused) as e:
            if e.code == "too_large" or time.monotonic() > until:
                raise
        except HeadraceError:
            if mesh.closed.is_set() or time.monotonic() > until:
                raise
        else:
            return
        await asyncio.sleep(backoff_s(attempt, cap=1.0))
        attempt += 1


async def _kept(mesh: Mesh, request: str) -> MailReply | None:
    try:
        return await kept_reply(mesh, request)
    except Unavailable:
        return None


def _reply(question: Mail, mail: Mail) -> MailReply:
    error: MailError | None = None
    if mail.kind != ANSWER:
        try:
            error = msgspec.json.decode(mail.body, type=Notice).error
        except msgspec.MsgspecError:
            error = MailError(
                code="failed", message=f"{question.to} sent {mail.kind!r} in place of an answer"
            )
    return MailReply(
        request=question.id,
        agent=mail.sender,
        body=Raw(b"null") if error else mail.body,
        error=error,
        at_us=now_us(),
    )
