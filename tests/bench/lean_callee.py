"""A callee that costs next to nothing: it answers each request with the same bytes, and notes nothing.

`python -m tests.bench.lean_callee`: prints its port, and serves until it is ended. The answer is a chat completion, so
that the same callee stands behind a gateway of any make.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import cast

import uvloop

ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "four"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 1, "total_tokens": 12},
    }
).encode()
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER), ANSWER,
)  # fmt: skip
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Lean(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of uvloop, which inherits from no one
        self._waiting = b""

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        while (end := self._waiting.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._waiting, 0, end)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._waiting) < size:
                return
            self._waiting = self._waiting[size:]
            self._transport.write(RESPONSE)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Lean, "127.0.0.1", 0, backlog=1_024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
