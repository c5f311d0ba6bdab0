"""Waiting calls, taken as there is room: each is conducted, answered, and acked; what is not decided goes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Raw

from headrace.contracts import codec
from headrace.contracts.calls import CallAnswer, CallMessage
from headrace.contracts.errors import HeadraceError, NotFound, Refused, Unavailable, Undecodable
from headrace.contracts.mail import CALL_ANSWER, GATEWAY, Mail
from headrace.gateway.telemetry import traced
from headrace.gateway.turns import Turns
from headrace.gateway.way import Later
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.consumer import Delivery, PullConsumer
from headrace.mesh.crash import crash_point
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.mail import Post, new_id, now_us
from headrace.mesh.settle import Done, Reject, Settler
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.gateway")

AWAY_S = 1.0
"""When a call is looked at again that could not be written because the ledger was away."""
HEADROOM = 4_096
"""Bytes of a message that are kept for what is beside the answer."""
TRIES = 4
INBOX = "_INBOX."
"""Answers go to askers' own inboxes only: the subject is the asker's word, and could name anything."""

Conduct = Callable[[CallMessage], Awaitable[CallAnswer | Later]]
Whole = Callable[[CallAnswer], Awaitable[CallAnswer]]
"""Puts the body of an outcome into an answer, if it lies beside the ledger and fits into a message."""


class Calls:
    """Takes calls for one gateway: at most `concurrency` at once, beside those that are at their callees."""

    def __init__(
        self,
        mesh: Mesh,
        leases: LeaseKeeper,
        conduct: Conduct,
        whole: Whole,
        turns: Turns,
        *,
        concurrency: int,
    ) -> None:
        self._mesh = mesh
        self._leases = leases
        self._conduct = conduct
        self._whole = whole
        self._turns = turns
        turns.begun = self._ask
        self._concurrency = concurrency
        self._settler = Settler(mesh, leases)
        self._post = Post(mesh)
        self._running: set[asyncio.Task[None]] = set()
        self._consumer = PullConsumer(
            mesh, mesh.topology.calls_consumer(), self._receive, on_demand_lost=self._ask
        )
        self._stopping = False
        self.done = 0

    async def start(self) -> None:
        """Begin to pull."""
        await self._consumer.start()
        self._ask()

    async def stop(self, grace_s: float) -> None:
        """Pull no more; what is under way is brought to its end, for as long as `grace_s`. The rest lapses."""
        self._stopping = True
        await self._consumer.stop()
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        await self._settler.drain()

    def _ask(self) -> None:
        # Calls at callees are bounded there: however many hang at one callee, there is room for those of others.
        in_hand = len(self._running) - self._turns.at_callees
        free = self._concurrency - in_hand - self._consumer.outstanding
        # A quarter at a time, so that pulls are few; an idle gateway has all its places open.
        if not self._stopping and (free >= max(1, self._concurrency // 4) or not self._consumer.outstanding):
            self._consumer.ask(free)

    def _receive(self, delivery: Delivery) -> None:
        self._leases.add(delivery)
        task = asyncio.get_running_loop().create_task(self._take(delivery))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call could not be brought to its end", exc_info=error)
        self._ask()

    async def _take(self, delivery: Delivery) -> None:
        if self._stopping:
            self._settler.nak(delivery, 0.2)
            return
        try:
            message = traced(codec.CALL.decode(delivery.data, delivery.headers), delivery.headers)
            if not delivery.subject.endswith(f".{message.tenant}.{message.agent}"):
                raise Undecodable("the call names another tenant or agent than its subject")
        except Undecodable as e:
            await self._settler.settle(delivery, Reject(str(e)))
            return
        try:
            answer = await self._conduct(message)
        except Unavailable as e:
            log.warning("a call waits for the ledger", extra={"reason": str(e)[:200]})
            self._settler.nak(delivery, AWAY_S)
            return
        except (
            Exception
        ):  # the ledger's records do not fit together, or a fault of ours: nobody goes on with it
            log.exception("a call cannot be conducted", extra={"request": message.request})
            self._settler.nak(delivery, 30.0)
            return
        if isinstance(answer, Later):
            if answer.awaiting:
                await self._answer(message, CallAnswer(call_id=answer.call, state="awaiting_approval"))
            self._settler.nak(delivery, answer.delay_s)
            return
        answer = await self._whole(answer)
        await self._answer(message, answer)
        await self._to_mailbox(message, answer)
        crash_point("call-replied")
        await self._settler.begin(delivery, Done())
        self.done += 1

    async def _answer(self, message: CallMessage, answer: CallAnswer) -> None:
        if message.reply_to is None or not message.reply_to.startswith(INBOX):
            return
        try:
            await self._mesh.publish(OutMessage(message.reply_to, self._fitting(answer)))
        except HeadraceError as e:  # whoever asks again gets it from the ledger
            log.info("an answer was not sent", extra={"call": answer.call_id, "reason": str(e)[:200]})

    async def _to_mailbox(self, message: CallMessage, answer: CallAnswer) -> None:
        """Store the answer where the agent finds it, whatever dies meanwhile. A full mailbox is not waited for."""
        if not message.to_mailbox:
            return
        mail = Mail(
            id=new_id(),  # of each answering: one that is asked for again must not be taken for a repeat
            to=message.agent,  # the subject of the call says so too: nobody asks in another one's name
            sender=GATEWAY,
            kind=CALL_ANSWER,
            body=Raw(self._fitting(answer)),
            lane="reply",
            conversation=message.conversation,
            in_reply_to=message.request,
            created_us=now_us(),
        )
        reason: HeadraceError | None = None
        for attempt in range(TRIES):
            try:
                await self._post.send(mail)
            except (NotFound, Refused) as e:
                reason = e
                break
            except HeadraceError as e:
                reason = e
                await asyncio.sleep(backoff_s(attempt))
            else:
                return
        log.warning(
            "an answer is not in its mailbox", extra={"call": answer.call_id, "reason": str(reason)[:200]}
        )

    def _fitting(self, answer: CallAnswer) -> bytes:
        data = msgspec.json.encode(answer)
        if len(data) + HEADROOM <= self._mesh.max_payload:
            return data
        short = {"type": "too_large", "message": "the answer is larger than a message: `headrace calls show`"}
        return msgspec.json.encode(msgspec.structs.replace(answer, outcome=None, error=short))
