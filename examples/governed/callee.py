"""What is called, on both sides: an OpenAI-compatible server that does a call as soon as it has read it.

`python callee.py LOG READY`: its port is written to READY. Each call that it does is one line of JSON in LOG, on the
disk before anything is answered: what stands there was done, and is charged. It then takes 10 to 60 ms for its answer.
It knows of no idempotency key, as most such servers do not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

LONGEST_S = 0.06
USAGE = {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}


def completion(name: str) -> dict[str, object]:
    """The answer to a call."""
    message = {"role": "assistant", "content": f"done: {name}"}
    return {
        "id": f"cmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
    }


async def main(log: Path, ready: Path) -> None:
    """Serve until it is killed."""
    with log.open("ab") as out:

        def note(name: str) -> None:
            out.write(json.dumps({"at": time.time(), "call": name}).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
                    body = json.loads(await reader.readexactly(int(length)))
                    name = body["messages"][0]["content"]
                    note(name)
                    await asyncio.sleep(random.uniform(LONGEST_S / 6, LONGEST_S))
                    data = json.dumps(completion(name)).encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                        % (len(data), data)
                    )
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # whoever called is gone
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        temporary = ready.with_suffix(".new")
        temporary.write_text(str(server.sockets[0].getsockname()[1]))
        temporary.replace(ready)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
