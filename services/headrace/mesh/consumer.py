"""Pulling: one inbox for each durable consumer, and a demand that is exactly accounted.

A pull asks for what can start now and no more: what is delivered is leased, and a lease that waits in a
buffer starves other workers. The server splits several open pulls as it likes, so demand is one number:
each `ask` adds, each delivery subtracts one, each final status subtracts what it says was not delivered.
Silence of two heartbeats, or a reconnect, forgets every pull and starts a new inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from headrace.contracts.specs import ConsumerSpec
from headrace.mesh import wire
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.mesh.consumer")

PULL_EXPIRES_S = 30.0
HEARTBEAT_S = 5.0
DROP_WITHIN_S = 2.0
WINDOW_BYTES = 64 << 20
MIN_PULL_BYTES = 8 << 20
_SHORT_ACK_TOKENS = 9
_ENDED = ("message size exceeds maxbytes", "batch completed")
"""Ordinary ends of a pull that is bounded in bytes."""
_SHUT = (
    "leadership change",
    "server shutdown",
    "consumer deleted",
    "stream deleted",
    "consumer is push based",
)


class Delivery:
    """One leased message. `delivered` counts its tries, 1 at first; `pending` is the backlog behind it.

    `losses` is the connection's count at its delivery.
    """

    __slots__ = (
        "_msg", "ack_wait_s", "consumer", "consumer_seq", "data", "delivered", "losses", "pending",
        "reply", "stream", "stream_seq", "subject", "timestamp_us",
    )  # fmt: skip

    def __init__(self, msg: Msg, ack_wait_s: float, losses: int = 0) -> None:
        self._msg = msg
        self.subject: str = msg.subject
        self.data: bytes = msg.data
        self.reply: str = msg.reply
        self.ack_wait_s = ack_wait_s
        self.losses = losses
        # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>, or the same
        # behind a domain and an account hash.
        parts = msg.reply.split(".")
        at = 2 if len(parts) == _SHORT_ACK_TOKENS else 4
        self.stream, self.consumer = parts[at], parts[at + 1]
        self.delivered = int(parts[at + 2])
        self.stream_seq = int(parts[at + 3])
        self.consumer_seq = int(parts[at + 4])
        self.timestamp_us = int(parts[at + 5]) // 1_000
        self.pending = int(parts[at + 6])

    @property
    def headers(self) -> dict[str, str] | None:
        """Headers of the message, if any."""
        return self._msg.headers


class PullConsumer:
    """Binds to an existing durable consumer and delivers what was asked for.

    `on_delivery` is called in the event loop and must not block. `on_demand_lost` is called when asked-for
    deliveries will not come any more (expired, reconnect, silence): the owner asks again if it still wants.
    """

    def __init__(
        self,
        mesh: Mesh,
        spec: ConsumerSpec,
        on_delivery: Callable[[Delivery], None],
        *,
        on_demand_lost: Callable[[], None] | None = None,
        expires_s: float = PULL_EXPIRES_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.spec = spec
        self.outstanding = 0
        self.pending = 0
        """Backlog as last heard: from deliveries, or 0 once a pull found nothing."""
        self._mesh = mesh
        self._on_delivery = on_delivery
        self._on_demand_lost = on_demand_lost or (lambda: None)
        self._expires_ns = int(expires_s * 1e9)
        self._heartbeat_s = heartbeat_s
        self._heartbeat_ns = int(heartbeat_s * 1e9)
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}"
        self._pulls = 0
        self._epoch_inbox = ""
        self._subscription: Any = None
        self._heard = 0.0
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._resetting: asyncio.Task[None] | None = None
        self._stopped = True

    async def start(self) -> None:
        """Subscribe the inbox; nothing is pulled before `ask`."""
        self._stopped = False
        self._mesh.on_reconnect(self._reset_soon)
        await self._new_inbox()
        self._arm()

    async def stop(self) -> None:
        """End all pulls. What the broker had sent already is still delivered; then nothing comes any more."""
        self._stopped = True
        self._mesh.off_reconnect(self._reset_soon)
        if self._timer:
            self._timer.cancel()
        if self._resetting:
            self._resetting.cancel()
        await self._drop_inbox()
        self.outstanding = 0

    def ask(self, n: int, *, max_bytes: int = 0) -> None:
        """Ask for `n` more messages; they come when there are any.

        With `max_bytes` the pull ends, and `on_demand_lost` is called, before a message that would go over it.
        """
        if self._stopped or n <= 0 or not self._subscription:
            return
        if self.outstanding == 0:
            self._heard = time.monotonic()
        self._pulls += 1
        limits = b'%d,"max_bytes":%d' % (n, max_bytes) if max_bytes else b"%d" % n
        body = b'{"batch":%b,"expires":%d,"idle_heartbeat":%d}' % (
            limits,
            self._expires_ns,
            self._heartbeat_ns,
        )
        self.outstanding += n
        reply = f"{self._epoch_inbox}.{self._pulls}"
        wire.send_nowait(self._mesh.nc, (wire.frame(OutMessage(self._next, body), reply),))

    # --- what arrives ------------------------------------------------------------------------------
    async def _on_message(self, losses: int, msg: Msg) -> None:
        self._heard = time.monotonic()
        if msg.reply.startswith("$JS.ACK."):
            self._failures = 0
            if self.outstanding > 0:
                self.outstanding -= 1
            delivery = Delivery(msg, self.spec.ack_wait_s, losses)
            self.pending = delivery.pending
            self._on_delivery(delivery)
        elif msg.headers and msg.subject.startswith(self._epoch_inbox):
            self._on_status(msg.headers)

    def _on_status(self, headers: dict[str, str]) -> None:
        status, text = headers.get("Status", ""), headers.get("Description", "").lower()
        if status == "100":
            return
        lost = headers.get("Nats-Pending-Messages", "")
        if status in ("404", "408") or (status == "409" and lost.isdigit() and not text.startswith(_SHUT)):
            self.outstanding = max(0, self.outstanding - int(lost or 0))
            if status == "404":
                self.pending = 0
            if status == "409" and not text.startswith(_ENDED):
                self._later("pull was ended", text)
            else:
                self._on_demand_lost()
        elif status in ("409", "503"):
            level = logging.ERROR if "deleted" in text else logging.WARNING
            self._later("pulling was refused", text or status, level=level)
        else:
            log.error(
                "unexpected status", extra={"consumer": self.spec.durable, "status": status, "text": text}
            )
            self._later("pulling was refused", text or status)

    def _later(self, what: str, why: str, *, level: int = logging.WARNING) -> None:
        """Start over after a back-off, with one log line for it."""
        if self._stopped or (self._resetting and not self._resetting.done()):
            return
        delay = backoff_s(self._failures, base=0.1)
        self._failures += 1
        extra = {
            "consumer": f"{self.spec.stream}/{self.spec.durable}",
            "reason": why,
            "retry_in_s": round(delay, 2),
        }
        log.log(level, what, extra=extra)
        self._resetting = asyncio.get_running_loop().create_task(self._reset(delay))

    # --- starting over -----------------------------------------------------------------------------
    def _reset_soon(self) -> None:
        if not self._stopped and not (self._resetting and not self._resetting.done()):
            self._resetting = asyncio.get_running_loop().create_task(self._reset(0.0))

    async def _reset(self, delay_s: float) -> None:
        self.outstanding = 0
        await self._drop_inbox()
        await asyncio.sleep(delay_s)
        if not self._stopped:
            await self._new_inbox()
            self._on_demand_lost()

    async def _new_inbox(self) -> None:
        self._epoch_inbox = self._mesh.inbox()
        receive = functools.partial(self._on_message, self._mesh.losses)
        self._subscription = await self._mesh.nc.subscribe(
            f"{self._epoch_inbox}.*", cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def _drop_inbox(self) -> None:
        """Unsubscribe; what is on its way is still delivered, else it would wait for the end of its lease."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._mesh.nc.is_closed:
            with contextlib.suppress(nats.errors.Error, TimeoutError):  # gone meanwhile: so are the pulls
                async with asyncio.timeout(DROP_WITHIN_S):
                    await subscription.drain()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._check)

    def _check(self) -> None:
        """Health is receiving, not TCP: a consumer can be deaf while the connection is fine."""
        if self._stopped:
            return
        silent_s = time.monotonic() - self._heard
        if self.outstanding and self._mesh.connected and silent_s > 2 * self._heartbeat_s:
            self._later("consumer is silent", f"nothing for {silent_s:.0f} s")
        self._arm()


