"""Connections to callees: kept and used again, never one that the other side has closed, and answers as they come."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from headrace.gateway.http1 import Http1
from headrace.gateway.http_connection import ANSWERED, HEAD_SENT, SENDING, SENT, Request

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers with bytes as they are; notes each request with the number of its connection."""

    def __init__(self, answer: Callable[[int], bytes], *, closes: bool = False) -> None:
        self.requests: list[tuple[int, bytes]] = []
        self.connections = 0
        self.url = ""
        self._answer = answer
        self._closes = closes
        self.ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                self.requests.append((number, head + await reader.readexactly(length)))
                writer.write(self._answer(len(self.requests)))
                await writer.drain()
                if self._closes:
                    break
        writer.close()
        self.ended += 1


@contextlib.asynccontextmanager
async def served(answer: Callable[[int], bytes], *, closes: bool = False) -> AsyncIterator[Server]:
    server = Server(answer, closes=closes)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/x"
    try:
        yield server
    finally:
        listening.close()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.005)


async def ask(transport: Http1, url: str, body: bytes = b"hi", **more: object) -> bytes:
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(body))]
    answer = await transport.send(
        Request(method="POST", url=httpx.URL(url), headers=headers, body=body, **more)  # type: ignore[arg-type]
    )
    try:
        return b"".join([part async for part in answer.aiter_bytes()])
    finally:
        await answer.aclose()


async def test_a_connection_is_used_again_while_it_is_kept() -> None:
    async with served(lambda _: OK) as server:
        keeping, never = Http1(kept=2, kept_s=10.0), Http1(kept=0)
        assert [await ask(keeping, server.url) for _ in range(3)] == [b"ok"] * 3
        assert [number for number, _ in server.requests] == [1, 1, 1]
        assert server.requests[0][1].startswith(b"POST /x HTTP/1.1\r\n")
        assert [await ask(never, server.url) for _ in range(2)] == [b"ok"] * 2
        assert [number for number, _ in server.requests[3:]] == [2, 3]
        await keeping.aclose()
        await until(lambda: server.ended == 3)


async def test_no_more_are_kept_than_allowed_and_none_longer() -> None:
    async with served(lambda _: OK) as server:
        transport = Http1(kept=1, kept_s=0.05)
        await asyncio.gather(*(ask(transport, server.url) for _ in range(3)))
        assert server.connections == 3
        await until(lambda: server.ended == 3)  # the one that was kept is closed when its time is over
        await ask(transport, server.url)
        assert server.connections == 4
        await transport.aclose()


async def test_a_connection_that_the_server_closed_is_not_written_to() -> None:
    """What is written to it might look like a call that was read and lost."""
    async with served(lambda _: OK, closes=True) as server:
        transport = Http1(kept=2, kept_s=10.0)
        for _ in range(3):
            assert await ask(transport, server.url) == b"ok"
            await until(lambda: not any(c.alive for kept in transport._idle.values() for c in kept))
        assert server.connections == 3
        await transport.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ],
)
async def test_one_that_says_more_than_asked_or_wants_to_close_is_not_kept(answer: bytes) -> None:
    async with served(lambda _: answer) as server:
        transport = Http1(kept=2, kept_s=10.0)
        assert [await ask(transport, server.url) for _ in range(2)] == [b"ok"] * 2
        assert server.connections == 2
        await transport.aclose()


async def test_an_answer_that_is_not_read_to_its_end_ends_its_connection() -> None:
    async with served(lambda _: b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok") as server:
        transport = Http1(kept=2, kept_s=10.0)
        for _ in range(2):
            headers = [(b"host", b"x"), (b"content-length", b"0")]
            answer = await transport.send(Request(method="POST", url=httpx.URL(server.url), headers=headers))
            async for part in answer.aiter_bytes():
                assert part == b"ok"
                break
            await answer.aclose()
        assert server.connections == 2
        await transport.aclose()


async def test_chunks_early_heads_and_packed_bodies_are_read() -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
    packed = gzip.compress(b"ok" * 1_000)
    gzipped = (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed
    )
    answers = [b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK, chunked, gzipped]
    async with served(lambda number: answers[number - 1]) as server:
        transport = Http1(kept=2, kept_s=10.0)
        assert [await ask(transport, server.url) for _ in range(3)] == [b"ok", b"ok", b"ok" * 1_000]
        assert server.connections == 1
        await transport.aclose()


async def test_steps_are_told_in_order_and_nothing_is_sent_before_sending() -> None:
    steps: list[str] = []
    async with served(lambda _: OK) as server:
        transport = Http1(kept=0)
        for apart in (False, True):
            await ask(transport, server.url, step=steps.append, apart=apart)
    assert steps == [SENDING, HEAD_SENT, SENT, ANSWERED] * 2
    steps.clear()
    with pytest.raises(httpx.ConnectError):
        await ask(transport, "http://127.0.0.1:9/", step=steps.append)
    async with served(lambda _: OK) as server:
        headers = [(b"host", b"x"), (b"x-forged", b"a\r\nb: c")]
        forged = Request(method="GET", url=httpx.URL(server.url), headers=headers, step=steps.append)
        with pytest.raises(httpx.LocalProtocolError):
            await transport.send(forged)
    assert steps == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"nonsense\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000, httpx.RemoteProtocolError),
        (b"", httpx.ReadTimeout),
    ],
)
async def test_what_is_no_answer(answer: bytes, error: type[Exception]) -> None:
    async with served(lambda _: answer) as server:
        transport = Http1(kept=1, kept_s=1.0)
        with pytest.raises(error):
            await ask(transport, server.url, read_s=0.5)
        await transport.aclose()
