"""What the broker and DuckDB do when nothing but a bare loop asks them: the ceilings that the ratios stand on.

A NATS client of fifty lines: no reconnects, no checks, no tracing, no leases. Each loop runs in a process of its
own, `python -m tests.bench.raw <loop> <json>`, says `ready`, waits for a line on standard input, works, and prints
one JSON line with its wall-clock start and end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import uvloop

BATCH: Final = 1_000
"""Messages of one atomic batch: the server's bound."""
GROUP: Final = 500
"""Results stored in one batch, and then acked together."""
WINDOW: Final = 4_000
"""Messages asked for and not yet acked."""
ROWS: Final = 2_000
"""Rows of one DuckDB transaction."""
HEADERS: Final = b"Headrace-Schema: task/1\r\n"

OnMessage = Callable[[bytes, bytes, bytes], None]


class Bare(asyncio.Protocol):
    """The NATS protocol without anything else. `on_message` gets subject, reply and payload."""

    def __init__(self) -> None:
        self.on_message: OnMessage = lambda *_: None
        self.transport: Any = None
        self._rest = b""
        self._pongs: list[asyncio.Future[None]] = []
        self._resumed = asyncio.Event()
        self._resumed.set()

    @classmethod
    async def connect(cls, url: str) -> Bare:
        host, _, port = url.removeprefix("nats://").partition(":")
        _, bare = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        options = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "name": "bench-raw",
        }
        bare.send(b"CONNECT %b\r\nSUB bare.%b.> 1\r\n" % (json.dumps(options).encode(), bare.id))
        await bare.flush()
        return bare

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.id = uuid.uuid4().hex.encode()

    def pause_writing(self) -> None:
        self._resumed.clear()

    def resume_writing(self) -> None:
        self._resumed.set()

    def inbox(self, name: str) -> bytes:
        return b"bare.%b.%b" % (self.id, name.encode())

    def send(self, data: bytes) -> None:
        self.transport.write(data)

    async def drained(self) -> None:
        await self._resumed.wait()

    async def flush(self) -> None:
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self.send(b"PING\r\n")
        await pong

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            kind = data[at : at + 1]
            if kind in (b"M", b"H"):
                words = data[at:end].split(b" ")
                stop = end + 2 + int(words[-1])
                if len(data) < stop + 2:
                    break
                headers = int(words[-2]) if kind == b"H" else 0
                reply = words[3] if len(words) == (6 if kind == b"H" else 5) else b""
                self.on_message(words[1], reply, data[end + 2 + headers : stop])
                at = stop + 2
                continue
            if data.startswith(b"PING", at):
                self.send(b"PONG\r\n")
            elif data.startswith(b"PONG", at):
                self._pongs.pop(0).set_result(None)
            elif data.startswith(b"-ERR", at):
                raise SystemExit(f"the broker says {data[at:end]!r}")
            at = end + 2
        self._rest = data[at:]


class Batches:
    """Atomic batches with up to three commits under way. `stored` counts what has its PubAck."""

    def __init__(self, bare: Bare, subject: bytes, payload: bytes) -> None:
        self._bare = bare
        self._subject = subject
        self._payload = payload
        self._sent = 0
        self._waiting: dict[bytes, tuple[int, Callable[[], None]]] = {}
        self.slots = asyncio.Semaphore(3)
        self.stored = 0

    def send(self, n: int, then: Callable[[], None] = lambda: None) -> None:
        """Send one batch of `n`; its slot must be taken. `then` is called once it is stored."""
        self._sent += 1
        name, inbox = uuid.uuid4().hex.encode(), self._bare.inbox(f"batch{self._sent}")
        frames: list[bytes] = []
        for i in range(1, n + 1):
            head = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (name, i)
            if i == n:
                head += b"Nats-Batch-Commit: 1\r\n"
            head = b"NATS/1.0\r\n%b%b\r\n" % (head, HEADERS)
            reply = b" " + inbox if i == n else b""
            frames.append(
                b"HPUB %b%b %d %d\r\n%b%b\r\n"
                % (self._subject, reply, len(head), len(head) + len(self._payload), head, self._payload)
            )
        self._waiting[inbox] = (n, then)
        self._bare.send(b"".join(frames))

    def answer(self, subject: bytes, payload: bytes) -> bool:
        """Take a PubAck; False if the message is something else."""
        found = self._waiting.pop(subject, None)
        if found is None:
            return False
        answer = json.loads(payload)
        if "error" in answer or answer.get("count") != found[0]:
            raise SystemExit(f"a raw batch was refused: {payload!r}")
        self.stored += found[0]
        self.slots.release()
        found[1]()
        return True


