"""HTTP/1.1 for attempts at callees: connections that are kept, requests on them, and their answers.

httpx's own pool costs a call of the gateway more than all else together: locks that look for an installed library each
time they are made, and a walk over every connection for every request. It also keeps cookies, which would travel from
one tenant's call into another's. Here a request takes the connection that was used last, or a new one. Nothing is
retried, and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator

import h11
import httpx

from headrace.gateway.http_connection import READ_BYTES, Connection, Origin, Request

_PORTS = {"http": 80, "https": 443}
# A host that no name could be: IDNA; a port beyond all.
_CONNECT_ERRORS = (OSError, UnicodeError, ValueError)


class Http1(httpx.AsyncBaseTransport):
    """Keeps idle connections for `kept_s` seconds, at most `kept` to one server; 0: none at all."""

    def __init__(self, *, kept: int, kept_s: float = 0.0) -> None:
        self._kept = kept
        self._kept_s = kept_s
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def send(self, request: Request) -> Answer:
        """Send `request` and return the answer's head; its body is read from the answer, which has to be closed.

        Raise `httpx.ConnectTimeout` and `httpx.ConnectError` before anything is written, and after it
        `httpx.ReadError`, `httpx.RemoteProtocolError` or `httpx.ReadTimeout`.
        """
        origin = _origin(request.url)
        connection = self._reuse(origin) or await self._open(origin, request.connect_s)
        try:
            head = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        return Answer(self, connection, head, request.read_s)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The same for a client of httpx, with its time-outs."""
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        answer = await self.send(
            Request(
                method=request.method,
                url=request.url,
                headers=request.headers.raw,
                body=request.content,
                connect_s=timeouts.get("connect"),
                read_s=timeouts.get("read"),
            )
        )
        return httpx.Response(answer.status_code, headers=answer.raw_headers, stream=answer, request=request)

    async def aclose(self) -> None:
        """Close what is idle; what is in use is closed by whoever uses it."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    # --- connections -------------------------------------------------------------------------------
    def _reuse(self, origin: Origin) -> Connection | None:
        idle, now = self._idle.get(origin), time.monotonic()
        while idle:
            connection = idle.pop()
            if connection.alive and now < connection.idle_until:
                return connection
            connection.close()
        return None

    async def _open(self, origin: Origin, timeout_s: float | None) -> Connection:
        scheme, host, port = origin
        if scheme == "https" and self._tls is None:
            self._tls = httpx.create_ssl_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(
                    host, port, limit=READ_BYTES, ssl=self._tls if scheme == "https" else None
                )
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port}") from None
        except _CONNECT_ERRORS as e:
            raise httpx.ConnectError(str(e) or type(e).__name__) from None
        return Connection(origin, reader, writer)

    def keep(self, connection: Connection) -> None:
        """Take back a connection whose answer is read, if it is read to its end."""
        idle = self._idle[connection.origin]
        if len(idle) >= self._kept or not connection.next_cycle():
            connection.close()
            return
        connection.idle_until = time.monotonic() + self._kept_s
        idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._kept_s, self._close_old)

    def _close_old(self) -> None:
        self._sweep, now = None, time.monotonic()
        for origin, connections in list(self._idle.items()):
            for connection in [c for c in connections if now >= c.idle_until or not c.alive]:
                connections.remove(connection)
                connection.close()
            if not connections:
                del self._idle[origin]
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(self._kept_s, self._close_old)


class Answer(httpx.AsyncByteStream):
    """An answer: its head, and its body as it comes. Names of headers are in lower case."""

    def __init__(
        self, transport: Http1, connection: Connection, head: h11.Response, timeout_s: float | None
    ) -> None:
        self.status_code = head.status_code
        self.raw_headers: list[tuple[bytes, bytes]] = list(head.headers)
        self.headers: dict[str, str] = {}
        for name, value in self.raw_headers:
            key, said = name.decode("ascii"), value.decode("latin-1")
            self.headers[key] = f"{self.headers[key]}, {said}" if key in self.headers else said
        self._transport = transport
        self._connection: Connection | None = connection
        self._timeout_s = timeout_s

    @property
    def is_success(self) -> bool:
        """2xx."""
        return httpx.codes.is_success(self.status_code)

    @property
    def is_redirect(self) -> bool:
        """3xx."""
        return httpx.codes.is_redirect(self.status_code)

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        """The body, unpacked if the server has packed it."""
        packed = self.headers.get("content-encoding", "identity") != "identity"
        parts = (
            httpx.Response(self.status_code, headers=self.raw_headers, stream=self).aiter_bytes()
            if packed
            else self
        )
        async for part in parts:
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        while connection is not None:
            event = await connection.next(self._timeout_s)
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    async def aclose(self) -> None:
        """Give the connection back if all of the answer is read, else close it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.keep(connection)


def _origin(url: httpx.URL) -> Origin:
    if url.scheme not in _PORTS or not url.host:
        raise httpx.UnsupportedProtocol(f"no address of an HTTP server: {url.scheme[:20]!r}")
    return url.scheme, url.raw_host.decode("ascii"), url.port or _PORTS[url.scheme]
