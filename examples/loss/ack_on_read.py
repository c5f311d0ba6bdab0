"""A queue consumer as many are written: read a batch, acknowledge it, then work through it.

Most libraries call it auto-ack, or do it unasked: RabbitMQ's `auto_ack`, Celery without `acks_late` (its default),
Redis `BLPOP`, a Kafka consumer that commits offsets on a timer. It is quick, it looks right, and every counter of the
queue says that the work is done. What it has read and not finished lives in this process and nowhere else.

Nothing here is made worse than usual: each result is published and its PubAck awaited, the connection reconnects, a
stop finishes what was read. Only a kill shows the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal

import nats
import nats.errors
from nats.js import JetStreamContext

STREAM, SUBJECT, DURABLE = "AUTOACK_TASKS", "autoack.tasks", "autoack"
RESULTS, RESULT_SUBJECT = "AUTOACK_RESULTS", "autoack.results"


async def work(queue: asyncio.Queue[bytes], js: JetStreamContext, work_s: float) -> None:
    """One of `concurrency` slots: take an item, work on it, store its result."""
    while True:
        item = json.loads(await queue.get())
        await asyncio.sleep(work_s)
        await js.publish(RESULT_SUBJECT, json.dumps({"index": item["index"]}).encode(), stream=RESULTS)
        queue.task_done()


async def read(queue: asyncio.Queue[bytes], js: JetStreamContext, prefetch: int) -> None:
    """Keep up to `prefetch` items in memory, so that no slot waits for the network."""
    subscription = await js.pull_subscribe_bind(durable=DURABLE, stream=STREAM)
    while True:
        if queue.qsize() > prefetch // 2:
            await asyncio.sleep(0.005)
            continue
        with contextlib.suppress(nats.errors.TimeoutError):
            for message in await subscription.fetch(prefetch - queue.qsize(), timeout=1):
                await message.ack()  # the mistake: acknowledged, and nothing is done yet
                queue.put_nowait(message.data)


async def main(url: str, *, concurrency: int, prefetch: int, work_s: float) -> None:
    """Consume until SIGTERM; then finish what was read."""
    connection = await nats.connect(url)
    js = connection.jetstream()
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    reader = asyncio.create_task(read(queue, js, prefetch))
    slots = [asyncio.create_task(work(queue, js, work_s)) for _ in range(concurrency)]
    await stop.wait()
    reader.cancel()
    await queue.join()
    for slot in slots:
        slot.cancel()
    await connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prefetch", type=int, default=64)
    parser.add_argument("--work-ms", type=float, default=20.0)
    given = parser.parse_args()
    asyncio.run(
        main(
            given.url,
            concurrency=given.concurrency,
            prefetch=given.prefetch,
            work_s=given.work_ms / 1_000,
        )
    )
