"""Callees over TLS: a certificate is checked before a byte of a call is written.

`tls/` holds a certificate for `localhost` that was signed by the test's own authority, and that authority's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.gateway.http_dialer import HttpDialer
from headrace.gateway.verdicts import Seen
from tests.gateway.test_http_dialer import order

pytestmark = pytest.mark.anyio

TLS = Path(__file__).parent / "tls"
ANSWER = b'{"id": "1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}'


@contextlib.asynccontextmanager
async def https() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server for `localhost`: its port, and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            asked.append(head + await reader.readexactly(length))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
            await writer.drain()
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "localhost.pem")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        server.close()


@pytest.fixture
async def dialer() -> AsyncIterator[HttpDialer]:
    made = HttpDialer()
    yield made
    await made.close()


async def test_a_trusted_certificate_of_that_name(
    dialer: HttpDialer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    async with https() as (port, asked):
        found = await dialer.dial(order(f"https://localhost:{port}/v1", {"messages": []}))
        assert (found.seen, found.usage and found.usage.input_tokens) == (Seen.ANSWERED, 3)
        assert asked[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


async def test_a_certificate_that_nobody_vouches_for(dialer: HttpDialer) -> None:
    async with https() as (port, asked):
        found = await dialer.dial(order(f"https://localhost:{port}/v1", {"messages": []}))
        assert (found.seen, found.request_sent) == (Seen.NOT_SENT, False)
        assert "certificate" in found.error.message.lower()
        assert asked == []


async def test_a_certificate_of_another_name(dialer: HttpDialer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    async with https() as (port, asked):
        found = await dialer.dial(order(f"https://127.0.0.1:{port}/v1", {"messages": []}))
        assert (found.seen, found.request_sent) == (Seen.NOT_SENT, False)
        assert asked == []
