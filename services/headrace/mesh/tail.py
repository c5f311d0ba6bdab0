"""Reading a stream from a sequence on, and going on as it grows: by an ephemeral consumer, remade where it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from msgspec import Struct

from headrace.contracts.errors import HeadraceError, NotFound, Unavailable
from headrace.contracts.specs import ConsumerSpec
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.consumer import BatchConsumer
from headrace.mesh.jsapi import JetStreamError, call, stream_info

log = logging.getLogger("headrace.mesh")

BATCH = 1_000
FIRST_LOOK_S, LOOK_S, TICK_S = 1.0, 5.0, 0.1
"""How often it is looked whether the consumer is still there, at first and later; how soon after a lost connection."""
IDLE_S = 30.0
"""The broker removes the consumer when nobody has pulled for this long."""


class Tailed(Struct, frozen=True):
    """A message of the stream."""

    subject: str
    sequence: int
    data: bytes
    headers: dict[str, str]


async def read_all(
    mesh: Mesh, stream: str, filter_: str, *, from_seq: int = 1
) -> AsyncIterator[list[Tailed]]:
    """What the stream holds now, in lists; ends at the sequence that was the last when it began."""
    last = int((await stream_info(mesh, stream))["state"]["last_seq"])
    if last < from_seq:
        return
    async for batch in tail(mesh, stream, filter_, from_seq=from_seq, until_seq=last):
        yield batch


async def tail(
    mesh: Mesh, stream: str, filter_: str, *, from_seq: int = 1, until_seq: int | None = None
) -> AsyncIterator[list[Tailed]]:
    """Messages that match `filter_` from `from_seq` on, each once and in order, for ever or up to `until_seq`.

    A lost connection, a lost consumer or a gap begins anew after the last message that was given out.
    """
    at, attempt = from_seq, 0
    while True:
        try:
            async for batch in _read(mesh, stream, filter_, at, until_seq):
                if batch:
                    at, attempt = batch[-1].sequence + 1, 0
                    yield batch
            return
        except NotFound:
            raise
        except HeadraceError as e:
            if mesh.closed.is_set():
                raise
            delay = backoff_s(attempt)
            attempt += 1
            extra = {"stream": stream, "reason": str(e)[:200], "retry_in_s": round(delay, 2)}
            log.warning("reading a stream goes on later", extra=extra)
            await asyncio.sleep(delay)


async def _read(
    mesh: Mesh, stream: str, filter_: str, at: int, until_seq: int | None
) -> AsyncIterator[list[Tailed]]:
    spec = await _consumer(mesh, stream, filter_, at)
    if until_seq is not None and not await _anything(mesh, spec):
        return
    consumer = BatchConsumer(mesh, spec, batch=BATCH, wait_s=0.01, window=4 * BATCH)
    losses, expected = mesh.losses, 1
    await consumer.start()

    def is_over(info: dict[str, Any]) -> bool:
        """A damaged message at the end is never given out: the broker has no more, and all that it gave is here."""
        given = int(info["delivered"]["consumer_seq"])
        return until_seq is not None and int(info["num_pending"]) == 0 and given == expected - 1

    over = asyncio.Event()
    watch = asyncio.get_running_loop().create_task(_stop_when_gone(mesh, spec, consumer, is_over, over))
    try:
        async for deliveries in consumer:
            out: list[Tailed] = []
            for d in deliveries:
                if d.consumer_seq != expected or d.losses != losses:
                    raise Unavailable("a message was missed")
                expected += 1
                if until_seq is None or d.stream_seq <= until_seq:
                    out.append(Tailed(d.subject, d.stream_seq, d.data, dict(d.headers or {})))
            consumer.release(deliveries)
            yield out
            last = deliveries[-1]
            if until_seq is not None and (last.stream_seq >= until_seq or last.pending == 0):
                return
        if over.is_set():
            return
        raise Unavailable("its consumer is gone")
    finally:
        watch.cancel()
        await consumer.stop()


async def _stop_when_gone(
    mesh: Mesh,
    spec: ConsumerSpec,
    consumer: BatchConsumer,
    is_over: Callable[[dict[str, Any]], bool],
    over: asyncio.Event,
) -> None:
    """End the reading when the consumer is not there any more: the broker was restarted, or has removed it.

    Or when nothing more is to come: `over` is set then.
    """
    losses, look_s = mesh.losses, FIRST_LOOK_S
    while True:
        for _ in range(int(look_s / TICK_S)):
            await asyncio.sleep(TICK_S)
            if mesh.losses != losses and mesh.connected:
                losses = mesh.losses
                break
        try:
            info = await call(mesh, f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
        except JetStreamError:
            break
        except HeadraceError:
            continue
        if is_over(info):
            over.set()
            break
        look_s = min(LOOK_S, look_s * 2)
    await consumer.stop()


async def _anything(mesh: Mesh, spec: ConsumerSpec) -> bool:
    info = await call(mesh, f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
    return int(info["num_pending"]) > 0


async def _consumer(mesh: Mesh, stream: str, filter_: str, at: int) -> ConsumerSpec:
    config: dict[str, Any] = {
        "filter_subject": filter_,
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": at,
        "replay_policy": "instant",
        "max_waiting": 512,
        "num_replicas": 1,
        "mem_storage": True,
        "inactive_threshold": int(IDLE_S * 1e9),
    }
    made = await call(mesh, f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
    return ConsumerSpec(stream=stream, durable=str(made["name"]), filter_subject=filter_)
