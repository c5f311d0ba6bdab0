"""A callee in a process of its own: a real HTTP server that notes on disk what it was asked and what it did.

`python callee.py LOG READY`: the port is written to READY. What a request's body says as `behave` decides what becomes
of it; its log is the truth that the ledger is compared with. One line of JSON a request, on disk before anything is
answered: {"at", "call": the idempotency key or the body's id, "applied": whether it acted, "behave", "id": the body's,
"digest" of the request, "answer": digest of what it would say, "usage": the tokens it states, "trace": the traceparent
it got}. It acts once for each key.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Callee:
    def __init__(self, log: Path) -> None:
        self.log = log.open("ab")
        self.applied: dict[str, dict[str, Any]] = {}

    def note(self, **entry: Any) -> None:
        self.log.write(json.dumps({"at": time.time(), **entry}).encode() + b"\n")
        self.log.flush()
        os.fsync(self.log.fileno())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self.one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        if headers.get("x-behave") == "close before reading":
            return False
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            return await self.look_up(path, writer)
        body = json.loads(data)
        behave = body.get("behave", "answers")
        key = headers.get("idempotency-key", "")
        call = key or body.get("id", "")
        if behave == "closes before reading":
            return False
        applied = behave not in ("429", "500", "400", "503")
        reply = completion(body)
        common = {
            "call": call, "behave": behave, "id": body.get("id", ""), "trace": headers.get("traceparent", ""),
            "usage": [reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]],
            "digest": sha256(data), "answer": sha256(json.dumps(reply).encode()),
        }  # fmt: skip
        if applied and key and key in self.applied:
            self.note(**common, applied=False, repeat=True)
            await self.answer(writer, 200, self.applied[key])
            return True
        self.note(**common, applied=applied)
        if applied and key:
            self.applied[key] = reply
        match behave:
            case "hangs":
                await asyncio.sleep(3_600)
            case "closes":
                return False
            case "late":
                await asyncio.sleep(float(body.get("delay", 1.0)))
                await self.answer(writer, 200, reply)
            case "cuts":
                await self.stream(writer, reply, cut=True, pause_s=float(body.get("pause", 0)))
                return False
            case "half":
                text = json.dumps(reply).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                    % len(text)
                )
                writer.write(text[: len(text) // 2])
                await writer.drain()
                return False
            case "stream":
                await self.stream(writer, reply, cut=False, pause_s=float(body.get("pause", 0)))
                return False
            case "silent":
                del reply["usage"]
                await self.answer(writer, 200, reply)
            case "nonsense":
                await self.answer(writer, 200, "not what you think")
            case "moved":
                await self.answer(writer, 302, {}, "location: http://127.0.0.1:9/\r\n")
            case "400" | "429" | "500" | "503":
                extra = "retry-after: 7\r\n" if behave == "429" else ""
                await self.answer(writer, int(behave), {"error": {"message": f"said {behave}"}}, extra)
            case _:
                await self.answer(writer, 200, reply)
        return True

    async def look_up(self, path: str, writer: asyncio.StreamWriter) -> bool:
        found = self.applied.get(path.rsplit("/", 1)[-1])
        await self.answer(writer, 200 if found else 404, found or {"error": {"message": "no such call"}})
        return True

    async def answer(self, writer: asyncio.StreamWriter, status: int, value: Any, extra: str = "") -> None:
        text = json.dumps(value).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nx-request-id: req-1\r\n{extra}"
            f"content-length: {len(text)}\r\n\r\n".encode()
            + text
        )
        await writer.drain()

    async def stream(
        self, writer: asyncio.StreamWriter, reply: dict[str, Any], *, cut: bool, pause_s: float = 0.0
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for word in reply["choices"][0]["message"]["content"].split():
            chunk = {"id": reply["id"], "choices": [{"index": 0, "delta": {"content": word + " "}}]}
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()
            await asyncio.sleep(pause_s)
        if not cut:
            last = {"id": reply["id"], "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
            writer.write(b"data: " + json.dumps(last).encode() + b"\n\n")
            writer.write(b"data: " + json.dumps({"choices": [], "usage": reply["usage"]}).encode() + b"\n\n")
            writer.write(b"data: [DONE]\n\n")
            await writer.drain()


def completion(body: dict[str, Any]) -> dict[str, Any]:
    text = f"one two three {body.get('id', '')}".strip()
    return {
        "id": f"cmpl-{body.get('id', '0')}",
        "object": "chat.completion",
        "model": body.get("model", "m"),
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 2},
        } | body.get("usage", {}),
    }  # fmt: skip


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def main(log: Path, ready: Path) -> None:
    callee = Callee(log)
    server = await asyncio.start_server(callee.serve, "127.0.0.1", 0, limit=1 << 24)
    port = server.sockets[0].getsockname()[1]
    temporary = ready.with_suffix(".new")
    temporary.write_text(str(port))
    temporary.replace(ready)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
