"""Frames are those that nats-py itself would send, and headers cannot be forged."""

from __future__ import annotations

from typing import Any

import pytest
from nats.aio.client import Client

from headrace.contracts.errors import InvalidInput
from headrace.mesh.connection import Mesh
from headrace.mesh.wire import Connection, OutMessage, frame, header_block


class Tap:
    """Takes the bytes that a client queues."""

    def __init__(self, nc: Any) -> None:
        self.nc = nc
        self.seen = b""

    async def publish(self, *args: Any, **kwargs: Any) -> bytes:
        """What `Client.publish` queues for these arguments."""
        self.nc._pending.clear()
        await self.nc.publish(*args, **kwargs)
        return b"".join(self.nc._pending)


@pytest.mark.anyio
@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-a-b-01", "Headrace-Schema": "task/1"}])
@pytest.mark.parametrize("reply", ["", "_INBOX.x.1"])
async def test_frames_equal_those_of_the_library(mesh: Mesh, headers: dict[str, str], reply: str) -> None:
    theirs = await Tap(mesh.nc).publish("hr.x", b"body", reply, headers=headers or None)
    assert frame(OutMessage("hr.x", b"body", header_block(headers)), reply) == theirs.replace(b"  ", b" ")


@pytest.mark.parametrize("bad", [{"a": "b\r\nc: d"}, {"a\r\n": "b"}, {"a:b": "c"}, {"a": "\x00"}])
def test_control_characters_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        header_block(bad)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers",
    [
        {"a": "b"},
        {"Headrace-Schema": "task/1", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
        {"k": "x" * 300},
    ],
)
async def test_headers_are_read_as_the_library_reads_them(mesh: Mesh, headers: dict[str, str]) -> None:
    block = b"NATS/1.0\r\n" + header_block(headers) + b"\r\n"
    assert await Connection()._process_headers(block) == await Client()._process_headers(block) == headers
    status = b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\nNats-Pending-Bytes: 0\r\n\r\n"
    assert await Connection()._process_headers(status) == await Client()._process_headers(status)
