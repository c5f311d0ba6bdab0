"""Sending what a record says: after it was stored, and again by whoever finds it as the last one.

Mails to one mailbox go in order, and none goes past one that waits: the receiver takes a lower number after a higher
one for a repeat. A mailbox that is full, or not there yet, is waited for with back-off; a mail that waits for too long
becomes a dead letter, and the agent gets a notice on its own reply lane.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from typing import Final

import msgspec
from msgspec import Raw

from headrace.contracts.errors import HeadraceError, NotFound, Refused, Unavailable
from headrace.contracts.mail import Mail, MailError, MailReply, Notice
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.mail import Post, derived_id, keep_reply, mail_message, now_us
from headrace.mesh.settle import lost_message

log = logging.getLogger("headrace.agent")

WAIT_CAP_S: Final = 1.0
MAX_NOTICE_TRIES: Final = 5


class Outbox:
    """What one agent has yet to send. `mails` and `replies` are what is not known to be stored."""

    def __init__(self, mesh: Mesh, post: Post, agent: str, *, patience_s: float) -> None:
        self._mesh = mesh
        self._post = post
        self._agent = agent
        self._patience_s = patience_s
        self.mails: list[Mail] = []
        self.replies: list[MailReply] = []

    def __bool__(self) -> bool:
        return bool(self.mails or self.replies)

    async def deliver(self) -> None:
        """Return when everything is stored or given up. Cancelled, it leaves here what is not."""
        while self.replies:
            await self._keep(self.replies[0])
            self.replies.pop(0)
        if not self.mails:
            return
        if await self._together(list(self.mails)):
            self.mails.clear()
            return
        boxes: defaultdict[tuple[str, str], list[Mail]] = defaultdict(list)
        for mail in self.mails:
            boxes[mail.to, mail.lane].append(mail)
        try:
            async with asyncio.TaskGroup() as group:
                for mails in boxes.values():
                    group.create_task(self._one_box(mails))
        except* HeadraceError as e:
            raise Unavailable(f"mail of {self._agent} is not sent: {e.exceptions[0]}") from None

    async def _together(self, mails: list[Mail]) -> bool:
        """Try all in one batch; False if a mailbox has no room or is not there."""
        attempt = 0
        while True:
            try:
                await self._post.send_together(mails)
            except (NotFound, Refused):
                return False
            except HeadraceError as e:
                if self._mesh.closed.is_set():
                    raise
                log.warning("mail is not stored yet", extra={"agent": self._agent, "reason": str(e)[:200]})
            else:
                return True
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    async def _one_box(self, mails: list[Mail]) -> None:
        """One by one, each waited for: as far as there is room, the first of them go."""
        for mail in mails:
            error = await self._patiently(mail)
            if error is not None:
                await self._undelivered(mail, error)
            self.mails.remove(mail)

    async def _patiently(self, mail: Mail) -> HeadraceError | None:
        until = time.monotonic() + self._patience_s
        attempt = 0
        while True:
            try:
                await self._post.send(mail)
            except (NotFound, Refused) as e:
                late = mail.deadline_us is not None and now_us() > mail.deadline_us
                if late or e.code == "too_large" or time.monotonic() > until:
                    return e
                reason: HeadraceError = e
            except HeadraceError as e:  # away: that is nobody's fault, and ends
                if self._mesh.closed.is_set():
                    raise
                until = time.monotonic() + self._patience_s
                reason = e
            else:
                return None
            if attempt == 0:
                log.warning(
                    "mail waits", extra={"agent": self._agent, "to": mail.to, "reason": str(reason)[:200]}
                )
            await asyncio.sleep(backoff_s(attempt, cap=WAIT_CAP_S))
            attempt += 1

    async def _keep(self, reply: MailReply) -> None:
        attempt = 0
        while True:
            try:
                await keep_reply(self._mesh, reply)
            except HeadraceError as e:
                if self._mesh.closed.is_set():
                    raise
                log.warning(
                    "an answer is not stored yet", extra={"agent": self._agent, "reason": str(e)[:200]}
                )
            else:
                return
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    async def _undelivered(self, mail: Mail, error: HeadraceError) -> None:
        log.warning(
            "mail is undelivered",
            extra={"agent": self._agent, "to": mail.to, "mail": mail.id, "reason": str(error)[:200]},
        )
        message = mail_message(self._mesh, mail)
        await lost_message(
            self._mesh, message, f"undelivered: {error}", origin=self._mesh.topology.mail, key=mail.id
        )
        if mail.kind == "undelivered":
            return
        notice = Notice(
            mail=mail.id, to=mail.to, kind=mail.kind, error=MailError(code=error.code, message=str(error))
        )
        await tell(
            self._mesh,
            self._post,
            Mail(
                id=derived_id("notice", mail.id, "undelivered"),
                to=self._agent,
                sender=self._agent,
                kind="undelivered",
                body=Raw(msgspec.json.encode(notice)),
                lane="reply",
                conversation=mail.conversation,
                task=mail.task,
                hops=mail.hops,
                in_reply_to=mail.id,
                created_us=now_us(),
                traceparent=mail.traceparent,
            ),
        )


async def tell(mesh: Mesh, post: Post, mail: Mail, *, unknown_ok: bool = False) -> None:
    """Send a notice as well as it can be: a full or missing mailbox is not waited for, since what it says is logged."""
    for attempt in range(MAX_NOTICE_TRIES):
        try:
            await post.send(mail, unknown_ok=unknown_ok)
        except (NotFound, Refused) as e:
            log.warning(
                "a notice is not sent", extra={"to": mail.to, "kind": mail.kind, "reason": str(e)[:200]}
            )
            return
        except HeadraceError:
            if mesh.closed.is_set():
                raise
            await asyncio.sleep(backoff_s(attempt))
        else:
            return
