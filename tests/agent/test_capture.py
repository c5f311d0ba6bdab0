"""Recording: it costs its caller nothing worth speaking of, and what was recorded, captured and dropped adds up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import psutil
import pytest
from msgspec import Raw

from headrace.agent import Agent, Context
from headrace.agent.buffer import RECORD_BYTES, Recorder
from headrace.agent.capture import Capture, captures
from headrace.contracts import codec
from headrace.contracts.capture import CaptureCount, CaptureRecord, CaptureRecords
from headrace.contracts.errors import InvalidInput
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.redact import Redactor
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from headrace.mesh.tail import read_all
from tests.agent.world import hosting, send

pytestmark = pytest.mark.anyio


async def stored(mesh: Mesh) -> tuple[list[CaptureRecord], list[CaptureCount], list[CaptureRecords]]:
    """Records, counts and messages of the stream, each record once by its number, as the data plane takes them."""
    records: dict[tuple[str, int], CaptureRecord] = {}
    counts: list[CaptureCount] = []
    messages: list[CaptureRecords] = []
    async for batch in read_all(mesh, mesh.topology.capture, "hr.capture.>"):
        for m in batch:
            message = codec.CAPTURE.decode(m.data, m.headers)
            if isinstance(message, CaptureCount):
                counts.append(message)
            else:
                messages.append(message)
                records |= {(message.life, r.seq): r for r in message.records}
    return [records[key] for key in sorted(records)], counts, messages


async def until(check: Callable[[], Awaitable[bool]] | Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if found is True or (found is not False and await found):
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_records_are_stored_in_order_with_their_run(mesh: Mesh) -> None:
    capture = Capture(mesh, "planner")
    capture.start()
    for i in range(2_500):
        capture.record(
            f"run-{i % 2}", "note", {"i": i}, name="step", message=f"m{i}", peer="writer", hop=i % 3
        )
    counts = await capture.stop(20.0)
    assert (counts.recorded, counts.captured, counts.dropped, counts.waiting) == (2_500, 2_500, 0, 0)
    records, told, messages = await stored(mesh)
    assert [r.seq for r in records] == list(range(1, 2_501))
    assert [msgspec.json.decode(r.data) for r in records] == [{"i": i} for i in range(2_500)]
    assert [r.at_us for r in records] == sorted({r.at_us for r in records})
    assert {m.run for m in messages} == {"run-0", "run-1"}
    assert all(r.seq % 2 == (1 if m.run == "run-0" else 0) for m in messages for r in m.records)
    last = max(told, key=lambda c: c.number)
    assert (last.final, last.recorded, last.captured, last.dropped) == (True, 2_500, 2_500, 0)
    assert (records[7].name, records[7].message, records[7].peer, records[7].hop) == (
        "step",
        "m7",
        "writer",
        1,
    )


async def test_what_a_full_buffer_drops_is_a_gap_in_the_numbers(mesh: Mesh) -> None:
    capture = Capture(mesh, "a", Recorder(limit=100))
    for i in range(150):
        capture.record("r", "note", i)
    assert (capture.counts.recorded, capture.counts.dropped, capture.counts.waiting) == (150, 50, 100)
    capture.start()
    await until(lambda: capture.counts.waiting == 0)
    capture.record("r", "note", "after")
    counts = await capture.stop()
    assert (counts.recorded, counts.captured, counts.dropped) == (151, 101, 50)
    records, _, _ = await stored(mesh)
    assert [r.seq for r in records] == [*range(1, 101), 151]


async def test_m12_with_the_broker_down_nothing_waits_and_every_record_is_counted(
    mesh: Mesh, nats_server: NatsServer
) -> None:
    capture = Capture(mesh, "a", Recorder(limit=1_000))
    capture.start()
    for i in range(200):
        capture.record("r", "note", i)
    await until(lambda: capture.counts.captured == 200)
    nats_server.kill()
    await until(lambda: not mesh.connected)
    began = time.monotonic()
    for i in range(3_000):
        capture.record("r", "note", i)
        if i % 500 == 0:
            counts = capture.counts
            assert counts.recorded == counts.captured + counts.dropped + counts.waiting
            await asyncio.sleep(0)
    assert time.monotonic() - began < 5.0  # the broker's own time-outs are longer
    counts = capture.counts
    assert (counts.recorded, counts.captured, counts.waiting, counts.dropped) == (3_200, 200, 1_000, 2_000)
    await asyncio.to_thread(nats_server.restart)
    await until(lambda: capture.counts.waiting == 0, 60.0)
    counts = await capture.stop(20.0)
    assert (counts.recorded, counts.captured, counts.dropped) == (3_200, 1_200, 2_000)
    records, told, _ = await stored(mesh)
    assert [r.seq for r in records] == list(range(1, 1_201))
    last = max(told, key=lambda c: c.number)
    assert (last.recorded, last.captured, last.dropped, last.final) == (3_200, 1_200, 2_000, True)


async def test_m12_with_a_broker_that_stands_still_nothing_waits(mesh: Mesh, nats_server: NatsServer) -> None:
    capture = Capture(mesh, "a", Recorder(limit=500))
    capture.start()
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        await until(lambda: psutil.Process(nats_server.pid).status() == psutil.STATUS_STOPPED)
        began = time.monotonic()
        for i in range(2_000):
            capture.record("r", "note", {"i": i, "text": "x" * 200})
            if i % 100 == 0:
                await asyncio.sleep(0)
        assert time.monotonic() - began < 5.0
        counts = capture.counts
        assert (counts.recorded, counts.captured) == (2_000, 0)
        assert counts.dropped + counts.waiting == 2_000
        assert counts.waiting == 500
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await until(lambda: capture.counts.waiting == 0, 60.0)
    counts = await capture.stop(20.0)
    assert (counts.captured, counts.dropped) == (500, 1_500)
    records, _, _ = await stored(mesh)
    assert len(records) == 500


async def test_m12_an_agent_whose_records_nobody_takes_handles_all_the_same(
    mesh: Mesh, settings: Settings
) -> None:
    await jsapi.call(mesh, f"STREAM.DELETE.{mesh.topology.capture}")
    settings = msgspec.structs.replace(
        settings, agent=msgspec.structs.replace(settings.agent, capture_records=100)
    )
    got: list[int] = []
    made = Agent("a")

    @made.on("n")
    async def n(ctx: Context[dict[str, Any]], msg: int) -> None:
        ctx.record("got", msg)
        got.append(msg)

    async with hosting(settings, made) as service:
        for i in range(200):
            await send(mesh, "a", "n", i)
        await until(lambda: len(got) == 200)
        await until(lambda: service.runners["a"].handled == 200)
        capture = service._captures["a"]
        counts = capture.counts
        assert (counts.captured, counts.waiting) == (0, 100)
        assert counts.recorded == counts.dropped + counts.waiting >= 400  # each is a note, and handled
    assert got == list(range(200))
    counts = capture.counts
    assert (counts.captured, counts.waiting, counts.dropped) == (0, 0, counts.recorded)


async def test_a_stop_without_a_broker_counts_what_is_lost(mesh: Mesh, nats_server: NatsServer) -> None:
    capture = Capture(mesh, "a")
    capture.start()
    nats_server.kill()
    await until(lambda: not mesh.connected)
    for i in range(5_000):
        capture.record(f"r{i % 7}", "note", i)
    await until(lambda: bool(capture.recorder._held))  # some are taken from the buffer, and on their way
    counts = await capture.stop(0.2)
    assert (counts.recorded, counts.captured, counts.dropped, counts.waiting) == (5_000, 0, 5_000, 0)


async def test_counts_are_stored_meanwhile_for_whoever_is_killed(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.agent.capture.COUNT_EVERY_S", 0.3)
    capture = Capture(mesh, "a", Recorder(limit=100))
    for i in range(150):
        capture.record("r", "note", i)
    task = capture.start()

    async def told() -> bool:
        _, counts, _ = await stored(mesh)
        return any((c.recorded, c.captured, c.dropped, c.final) == (150, 100, 50, False) for c in counts)

    await until(told)
    task.cancel()  # as a kill would: no last count
    _, counts, _ = await stored(mesh)
    assert all(c.recorded == c.captured + c.dropped + c.waiting for c in counts)
    assert not any(c.final for c in counts)


async def test_counts_are_exact_from_many_threads(mesh: Mesh) -> None:
    capture = Capture(mesh, "a", Recorder(limit=3_000))
    capture.start()

    def work(n: int) -> None:
        for i in range(1_000):
            capture.record(f"r{n}", "note", i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    counts = await capture.stop(20.0)
    assert counts.recorded == 8_000
    assert counts.captured + counts.dropped == 8_000
    records, _, _ = await stored(mesh)
    assert len(records) == counts.captured


async def test_agents_of_one_process_share_its_room(mesh: Mesh) -> None:
    one, many = captures(mesh, ["a"]), captures(mesh, [f"a{i}" for i in range(20)])
    for capture in (one["a"], many["a0"]):
        for i in range(11_000):
            capture.record("r", "note", i)
    assert (one["a"].counts.waiting, one["a"].counts.dropped) == (10_000, 1_000)
    assert many["a0"].counts.waiting == 500
    heavy = captures(mesh, [f"a{i}" for i in range(1_000)])["a0"]
    for _ in range(100):
        heavy.record("r", "note", "x" * 30_000)
    assert 1 <= heavy.counts.waiting <= 3


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


async def test_whatever_is_recorded_nothing_is_raised_and_neighbours_are_stored(mesh: Mesh) -> None:
    capture = Capture(mesh, "a")
    capture.start()
    loop: list[object] = []
    loop.append(loop)
    odd: list[object] = [
        "x" * (RECORD_BYTES + 1), Raw(b"{not json"), Raw(b'"\xff"'), object(), Rude(), loop, {1: 2}, "\ud800", 10**40,
        float("nan"), {"a": {1, 2}},
    ]  # fmt: skip
    for value in odd:
        capture.record("r", "note", value)
    capture.record("no token: *.>", "no token", None, name="\ud800" * 300, hop=-1)
    capture.record("r", "note", "fine")
    counts = await capture.stop(20.0)
    assert (counts.recorded, counts.captured) == (len(odd) + 2, len(odd) + 2)
    records, _, messages = await stored(mesh)
    assert len(records) == len(odd) + 2
    assert msgspec.json.decode(records[0].data) == {"left_out_bytes": RECORD_BYTES + 3}
    assert msgspec.json.decode(records[-1].data) == "fine"
    assert len({m.run for m in messages}) == 2


async def test_a_full_stream_waits_and_then_drops(mesh: Mesh) -> None:
    config = (await jsapi.stream_info(mesh, mesh.topology.capture))["config"] | {"max_msgs": 1}
    await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.capture}", config)
    capture = Capture(mesh, "a", Recorder(limit=50))
    capture.start()
    capture.record("r", "note", 0)
    await until(lambda: capture.counts.captured == 1)
    for i in range(100):
        capture.record("r", "note", i)
    counts = capture.counts
    assert (counts.waiting, counts.dropped) == (50, 50)
    counts = await capture.stop(0.5)
    assert (counts.captured, counts.dropped) == (1, 100)


def test_secrets_are_replaced_wherever_they_stand() -> None:
    redact = Redactor([r"sk-[a-z0-9]+", r"\b\d{16}\b"])
    data = {"key": "Bearer sk-abc1", "sk-zz": 1, "sk-yy": 2, "card": 4111111111111111, "list": ["4111111111111111"],
            "n": 7, "t": True, "none": None}  # fmt: skip
    found = msgspec.json.decode(redact.json(msgspec.json.encode(data)))
    assert found == {
        "key": "Bearer [redacted]", "[redacted]": 1, "[redacted] 2": 2, "card": "[redacted]", "list": ["[redacted]"],
        "n": 7, "t": True, "none": None,
    }  # fmt: skip
    assert msgspec.json.decode(redact.json(b"[" * 200 + b"]" * 200)) is not None
    with pytest.raises(InvalidInput, match=r"policy\.redact"):
        Redactor(["("])


async def test_what_is_redacted_is_not_in_the_stream(mesh: Mesh) -> None:
    settings = msgspec.structs.replace(
        mesh.settings, policy=msgspec.structs.replace(mesh.settings.policy, redact=["secret-[0-9]+"])
    )
    async with await Mesh.connect(settings, name="agent") as own:
        capture = Capture(own, "a")
        capture.start()
        capture.record("r", "note", {"token": "secret-42", "deep": [{"x": "a secret-43 b"}]})
        await capture.stop()
    async for batch in read_all(mesh, mesh.topology.capture, "hr.capture.>"):
        assert all(b"secret-4" not in m.data for m in batch)