class Puller:
    """Pulls through one inbox, with `WINDOW` messages asked for or unacked."""

    def __init__(self, bare: Bare, stream: str, total: int) -> None:
        self._bare = bare
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.bare".encode()
        self._inbox = bare.inbox("pull")
        self._confirm = bare.inbox("confirm")
        self._total = total
        self._left = total
        self._owed = 0
        self.acked = 0
        self.confirmed = asyncio.Event()

    def ask(self, n: int) -> None:
        n = min(n, self._left)
        if n > 0:
            self._left -= n
            body = b'{"batch":%d,"expires":60000000000}' % n
            self._bare.send(b"PUB %b %b %d\r\n%b\r\n" % (self._next, self._inbox, len(body), body))

    def ack(self, replies: list[bytes]) -> None:
        """Ack what is done. The very last ack asks for an answer: acks are handled in their order."""
        frames = [b"PUB %b 4\r\n+ACK\r\n" % reply for reply in replies]
        self.acked += len(replies)
        self._owed += len(replies)
        if self.acked == self._total:
            frames[-1] = b"PUB %b %b 4\r\n+ACK\r\n" % (replies[-1], self._confirm)
        self._bare.send(b"".join(frames))
        if self._owed >= GROUP:
            self.ask(self._owed)
            self._owed = 0

    def answer(self, subject: bytes) -> bool:
        """Take the confirmation of the last ack; False if the message is something else."""
        if subject != self._confirm:
            return False
        self.confirmed.set()
        return True


# --- the loops --------------------------------------------------------------------------------------
async def publish(bare: Bare, *, subject: str, count: int, size: int) -> None:
    """Store `count` messages in atomic batches of 1,000."""
    batches = Batches(bare, subject.encode(), b"x" * size)
    bare.on_message = lambda to, _reply, payload: batches.answer(to, payload) and None
    for first in range(0, count, BATCH):
        await batches.slots.acquire()
        batches.send(min(BATCH, count - first))
        await bare.drained()
    while batches.stored < count:
        await asyncio.sleep(0.0005)


async def pull(bare: Bare, *, stream: str, count: int) -> None:
    """Pull and ack `count` messages."""
    puller = Puller(bare, stream, count)
    ready: list[bytes] = []

    def flush() -> None:
        puller.ack(ready)
        ready.clear()

    loop = asyncio.get_running_loop()

    def on_message(to: bytes, reply: bytes, _payload: bytes) -> None:
        if not puller.answer(to) and reply:
            if not ready:
                loop.call_soon(flush)
            ready.append(reply)

    bare.on_message = on_message
    puller.ask(WINDOW)
    await puller.confirmed.wait()


async def work(bare: Bare, *, stream: str, subject: str, count: int, size: int) -> None:
    """The middle of the chain: pull, store a result for each, then ack what is stored."""
    puller = Puller(bare, stream, count)
    batches = Batches(bare, subject.encode(), b"y" * size)
    ready: list[bytes] = []
    arrived = asyncio.Event()

    def on_message(to: bytes, reply: bytes, payload: bytes) -> None:
        if not batches.answer(to, payload) and not puller.answer(to) and reply:
            ready.append(reply)
            arrived.set()

    bare.on_message = on_message
    puller.ask(WINDOW)
    taken = 0
    while taken < count:
        await arrived.wait()
        await batches.slots.acquire()
        group = ready[:GROUP]
        del ready[:GROUP]
        if not ready:
            arrived.clear()
        taken += len(group)
        batches.send(len(group), lambda group=group: puller.ack(group))
        await bare.drained()
    await puller.confirmed.wait()


LOOPS: Final[dict[str, Callable[..., Awaitable[None]]]] = {"publish": publish, "pull": pull, "work": work}


async def broker_loop(name: str, *, url: str, **options: Any) -> dict[str, float]:
    bare = await Bare.connect(url)
    await _start_signal()
    started = time.time()
    await LOOPS[name](bare, **options)
    return {"started": started, "ended": time.time()}


async def duckdb_loop(*, path: str, count: int, size: int) -> dict[str, float]:
    """Insert rows by one JSON parameter for each 2,000, one transaction each, with the outcomes' primary key."""
    import duckdb

    config = {"memory_limit": "128MB", "threads": 1}
    connection = duckdb.connect(path, config=config)
    connection.execute(
        'CREATE TABLE raw (job VARCHAR, "index" BIGINT, generation INTEGER, status VARCHAR, text VARCHAR, '
        'PRIMARY KEY (job, "index", generation))'
    )
    shape = '[{"job":"VARCHAR","index":"BIGINT","generation":"INTEGER","status":"VARCHAR","text":"VARCHAR"}]'
    insert = (
        'INSERT INTO raw SELECT r.job, r."index", r.generation, r.status, r.text '
        f"FROM (SELECT unnest(from_json($1::VARCHAR, '{shape}')) AS r) ON CONFLICT DO NOTHING"
    )
    await _start_signal()
    seconds, text = 0.0, "z" * size
    for first in range(0, count, ROWS):
        indices = range(first, min(count, first + ROWS))
        rows = [{"job": "raw", "index": i, "generation": 1, "status": "ok", "text": text} for i in indices]
        data = msgspec.json.encode(rows).decode()
        started = time.perf_counter()
        connection.execute("BEGIN TRANSACTION")
        connection.execute(insert, [data])
        connection.execute("COMMIT")
        seconds += time.perf_counter() - started
    found = connection.execute("SELECT count(*) FROM raw").fetchone()
    if found != (count,):
        raise SystemExit(f"DuckDB has {found} rows of {count}")
    connection.close()
    return {"started": 0.0, "ended": seconds}


async def _start_signal() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def main(name: str, options: dict[str, Any]) -> None:
    run = duckdb_loop(**options) if name == "duckdb" else broker_loop(name, **options)
    print(json.dumps(await run), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], json.loads(sys.argv[2])))