class BatchConsumer:
    """Deliveries in lists, for whoever works by transaction.

    Holds at most `window` messages that are delivered or asked for and not yet given back by `release`, and
    asks for no more while those it holds have `WINDOW_BYTES` (so twice that is the most that can be here).
    A list is given out when `batch` are there, or `wait_s` after its first.
    """

    def __init__(self, mesh: Mesh, spec: ConsumerSpec, *, batch: int, wait_s: float, window: int = 0) -> None:
        self._batch = batch
        self._wait_s = wait_s
        self._window = window or 2 * batch
        self._held = 0
        self._held_bytes = 0
        self._pull_bytes = max(MIN_PULL_BYTES, WINDOW_BYTES * batch // (2 * self._window))
        self._ready: list[Delivery] = []
        self._arrived = asyncio.Event()
        self._stopped = False
        self._consumer = PullConsumer(mesh, spec, self._on_delivery, on_demand_lost=self._refill)

    async def start(self) -> None:
        """Begin to pull."""
        await self._consumer.start()
        self._refill()

    async def stop(self) -> None:
        """Pull no more; what was delivered is still given out, then the iteration ends."""
        await self._consumer.stop()
        self._stopped = True
        self._arrived.set()

    @property
    def waiting(self) -> Sequence[Delivery]:
        """Delivered, and not given out yet: their leases run."""
        return self._ready

    def release(self, settled: Sequence[Delivery]) -> None:
        """These messages, given out before, are settled: as many may be asked for."""
        self._held -= len(settled)
        self._held_bytes -= sum(len(d.data) for d in settled)
        self._refill()

    def _on_delivery(self, delivery: Delivery) -> None:
        self._held += 1
        self._held_bytes += len(delivery.data)
        self._ready.append(delivery)
        self._arrived.set()

    def _refill(self) -> None:
        if self._held_bytes >= WINDOW_BYTES:
            return
        free = self._window - self._held - self._consumer.outstanding
        # Half a batch at a time, so that pulls are few; an idle consumer has its whole window open.
        if not self._stopped and (free >= max(1, self._batch // 2) or self._consumer.outstanding == 0):
            self._consumer.ask(free, max_bytes=self._pull_bytes)

    async def __aiter__(self) -> AsyncIterator[list[Delivery]]:
        while True:
            if not self._ready:
                if self._stopped:
                    return
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if len(self._ready) < self._batch and self._wait_s > 0 and not self._stopped:
                await self._fill()
            taken, self._ready = self._ready[: self._batch], self._ready[self._batch :]
            yield taken

    async def _fill(self) -> None:
        """Wait until a batch is full or its time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while len(self._ready) < self._batch and not self._stopped and (left := deadline - loop.time()) > 0:
            self._arrived.clear()
            try:
                async with asyncio.timeout(left):
                    await self._arrived.wait()
            except TimeoutError:
                return
