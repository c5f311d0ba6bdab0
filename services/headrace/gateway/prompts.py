"""Prompts at the front door: a request becomes mail to an agent, and its answer the one reply.

The mail is stored before anything is answered, and the answer is kept under the request's id whether or not its asker
still waits: who came too early, or left, fetches it. A request with an id of its own may be asked again: the same body
gets the same answer, and another one a conflict.

    hr.replies.<request>.accepted     what was taken in, by compare-and-set
    hr.replies.<request>              the answer, from the agent
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from headrace.contracts import codec
from headrace.contracts.agents import (
    FRONT_DOOR,
    PROMPT,
    Accepted,
    AgentAnswer,
    AnswerRequest,
    prompt_body,
)
from headrace.contracts.codec import SCHEMA_HEADER, TRACEPARENT
from headrace.contracts.errors import Conflict, InvalidInput, NotFound, Refused, Unavailable
from headrace.contracts.mail import Kind, Mail, MailReply
from headrace.contracts.names import check_token
from headrace.mesh.agent_spans import mail_sent
from headrace.mesh.connection import Mesh
from headrace.mesh.crash import crash_point
from headrace.mesh.directory import find_card, list_cards, unknown_agent, who_is_there
from headrace.mesh.jsapi import (
    WRONG_LAST_SEQUENCE,
    WRONG_LAST_SUBJECT_SEQUENCE,
    JetStreamError,
    last_message,
)
from headrace.mesh.mail import Post, check_mail_size, derived_id, kept_reply, listening, new_id
from headrace.mesh.microservice import ApiServer
from headrace.mesh.publisher import publish

ANSWER_WITHIN_S: Final = 4.0
"""`nats request` waits for five seconds: what is not answered by then is `accepted`."""
HEADROOM: Final = 4_096
REQUEST_HEADER: Final = "Headrace-Request"
"""An id of the asker's own: the same request again is the same request."""
WAIT_HEADER: Final = "Headrace-Wait"
"""Seconds to wait for the answer, up to four; after them the reply is `accepted`."""
KIND_HEADER: Final = "Headrace-Kind"
"""Another kind of message than `prompt`."""
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_kind = msgspec.json.Decoder(Kind)


