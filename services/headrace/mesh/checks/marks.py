"""Whether a stream lost what it had acknowledged: what was seen of it before, against what it shows now.

A broker cannot tell this of itself. After a lost disk block, a kill without synced writes, or a restored backup it
starts with fewer messages, and says nothing. So whoever depends on a stream keeps a mark of it elsewhere (completion in
its data plane), and compares.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

from msgspec import Struct

from headrace.contracts.errors import NotFound
from headrace.mesh.checks.findings import Unread, attempt
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import get_message, stream_info

LOOKS: Final = 3
"""A difference counts if it stands this often: a leader that was elected just now may still be catching up."""
BETWEEN_LOOKS_S: Final = 0.5


class Mark(Struct, frozen=True, kw_only=True):
    """A stream as it was seen: when it was made, how many messages it held, its last sequence.

    `digest` is that of the message with the last sequence, None if there was none (an acked task is gone).
    """

    stream: str
    created: str
    last_seq: int
    messages: int
    digest: str | None = None


async def read_mark(mesh: Mesh, stream: str) -> Mark | None:
    """The stream as it is now, None if it is missing; raise `Unavailable` if it cannot be read."""
    try:
        info = await stream_info(mesh, stream)
    except NotFound:
        return None
    state = info["state"]
    last = int(state["last_seq"])
    digest = await _digest(mesh, stream, last)
    return Mark(
        stream=stream,
        created=str(info["created"]),
        last_seq=last,
        messages=int(state["messages"]),
        digest=digest if isinstance(digest, str) else None,
    )


async def find_loss(mesh: Mesh, mark: Mark, *, kept: bool = False) -> str | None:
    """One sentence if the stream of `mark` has lost something since, None if not; looks again before it says so.

    `kept`: nothing is ever removed from the stream, so a message that is not there any more is lost.
    """
    loss = await _compare(mesh, mark, kept=kept)
    for _ in range(LOOKS - 1):
        if loss is None:
            break
        await asyncio.sleep(BETWEEN_LOOKS_S)
        loss = await _compare(mesh, mark, kept=kept)
    return loss


async def _compare(mesh: Mesh, mark: Mark, *, kept: bool) -> str | None:
    stream = mark.stream
    try:
        info = await stream_info(mesh, stream)
    except NotFound:
        return f"{stream} is gone, and what it held: {mark.messages:,} messages" if mark.messages else None
    last = int(info["state"]["last_seq"])
    if info["created"] != mark.created:
        if not mark.messages:
            return None  # an empty stream that is made anew has lost nothing
        return (
            f"{stream} was made anew at {str(info['created'])[:19]}: the {mark.messages:,} messages that it held, "
            f"up to number {mark.last_seq:,}, are gone"
        )
    if last < mark.last_seq:
        return f"{stream} went back from {mark.last_seq:,} to {last:,}: the broker's storage lost acknowledged data"
    if mark.digest is not None:
        now = await _digest(mesh, stream, mark.last_seq)
        if now is None and kept:
            lost = f"message number {mark.last_seq:,}"
            return f"{stream} cannot give its {lost} any more: the broker's storage is damaged"
        if isinstance(now, str) and now != mark.digest:
            return (
                f"{stream} has another message as number {mark.last_seq:,} than before: the broker's storage lost "
                "acknowledged data, and the numbers were given again"
            )
    return None


async def _digest(mesh: Mesh, stream: str, sequence: int) -> str | Unread | None:
    """SHA-256 of a message with its subject and headers; None if it is not there, `Unread` if it may not be read."""
    if not sequence:
        return None
    message = await attempt(get_message(mesh, stream, sequence))
    if message is None or isinstance(message, Unread):
        return message
    digest = hashlib.sha256(message.subject.encode())
    for name, value in sorted(message.headers.items()):
        digest.update(f"\0{name}\0{value}".encode())
    digest.update(b"\0\0" + message.data)
    return digest.hexdigest()
