"""Sending mail, and answers that are kept: what agents, the gateway and the command line do alike.

A mail is stored when its PubAck is here. A full mailbox refuses, and so does one that nobody ever opened: nothing is
sent to where no agent will look. Mails to one mailbox are never sent past one that was refused, since a receiver takes
a lower number after a higher one for a repeat.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from headrace.contracts import codec
from headrace.contracts.codec import SCHEMA_HEADER, TRACEPARENT
from headrace.contracts.errors import NotFound, Refused, Unavailable
from headrace.contracts.mail import Mail, MailReply
from headrace.mesh.connection import Mesh
from headrace.mesh.group_store import GroupStore
from headrace.mesh.jsapi import STREAM_IS_FULL, JetStreamError, consumer_info, last_message
from headrace.mesh.publisher import PubAck, publish_all, publish_message
from headrace.mesh.wire import OutMessage, check_size, header_block

KNOWN_S: Final = 300.0
"""How long a mailbox that was seen is taken to be there."""
LOOK_S: Final = 1.0
"""How often a kept answer is looked for, beside listening for it."""
HEADROOM: Final = 512
"""Bytes of headers that a mail may have on its way."""
ID_LENGTH: Final = 26
_MAIL, _REPLY = (
    header_block({SCHEMA_HEADER: codec.MAIL.name}),
    header_block({SCHEMA_HEADER: codec.MAIL_REPLY.name}),
)


def new_id() -> str:
    """An id that nobody else makes."""
    return uuid.uuid4().hex


def derived_id(*parts: str) -> str:
    """The id that follows from `parts`, equal for equal ones: 26 characters of base32, 130 bits of a sha256."""
    # With their lengths: "ab" + "c" is another thing than "a" + "bc".
    data = b"".join(b"%d:%b;" % (len(p), p) for p in (part.encode() for part in parts))
    return base64.b32encode(hashlib.sha256(data).digest()).decode()[:ID_LENGTH].lower()


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1_000


def mail_message(mesh: Mesh, mail: Mail) -> OutMessage:
    """A mail as it is stored. Its number stands for it where it has one, so it may be sent again at any time."""
    headers = _MAIL
    if mail.traceparent is not None:
        headers += header_block({TRACEPARENT: mail.traceparent})
    return OutMessage(mesh.subjects.mail(mail.to, mail.lane, mail.sender), codec.MAIL.encode(mail), headers)


class Post:
    """Sends mail over one connection. Mailboxes that were seen are remembered for a while.

    With a `group` mails of several senders are stored together. The stream's own window then knows none of them, as
    batches carry no ids: that is for senders who number their mails.
    """

    def __init__(self, mesh: Mesh, *, group: GroupStore | None = None) -> None:
        self._mesh = mesh
        self._group = group
        self._known: dict[str, float] = {}

    async def check_known(self, agent: str, lane: str) -> None:
        """Raise `NotFound` (`unknown_agent`) if no agent of that name was ever started."""
        key, now = f"{agent}-{lane}", time.monotonic()
        if self._known.get(key, 0.0) > now:
            return
        try:
            await consumer_info(self._mesh, self._mesh.topology.mail, key)
        except NotFound:
            msg = f"no agent {agent!r}: start it once, so that it has a mailbox (`headrace agent run`)"
            raise NotFound(msg, code="unknown_agent") from None
        except Unavailable as e:
            if e.code != "denied":
                raise
        self._known[key] = now + KNOWN_S

    async def send(self, mail: Mail, *, unknown_ok: bool = False, timeout_s: float = 5.0) -> None:
        """Store one mail.

        Raise `NotFound` (`unknown_agent`), `Refused` (`mailbox_full`, `too_large`), or `Unavailable` if it is not
        known whether it is stored: the same mail may be sent again.
        """
        if not unknown_ok:
            await self.check_known(mail.to, mail.lane)
        message = mail_message(self._mesh, mail)
        if self._group is not None and mail.seq:
            await self._stored([message], mail)
            return
        once = OutMessage(
            message.subject, message.data, message.headers + header_block({"Nats-Msg-Id": mail.id})
        )
        try:
            await publish_message(self._mesh, self._mesh.topology.mail, once, timeout_s=timeout_s)
        except JetStreamError as e:
            raise _refusal(e, mail) from None

    async def send_together(self, mails: Sequence[Mail]) -> None:
        """Store all of 1..1000 mails or none, in their order. Raise as `send`; `mailbox_full` may be of any of them."""
        if len(mails) == 1:
            await self.send(mails[0])
            return
        for mail in mails:
            await self.check_known(mail.to, mail.lane)
        await self._stored([mail_message(self._mesh, mail) for mail in mails], mails[0])

    async def _stored(self, messages: list[OutMessage], first: Mail) -> None:
        try:
            if self._group is not None:
                await self._group.store([(message, None) for message in messages])
            else:
                await publish_all(self._mesh, self._mesh.topology.mail, messages)
        except JetStreamError as e:
            raise _refusal(e, first) from None


def _refusal(error: JetStreamError, mail: Mail) -> Exception:
    if error.err_code not in STREAM_IS_FULL:
        return error
    msg = (
        f"the mailbox of {mail.to} ({mail.lane} lane) holds all that it may of {mail.sender}: try again later"
    )
    return Refused(msg, code="mailbox_full")


async def send_mail(mesh: Mesh, mail: Mail, *, unknown_ok: bool = False, timeout_s: float = 5.0) -> None:
    """`Post.send` for whoever sends seldom."""
    await Post(mesh).send(mail, unknown_ok=unknown_ok, timeout_s=timeout_s)


# --- kept answers -----------------------------------------------------------------------------------


async def keep_reply(mesh: Mesh, reply: MailReply, *, timeout_s: float = 5.0) -> PubAck:
    """Store the answer to a request, for whoever fetches it; storing the same again changes nothing."""
    message = OutMessage(mesh.subjects.reply(reply.request), codec.MAIL_REPLY.encode(reply), _REPLY)
    return await publish_message(mesh, mesh.topology.replies, message, timeout_s=timeout_s)


def check_mail_size(mesh: Mesh, mail: Mail) -> None:
    """Raise `Refused` (`too_large`) if the broker would not take the mail."""
    check_size(mail_message(mesh, mail), mesh.max_payload, HEADROOM)


async def kept_reply(mesh: Mesh, request: str) -> MailReply | None:
    """The answer to a request if there is one yet."""
    stored = await last_message(mesh, mesh.topology.replies, mesh.subjects.reply(request))
    return None if stored is None else codec.MAIL_REPLY.decode(stored.data, stored.headers)


@contextlib.asynccontextmanager
async def listening(
    mesh: Mesh, request: str
) -> AsyncGenerator[Callable[[float], Awaitable[MailReply | None]]]:
    """Give a function that waits for the answer to `request` for some seconds, and returns it or None.

    Enter it before the question is sent: nothing is missed then, and what is, is looked for every second.
    """
    heard = asyncio.Event()

    async def on_message(_: object) -> None:
        heard.set()

    subscription = await mesh.nc.subscribe(mesh.subjects.reply(request), cb=on_message)

    async def wait(timeout_s: float) -> MailReply | None:
        until = time.monotonic() + timeout_s
        while True:
            heard.clear()
            with contextlib.suppress(Unavailable):
                found = await kept_reply(mesh, request)
                if found is not None:
                    return found
            left = until - time.monotonic()
            if left <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_S)):
                    await heard.wait()

    try:
        yield wait
    finally:
        if not mesh.nc.is_closed:
            await subscription.unsubscribe()


async def wait_reply(mesh: Mesh, request: str, timeout_s: float) -> MailReply | None:
    """The answer to a request that was sent before, or None after `timeout_s`."""
    async with listening(mesh, request) as wait:
        return await wait(timeout_s)