class Prompts:
    """Takes prompts in and answers them, for one gateway of any number."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._post = Post(mesh)

    def serve(self, server: ApiServer) -> None:
        """Add the endpoints `agents.prompt.<agent>`, `agents.answer` and `agents.list`."""
        server.endpoint_of_each("agents.prompt", self.prompt, timeout_s=ANSWER_WITHIN_S + 8.0)
        server.endpoint("agents.answer", AnswerRequest, self.answer)
        server.endpoint("agents.list", dict[str, Any], self.list)

    async def prompt(self, agent: str, data: bytes, headers: Mapping[str, str]) -> AgentAnswer:
        """Store the prompt as mail, and return its answer, or that it is accepted.

        Raise `InvalidInput` for a prompt or a name that is none, `NotFound` naming the agents that there are, `Refused`
        (`mailbox_full`, `too_large`, or whatever the agent says instead of an answer), `Conflict` for the id of another
        request, and `Unavailable` if it is not known whether the mail is stored: with an id it may be asked again.
        """
        until = time.monotonic() + _wait_s(headers)
        check_token("agent", agent)
        mail = self._mail(agent, prompt_body(data), headers)
        request = str(mail.request)
        check_mail_size(self._mesh, mail)
        accepted = Accepted(
            request=request,
            agent=agent,
            mail=mail.id,
            fingerprint=hashlib.sha256(f"{agent} {mail.kind} ".encode() + bytes(mail.body)).hexdigest(),
            at_us=mail.created_us,
        )
        known = await self._accepted(request) if REQUEST_HEADER in headers else None
        if known is not None:
            _refuse_another(known, accepted)
        async with listening(self._mesh, request) as wait:
            if known is None:  # its mail was stored before that was noted
                await self._check_kind(agent, mail.kind)
                await self._send(mail)
                crash_point("prompt-stored")
                await self._note(accepted)
                crash_point("prompt-accepted")
            reply: MailReply | None = await wait(max(0.0, until - time.monotonic()))
        return self._answered(reply) if reply is not None else self._waiting(request, agent)

    async def answer(self, request: AnswerRequest, _headers: Mapping[str, str]) -> AgentAnswer:
        """The answer to an earlier request, waited for up to `wait_s`; `NotFound` if there was no such request."""
        async with listening(self._mesh, request.request) as wait:
            reply: MailReply | None = await kept_reply(self._mesh, request.request)
            if reply is not None:
                return self._answered(reply)
            accepted = await self._accepted(request.request)
            if accepted is None:
                msg = f"no request {request.request}: answers are kept for a day"
                raise NotFound(msg, code="unknown_request")
            reply = await wait(request.wait_s) if request.wait_s else None
        return self._answered(reply) if reply is not None else self._waiting(accepted.request, accepted.agent)

    async def list(self, _request: dict[str, Any], _headers: Mapping[str, str]) -> dict[str, Any]:
        """The cards of all agents, each with whether it runs."""
        running, cards = await who_is_there(self._mesh), await list_cards(self._mesh)
        found = {"agents": [{"card": card, "running": card.name in running} for card in cards]}
        if len(msgspec.json.encode(found)) + HEADROOM > self._mesh.max_payload:  # of very many only the names
            return {"agents": [{"name": card.name, "running": card.name in running} for card in cards]}
        return found

    # --- inside --------------------------------------------------------------------------------------
    def _mail(self, agent: str, body: Raw, headers: Mapping[str, str]) -> Mail:
        given = headers.get(REQUEST_HEADER)
        request = new_id() if given is None else check_token("request", given)
        kind, traceparent = headers.get(KIND_HEADER, PROMPT), headers.get(TRACEPARENT, "")
        try:
            _kind.decode(msgspec.json.encode(kind))
        except (msgspec.MsgspecError, ValueError):
            msg = f"kind {kind[:80]!r} is none: use 1 to 128 of the characters A-Z a-z 0-9 _ . -"
            raise InvalidInput(msg, field=KIND_HEADER, code="invalid_name") from None
        # The mail's id follows from the request's, so that it is the same mail however often it is asked.
        identity = derived_id("prompt", agent, request)
        return Mail(
            id=identity,
            to=agent,
            sender=FRONT_DOOR,
            kind=kind,
            body=body,
            conversation=request,
            request=request,
            created_us=time.time_ns() // 1_000,
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
        )

    async def _check_kind(self, agent: str, kind: str) -> None:
        """Refuse what the agent has no handler for, as far as its card tells."""
        card = await find_card(self._mesh, agent)
        mailbox = card.mailbox if card is not None else None
        if mailbox is not None and kind not in mailbox.kinds:
            known = ", ".join(sorted(mailbox.kinds)) or "none"
            msg = f"agent {agent!r} takes no {kind!r}; its kinds are: {known} (header {KIND_HEADER})"
            raise InvalidInput(msg, field="kind", code="unknown_kind")

    async def _send(self, mail: Mail) -> None:
        """Store the mail, in the trace of its asker; one that is there already is stored once."""
        span = mail_sent(mail, self._mesh.topology.mail)
        error: str | None = "not_stored"
        try:
            await self._post.send(mail if span is None else replace(mail, traceparent=span.traceparent))
            error = None
        except NotFound:
            raise await unknown_agent(self._mesh, mail.to) from None
        finally:
            if span is not None:
                span.end(error=error)

    async def _accepted(self, request: str) -> Accepted | None:
        stored = await last_message(self._mesh, self._mesh.topology.replies, self._subject(request))
        return None if stored is None else codec.ACCEPTED.decode(stored.data, stored.headers)

    async def _note(self, accepted: Accepted) -> None:
        """Note what was taken in. The one that stands counts, if there is one already."""
        try:
            await publish(
                self._mesh,
                self._mesh.topology.replies,
                self._subject(accepted.request),
                codec.ACCEPTED.encode(accepted),
                headers={SCHEMA_HEADER: codec.ACCEPTED.name},
                expected_last_subject_seq=0,
            )
        except JetStreamError as e:
            if e.err_code not in (WRONG_LAST_SEQUENCE, WRONG_LAST_SUBJECT_SEQUENCE):
                raise Unavailable(f"the request is not accepted: {e}") from None
            known = await self._accepted(accepted.request)
            if known is not None:
                _refuse_another(known, accepted)

    def _subject(self, request: str) -> str:
        return f"{self._mesh.subjects.reply(request)}.accepted"

    def _answered(self, reply: MailReply) -> AgentAnswer:
        if reply.error is not None:
            said = reply.error.message or reply.error.code
            raise Refused(f"agent {reply.agent}: {said}", code=reply.error.code)
        return AgentAnswer(
            request=reply.request,
            agent=reply.agent,
            state="answered",
            answer=reply.body,
            conversation=reply.conversation,
        )

    def _waiting(self, request: str, agent: str) -> AgentAnswer:
        subject = self._mesh.subjects.api("agents.answer")
        fetch = f'nats request {subject} \'{{"request":"{request}"}}\''
        return AgentAnswer(request=request, agent=agent, state="accepted", conversation=request, fetch=fetch)


def _refuse_another(known: Accepted, asked: Accepted) -> None:
    if known.fingerprint != asked.fingerprint:
        msg = f"request {asked.request} was asked of {known.agent} with another body: use another {REQUEST_HEADER}"
        raise Conflict(msg, code="request_reused")


def _wait_s(headers: Mapping[str, str]) -> float:
    given = headers.get(WAIT_HEADER, str(ANSWER_WITHIN_S))
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= ANSWER_WITHIN_S:
        msg = f"{WAIT_HEADER} is {given[:80]!r}: use 0 to {ANSWER_WITHIN_S:g} seconds"
        raise InvalidInput(msg, field=WAIT_HEADER)
    return seconds
