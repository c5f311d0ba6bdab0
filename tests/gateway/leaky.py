"""A callee that says what it should not, and more than anybody wants to hear: a real HTTP server in the test's process.

A request's `behave` decides. Wherever it answers, it repeats the API key that it got and a secret of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

OWN = "SECRET-7F3A9C"


class Leaky:
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = {
                k.lower(): v.strip() for k, _, v in (x.partition(":") for x in head.split("\r\n")[1:] if x)
            }
            body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
            self.heard.append(body)
            self.headers.append(headers)
            await self.answer(writer, body, f"{OWN} {headers.get('authorization', '')}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], leak: str) -> None:
        behave = body.get("behave", "whole")
        status = int(behave) if behave.isdigit() else 200
        kind = "text/event-stream" if "stream" in behave else "application/json"
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nx-request-id: r-{leak}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        if status != 200:
            # So long that a cut of the message would go through the middle of the secret.
            filler = "x" * (2_048 - 12) if body.get("long") else ""
            writer.write(json.dumps({"error": {"message": f"{filler} {leak}"}}).encode())
        elif behave == "text":
            writer.write(f"no JSON at all: {leak}".encode())
        elif behave == "stream":
            for part in ("it is ", leak[:5], leak[5:], " and so on"):
                await self.event(writer, {"choices": [{"index": 0, "delta": {"content": part}}]})
            for part in ('{"key": "', leak[:7], leak[7:], '"}'):
                call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": part}}
                await self.event(writer, {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
            await self.event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            await self.event(writer, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}})
            writer.write(b"data: [DONE]\n\n")
        elif behave.startswith("endless"):
            await self.endless(writer, behave)
        else:
            writer.write(json.dumps(self.whole(body, leak)).encode())
        await writer.drain()

    def whole(self, body: dict[str, Any], leak: str) -> dict[str, Any]:
        text = f"it is {leak} and so on" + "y" * int(body.get("size", 0))
        return {
            "id": f"id-{leak}",
            "choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}],
            leak: [{"nested": leak}, 4_111_111_111_111_111],
            "usage": {"prompt_tokens": 3, "completion_tokens": 9},
        }

    async def event(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        writer.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        await writer.drain()

    async def endless(self, writer: asyncio.StreamWriter, behave: str) -> None:
        while True:
            if behave == "endless stream":
                await self.event(writer, {"choices": [{"index": 0, "delta": {"content": "z" * 1_000}}]})
            else:  # `endless`, and `endless stream line`: no line ever ends
                writer.write(b"z" * 65_536)
                await writer.drain()


@contextlib.asynccontextmanager
async def leaky() -> AsyncIterator[Leaky]:
    made = Leaky()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, limit=1 << 24)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made
