"""Storing messages: nothing counts as stored without its PubAck, from the stream that was meant.

A time-out is not a failure: the message may be stored. Callers find out from durable state (the last
message of a subject), never by guessing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg

from headrace.contracts.errors import Unavailable, Undecodable
from headrace.mesh import wire
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import check
from headrace.mesh.wire import OutMessage

MAX_BATCH = 1_000
"""Messages of one atomic batch, the server's bound."""

__all__ = ["MAX_BATCH", "AtomicBatch", "OutMessage", "PubAck", "publish", "publish_message"]


class PubAck(Struct, frozen=True, kw_only=True):
    """What the broker says once a message, or a whole batch, is stored; `seq` is the last one's."""

    stream: str
    seq: int
    duplicate: bool = False
    batch: str = ""
    count: int = 1


def read_puback(answer: Msg, stream: str) -> PubAck:
    """The PubAck in `answer`; raise `JetStreamError` for a refusal, `Undecodable` for anybody else's reply.

    The stream is compared since any subscriber of the subject could have answered when the stream is missing.
    """
    try:
        body = msgspec.json.decode(answer.data)
        ack = msgspec.convert(check(body), PubAck)
    except msgspec.MsgspecError:
        msg = f"the answer on {answer.subject} is no PubAck: is the stream {stream} missing?"
        raise Undecodable(msg) from None
    if ack.stream != stream:
        msg = f"stored by stream {ack.stream[:80]!r} instead of {stream!r}: its subjects overlap"
        raise Unavailable(msg, code="wrong_stream")
    return ack


async def publish(
    mesh: Mesh,
    stream: str,
    subject: str,
    data: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    expected_last_subject_seq: int | None = None,
    msg_id: str | None = None,
    timeout_s: float = 5.0,
) -> PubAck:
    """Store one message and return its PubAck.

    With `expected_last_subject_seq` it is a compare-and-set on the subject: error 10071 means that
    somebody (perhaps this very call, its ack lost) was there before. Raise `Refused` (too large),
    `JetStreamError` (refused, nothing stored), `Unavailable` (not known whether it is stored).
    """
    block = wire.header_block(headers) if headers else b""
    if msg_id is not None:
        block += wire.header_block({"Nats-Msg-Id": msg_id})
    message = OutMessage(subject, data, block)
    return await publish_message(
        mesh, stream, message, expected_last_subject_seq=expected_last_subject_seq, timeout_s=timeout_s
    )


async def publish_message(
    mesh: Mesh,
    stream: str,
    message: OutMessage,
    *,
    expected_last_subject_seq: int | None = None,
    timeout_s: float = 5.0,
) -> PubAck:
    """`publish` for a prepared message."""
    more = _expectations(stream, expected_last_subject_seq)
    return read_puback(await mesh.ask(message, timeout_s=timeout_s, more_headers=more), stream)


def _expectations(stream: str, last_subject_seq: int | None) -> bytes:
    block = b"Nats-Expected-Stream: %b\r\n" % stream.encode()
    if last_subject_seq is not None:
        block += b"Nats-Expected-Last-Subject-Sequence: %d\r\n" % last_subject_seq
    return block


class AtomicBatch:
    """Up to 1,000 messages that are stored all or none, by one ack.

    `stage` sends members that the broker holds back, `commit` sends the last one and waits. Several
    batches may be staged at once (the server keeps 50 a stream, 10 s each); their commits are separate.
    """

    def __init__(self, mesh: Mesh, stream: str, *, timeout_s: float = 10.0) -> None:
        self._mesh = mesh
        self._stream = stream
        self._timeout_s = timeout_s
        self._id = uuid.uuid4().hex
        self._size = 0

    async def stage(self, messages: Iterable[OutMessage]) -> None:
        """Send members of the batch; the very first waits for the broker to open it.

        Raise `Refused` for one over max_payload, `JetStreamError` if the broker opens no batch now.
        """
        limit, prefix = (
            self._mesh.max_payload,
            b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: " % self._id.encode(),
        )
        frames: list[bytes] = []
        for message in messages:
            wire.check_size(message, limit, 90)
            self._size += 1
            more = b"%b%d\r\n" % (prefix, self._size)
            if self._size == 1:
                more += _expectations(self._stream, None)
                answer = await self._mesh.ask(message, timeout_s=self._timeout_s, more_headers=more)
                if answer.data:
                    check(msgspec.json.decode(answer.data))
            else:
                frames.append(wire.frame(message, "", more))
        if self._size >= MAX_BATCH:
            msg = f"an atomic batch has {MAX_BATCH} messages at most, this one got {self._size + 1}"
            raise ValueError(msg)
        await self._mesh.publish_frames(frames)

    async def commit(self, message: OutMessage, *, expected_last_subject_seq: int | None = None) -> PubAck:
        """Send the last member and wait until the whole batch is stored.

        Raise `JetStreamError` if it is refused (nothing is stored), `Unavailable` if that is not known.
        """
        if self._size == 0:
            return await publish_message(
                self._mesh,
                self._stream,
                message,
                expected_last_subject_seq=expected_last_subject_seq,
                timeout_s=self._timeout_s,
            )
        self._size += 1
        more = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\nNats-Batch-Commit: 1\r\n" % (
            self._id.encode(), self._size,
        )  # fmt: skip
        more += _expectations(self._stream, expected_last_subject_seq)
        answer = await self._mesh.ask(message, timeout_s=self._timeout_s, more_headers=more)
        ack = read_puback(answer, self._stream)
        if ack.count != self._size:
            msg = f"the broker stored {ack.count} of the {self._size} messages of a batch"
            raise Unavailable(msg)
        return ack


async def publish_all(
    mesh: Mesh, stream: str, messages: list[OutMessage], *, timeout_s: float = 10.0
) -> PubAck:
    """Store all of `messages` (1..1000) or none, with one ack."""
    if len(messages) == 1:
        return await publish_message(mesh, stream, messages[0], timeout_s=timeout_s)
    batch = AtomicBatch(mesh, stream, timeout_s=timeout_s)
    await batch.stage(messages[:-1])
    return await batch.commit(messages[-1])


async def store_expecting(
    mesh: Mesh, stream: str, members: Sequence[tuple[OutMessage, int | None]], *, timeout_s: float = 10.0
) -> PubAck:
    """Store all members (1..1000) or none, each only if its subject's last sequence is the number beside it, if any.

    Everything is sent at once: one round trip. Sequences of the members follow one another, `seq` is the last one's.
    Raise `JetStreamError` if nothing is stored (10071: a number was wrong), `Unavailable` if that is not known.
    """
    *before, (last, expected) = members
    if not before:
        return await publish_message(
            mesh, stream, last, expected_last_subject_seq=expected, timeout_s=timeout_s
        )
    head = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: " % uuid.uuid4().hex.encode()
    frames: list[bytes] = []
    for number, (message, seq) in enumerate(before, 1):
        more = b"%b%d\r\n%b" % (head, number, _expectations(stream, seq))
        wire.check_size(message, mesh.max_payload, len(more))
        frames.append(wire.frame(message, "", more))
    await mesh.publish_frames(frames)
    more = b"%b%d\r\nNats-Batch-Commit: 1\r\n%b" % (head, len(members), _expectations(stream, expected))
    ack = read_puback(await mesh.ask(last, timeout_s=timeout_s, more_headers=more), stream)
    if ack.count != len(members):
        msg = f"the broker stored {ack.count} of the {len(members)} messages of a batch"
        raise Unavailable(msg)
    return ack
