"""One outcome value, one function that settles: nothing else acks, naks or terminates.

    Done(results)   store the results, wait for their PubAck, then ack (confirmed)
    Retry(delay)    give the message back, to be delivered again after the delay
    Reject(reason)  store the raw message among the dead letters, then terminate it

Settles that arrive together are stored in one atomic batch and acked together (group commit). A settle
that has begun goes on when its caller is cancelled; one that was not begun does nothing, and redelivery is
the broker's job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from msgspec import Struct

from headrace.contracts import codec
from headrace.contracts.errors import HeadraceError, Refused, Unavailable
from headrace.contracts.messages import DeadLetter
from headrace.mesh import wire
from headrace.mesh.acks import ACK, Acker
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.consumer import Delivery
from headrace.mesh.crash import crash_point
from headrace.mesh.jsapi import STREAM_IS_FULL, JetStreamError
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.publisher import publish, publish_all
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.mesh.settle")

GROUP = 500
"""Settles of one group commit at most."""


class Done(Struct, frozen=True):
    """The work is done; `results` (0 or more, all for the settler's stream) stand for it."""

    results: tuple[OutMessage, ...] = ()


class Retry(Struct, frozen=True):
    """Not now: deliver again after `delay_s` seconds."""

    delay_s: float
    error: str = ""


class Reject(Struct, frozen=True):
    """Never: no consumer can take these bytes."""

    reason: str


Outcome = Done | Retry | Reject


class _Group(Struct):
    deliveries: list[Delivery]
    futures: list[asyncio.Future[None]]
    results: list[OutMessage]


class Settler:
    """Settles deliveries of one connection; `stream` is where results go."""

    def __init__(self, mesh: Mesh, leases: LeaseKeeper | None = None, *, stream: str | None = None) -> None:
        self._mesh = mesh
        self._leases = leases
        self._stream = stream or mesh.topology.results
        self._waiting: list[tuple[Delivery, Done, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._ackers: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._acker = Acker(mesh)
        self._in_turn = asyncio.Lock()

    async def settle(self, delivery: Delivery, outcome: Outcome) -> None:
        """Carry `outcome` out and return when the broker has confirmed it.

        Raise `Refused` if a result is too large to be stored (settle again with a smaller one), and
        `Unavailable` if the acks cannot be confirmed (the message will come again; landing is idempotent).
        While the broker is away or the stream full, it keeps trying: the lease is renewed meanwhile.
        """
        if isinstance(outcome, Done):
            for message in outcome.results:
                wire.check_size(message, self._mesh.max_payload, 200)
            await asyncio.shield(self.begin(delivery, outcome))
        else:
            await asyncio.shield(self._give_back(delivery, outcome))

    def begin(self, delivery: Delivery, outcome: Done) -> asyncio.Future[None]:
        """`settle` without waiting: the future is done when the ack is confirmed. Sizes are the caller's care."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # once: each call asks the kernel for the process id
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((delivery, outcome, future))
        if self._flusher is None or self._flusher.done():
            self._flusher = self._loop.create_task(self._flush())
        return future

    async def drain(self) -> None:
        """Return when everything begun is settled."""
        while self._waiting or self._ackers or (self._flusher and not self._flusher.done()):
            tasks = [*self._ackers, *([self._flusher] if self._flusher and not self._flusher.done() else [])]
            if tasks:
                await asyncio.wait(tasks)
            else:
                await asyncio.sleep(0)

    # --- done --------------------------------------------------------------------------------------
    async def _flush(self) -> None:
        # One turn of the loop, so that what finishes together is stored together.
        await asyncio.sleep(0)
        while self._waiting:
            group = self._take_group()
            try:
                if group.results:
                    await self._store(group.results)
            except Exception as e:  # noqa: BLE001  (whatever it is, those who wait must hear of it)
                _fail(group.futures, e)
                continue
            crash_point("result-published")
            task = asyncio.get_running_loop().create_task(self._ack_group(group))
            self._ackers.add(task)
            task.add_done_callback(self._ackers.discard)

    def _take_group(self) -> _Group:
        group = _Group([], [], [])
        taken = 0
        for delivery, outcome, future in self._waiting:
            if taken and (taken >= GROUP or len(group.results) + len(outcome.results) > GROUP):
                break
            taken += 1
            group.deliveries.append(delivery)
            group.futures.append(future)
            group.results.extend(outcome.results)
        del self._waiting[:taken]
        return group

    async def _store(self, results: list[OutMessage]) -> None:
        attempt = 0
        while True:
            try:
                await publish_all(self._mesh, self._stream, results)
            except Refused:
                raise
            except HeadraceError as e:
                # Full, away, or unknown: storing twice is harmless (landing is keyed), losing is not.
                if self._mesh.closed.is_set():
                    raise
                if isinstance(e, JetStreamError) and e.err_code in STREAM_IS_FULL and len(results) > 1:
                    # Refused whole: a part may fit, and all of it might be more than the stream ever takes.
                    middle = len(results) // 2
                    await self._store(results[:middle])
                    await self._store(results[middle:])
                    return
                delay = backoff_s(attempt)
                attempt += 1
                log.warning(
                    "results are not stored yet",
                    extra={"results": len(results), "reason": str(e)[:300], "retry_in_s": round(delay, 2)},
                )
                await asyncio.sleep(delay)
            else:
                return

    async def _ack_group(self, group: _Group) -> None:
        try:
            async with self._in_turn:  # a run begins where the acked one before it ended
                forgotten = await self.ack_all(group.deliveries)
        except HeadraceError as e:
            _fail(group.futures, e)
            return
        crash_point("task-acked")
        for delivery, future in zip(group.deliveries, group.futures, strict=True):
            if delivery in forgotten:
                _fail([future], Unavailable("the broker was restarted and has forgotten this delivery"))
            elif not future.done():
                future.set_result(None)

    async def ack_all(self, deliveries: Sequence[Delivery]) -> set[Delivery]:
        """Ack all, confirmed; return those that a restarted broker has forgotten, and will deliver again.

        Raise `Unavailable` if the others are not confirmed after five tries.
        """
        forgotten = await self._acker.ack(deliveries)
        if self._leases is not None:
            for d in deliveries:
                self._leases.discard(d)
        return forgotten

    # --- given back --------------------------------------------------------------------------------
    async def _give_back(self, delivery: Delivery, outcome: Retry | Reject) -> None:
        if isinstance(outcome, Retry):
            self.nak(delivery, outcome.delay_s)
            return
        await dead_letter(self._mesh, delivery, outcome.reason, origin=delivery.stream)
        reason = outcome.reason.replace("\r", " ").replace("\n", " ")[:200]
        await self._mesh.publish(OutMessage(delivery.reply, f"+TERM {reason}".encode()))
        if self._leases is not None:
            self._leases.discard(delivery)

    def ack_soon(self, delivery: Delivery) -> None:
        """Ack without waiting for the broker's word: for whoever recognises a redelivery by its own committed state."""
        wire.send_nowait(self._mesh.nc, (wire.frame(OutMessage(delivery.reply, ACK)),))
        if self._leases is not None:
            self._leases.discard(delivery)

    def nak(self, delivery: Delivery, delay_s: float) -> None:
        """Give a message back without waiting; always with a delay, since a bare nak burns tries at once."""
        body = b'-NAK {"delay": %d}' % max(1, int(delay_s * 1e9))
        wire.send_nowait(self._mesh.nc, (wire.frame(OutMessage(delivery.reply, body)),))
        if self._leases is not None:
            self._leases.discard(delivery)


def _fail(futures: list[asyncio.Future[None]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


async def dead_letter(mesh: Mesh, delivery: Delivery, reason: str, *, origin: str) -> None:
    """Store a message whole among the dead letters; keeps trying while the broker is away.

    The id makes a second copy of the same delivery harmless within the stream's window.
    """
    letter = DeadLetter(
        origin=origin,
        subject=delivery.subject,
        reason=reason[:2_048],
        data=delivery.data,
        headers=dict(delivery.headers or {}),
        stream=delivery.stream,
        sequence=delivery.stream_seq,
        tries=delivery.delivered,
        at_us=time.time_ns() // 1_000,
    )
    await _bury(mesh, letter, f"{delivery.stream}.{delivery.stream_seq}")


async def lost_message(mesh: Mesh, message: OutMessage, reason: str, *, origin: str, key: str) -> None:
    """`dead_letter` for a message that no stream took: `key` names it."""
    lines = message.headers.decode().split("\r\n")
    letter = DeadLetter(
        origin=origin,
        subject=message.subject,
        reason=reason[:2_048],
        data=message.data,
        headers=dict(line.split(": ", 1) for line in lines if ": " in line),
        at_us=time.time_ns() // 1_000,
    )
    await _bury(mesh, letter, key)


async def _bury(mesh: Mesh, letter: DeadLetter, key: str) -> None:
    data = codec.DEAD_LETTER.encode(letter)
    if len(data) + 1_024 > mesh.max_payload:  # base64 grows: keep what fits, and say how much there was
        note = f"{letter.reason[:1_900]} (cut: the message had {len(letter.data)} bytes)"
        room = max(0, (mesh.max_payload - 8_192) * 3 // 4 - 4_096)
        data = codec.DEAD_LETTER.encode(_cut(letter, room, note))
    attempt = 0
    while True:
        try:
            await publish(
                mesh,
                mesh.topology.dead,
                mesh.subjects.dead(letter.origin),
                data,
                headers={codec.SCHEMA_HEADER: codec.DEAD_LETTER.name},
                msg_id=key,
            )
        except Unavailable as e:
            if mesh.closed.is_set():
                raise
            delay = backoff_s(attempt)
            attempt += 1
            log.warning(
                "dead letter is not stored yet", extra={"reason": str(e)[:300], "retry_in_s": round(delay, 2)}
            )
            await asyncio.sleep(delay)
        else:
            log.warning(
                "message is dead-lettered", extra={"subject": letter.subject, "reason": letter.reason[:300]}
            )
            return


def _cut(letter: DeadLetter, room: int, reason: str) -> DeadLetter:
    return DeadLetter(
        origin=letter.origin,
        subject=letter.subject,
        reason=reason,
        data=letter.data[:room],
        headers={},
        stream=letter.stream,
        sequence=letter.sequence,
        tries=letter.tries,
        at_us=letter.at_us,
    )
