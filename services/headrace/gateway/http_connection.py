"""One connection to a server that speaks HTTP/1.1: a request is written, its answer read, by the rules of h11."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import h11
import httpx
from msgspec import Struct

READ_BYTES = 64 << 10
HEAD_BYTES = 100 << 10
"""Longest head of an answer."""
SENDING, HEAD_SENT, SENT, ANSWERED = "sending", "head sent", "sent", "answered"
"""Steps of a request: about to write its first byte, …, its answer's head is read."""
Origin = tuple[str, str, int]
SWITCHING_PROTOCOLS = 101


def nothing(_step: str) -> None:
    """For whoever does not want to know of steps."""


class Request(Struct, frozen=True, kw_only=True):
    """What is written. `step` is called at each step: what fails before `SENDING` did not happen.

    With `apart` head and body are on the wire when their steps are told. Without a time-out it is waited for ever.
    """

    method: str
    url: httpx.URL
    headers: list[tuple[bytes, bytes]]
    """All of them, with the host and the body's length."""
    body: bytes = b""
    connect_s: float | None = None
    read_s: float | None = None
    step: Callable[[str], None] = nothing
    apart: bool = False


class Connection:
    """One connection; one request at a time."""

    def __init__(self, origin: Origin, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.origin = origin
        self.idle_until = 0.0
        self._reader = reader
        self._writer = writer
        self._h11 = h11.Connection(our_role=h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)

    @property
    def alive(self) -> bool:
        """Whether the other side has neither closed nor said anything unasked, as far as is known."""
        return not (self._writer.is_closing() or self._reader.at_eof() or self._h11.trailing_data[0])

    async def ask(self, request: Request) -> h11.Response:
        """Write a request, read the head of its answer."""
        try:
            event = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers)
            head = self._h11.send(event) or b""
            body = self._h11.send(h11.Data(data=request.body)) or b""
            self._h11.send(h11.EndOfMessage())  # the length is in the head: nothing follows the body
        except h11.LocalProtocolError as e:
            raise httpx.LocalProtocolError(str(e)) from None
        request.step(SENDING)
        with contextlib.suppress(OSError):  # some answer, and close, before they have read everything
            for part, name in ((head, HEAD_SENT), (body, SENT)):
                self._writer.write(part)
                if request.apart:
                    await asyncio.sleep(0)  # the loop writes at the end of its turn
                request.step(name)
            await self._writer.drain()
        while True:
            event = await self.next(request.read_s)
            if isinstance(event, h11.Response):
                request.step(ANSWERED)
                return event
            if not isinstance(event, h11.InformationalResponse) or event.status_code == SWITCHING_PROTOCOLS:
                raise httpx.RemoteProtocolError("the server answered with something else than an answer")

    async def next(self, timeout_s: float | None) -> Any:
        """The next event of h11; raise `httpx.RemoteProtocolError`, `httpx.ReadError` or `httpx.ReadTimeout`."""
        while True:
            try:
                event = self._h11.next_event()
                if event is not h11.NEED_DATA:
                    return event
                if timeout_s is None:
                    data = await self._reader.read(READ_BYTES)
                else:
                    async with asyncio.timeout(timeout_s):
                        data = await self._reader.read(READ_BYTES)
                if not data and self._h11.their_state is h11.SEND_RESPONSE:
                    raise httpx.RemoteProtocolError("the server closed the connection without an answer")
                self._h11.receive_data(data)
            except h11.RemoteProtocolError as e:
                raise httpx.RemoteProtocolError(str(e)) from None
            except TimeoutError:
                raise httpx.ReadTimeout(f"nothing for {timeout_s} s") from None
            except OSError as e:
                raise httpx.ReadError(str(e) or type(e).__name__) from None

    def next_cycle(self) -> bool:
        """Make ready for another request; False if this connection cannot take one."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE or not self.alive:
            return False
        self._h11.start_next_cycle()
        return True

    def close(self) -> None:
        """Close at once."""
        self._writer.transport.abort()
