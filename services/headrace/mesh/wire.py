"""Frames on the wire, many at once: the one place that reaches into nats-py's internals.

`Client.publish` validates, encodes and schedules each message by itself, about 8 µs each; a batch of
a thousand is one buffer here, under 2 µs each. nats-py is pinned to the minor version that this was
written for, and `tests/mesh/test_wire.py` compares the frames with what `publish` sends.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from nats.aio.client import Client
from nats.errors import FlushTimeoutError

from headrace.contracts.errors import InvalidInput, Refused, Unavailable

_LINE = b"NATS/1.0\r\n"
_PING_AGAIN_S = 1.0
_CACHED_BLOCK = 128
"""Header blocks up to this many bytes are remembered: most messages of a stream carry the same one."""


class Connection(Client):
    """nats-py's client with a quick way through the headers of plain messages.

    Its own parser takes a sixth of a worker's time. Status lines and anything unusual still go to it.

    And with a flush that bears trouble: a pong that is lost with its connection is asked for again, and one that comes
    when its flush was given up is let pass. In the library the first waits in vain, and the second ends the task that
    reads: the connection stays up and hears nothing any more.
    """

    async def flush(self, timeout: float = 10.0) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return once the broker has answered a ping; `nats.errors.FlushTimeoutError` after `timeout` seconds."""
        clock = asyncio.get_running_loop().time
        until = clock() + timeout
        while True:
            try:
                await super().flush(max(0.01, min(_PING_AGAIN_S, until - clock())))  # pyright: ignore[reportArgumentType]
            except FlushTimeoutError:
                if clock() >= until:
                    raise
            else:
                return

    async def _process_pong(self) -> None:
        pongs = cast("list[asyncio.Future[bool]]", self._pongs)  # pyright: ignore[reportUnknownMemberType]
        if pongs and pongs[0].done():
            pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
        else:
            await super()._process_pong()

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if not headers:
            return None
        if not headers.startswith(_LINE):
            return await super()._process_headers(headers)
        block = bytes(headers)
        return _known_headers(block) if len(block) <= _CACHED_BLOCK else _headers(block)


def _headers(block: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in block.decode("utf-8", "surrogateescape").split("\r\n")[1:]:
        key, colon, value = line.partition(":")
        if colon:
            found[key] = value.strip()
    return found


_known_headers = functools.lru_cache(maxsize=256)(_headers)


class OutMessage(NamedTuple):
    """One message to be stored: `headers` is a block made by `header_block`, or empty."""

    subject: str
    data: bytes
    headers: bytes = b""


def header_block(headers: Mapping[str, str]) -> bytes:
    """The header lines of a message, without the version line and the closing blank one.

    Raise `InvalidInput` for control characters: a line break in a value would forge further headers.
    """
    out: list[str] = []
    for key, value in headers.items():
        if any(c < " " or c == "\x7f" for c in key + value) or ":" in key:
            msg = f"header {key[:80]!r} has a control character"
            raise InvalidInput(msg, field="headers")
        out.append(f"{key}: {value}\r\n")
    return "".join(out).encode()


def frame(message: OutMessage, reply: str = "", more_headers: bytes = b"") -> bytes:
    """The PUB or HPUB frame of `message`."""
    subject, data, headers = message
    to = f"{subject} {reply} " if reply else f"{subject} "
    if headers or more_headers:
        size = len(headers) + len(more_headers) + 12  # the version line and the blank line
        return b"HPUB %b%d %d\r\n%b%b%b\r\n%b\r\n" % (
            to.encode(), size, size + len(data), _LINE, more_headers, headers, data,
        )  # fmt: skip
    return b"PUB %b%d\r\n%b\r\n" % (to.encode(), len(data), data)


def check_size(message: OutMessage, max_payload: int, extra: int = 0) -> None:
    """Raise `Refused` if payload and headers exceed `max_payload`: sending them would end the connection."""
    size = len(message.data) + len(message.headers) + 12 + extra
    if size > max_payload:
        msg = f"message on {message.subject} has {size} bytes; the broker takes {max_payload} at most"
        raise Refused(msg, code="too_large")


OUTGOING_BOUND = 4 << 20
"""Bytes that wait in the outgoing buffer before a sender is held back."""


def send_nowait(nc: Any, frames: Iterable[bytes]) -> None:
    """Queue `frames` on the connection as one piece, and let its flusher write them.

    During a reconnect they wait in the buffer, as those of `Client.publish` do. Raise `Unavailable`
    once the connection is closed for good.
    """
    if nc.is_closed:
        msg = "the connection to the broker is closed"
        raise Unavailable(msg)
    data = b"".join(frames)
    if not data:
        return
    nc._pending.append(data)  # noqa: SLF001
    nc._pending_data_size += len(data)  # noqa: SLF001
    queue = nc._flush_queue  # noqa: SLF001
    if queue is not None and queue.empty() and nc.is_connected:
        queue.put_nowait(asyncio.get_running_loop().create_future())


async def send(nc: Any, frames: Iterable[bytes]) -> None:
    """`send_nowait`, and wait while the outgoing buffer is over its bound: TCP's back-pressure."""
    send_nowait(nc, frames)
    while nc._pending_data_size > OUTGOING_BOUND and not nc.is_closed:  # noqa: SLF001
        if nc.is_connected:
            await nc._flush_pending(force_flush=True)  # noqa: SLF001
        else:
            await asyncio.sleep(0.02)


async def write_out(nc: Any) -> None:
    """Return once everything that is buffered has been written to the socket (nothing while disconnected)."""
    if nc.is_connected:
        await nc._flush_pending(force_flush=True)  # noqa: SLF001


def discard(nc: Any) -> None:
    """Forget what is buffered."""
    nc._pending = []  # noqa: SLF001
    nc._pending_data_size = 0  # noqa: SLF001
