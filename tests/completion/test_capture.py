"""What agents recorded, as rows: once each, in order over the agents of a run, and accounted for."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from msgspec import Raw

from headrace.agent.buffer import Recorder
from headrace.agent.capture import Capture
from headrace.completion import capture_rows
from headrace.completion.capture_schema import CAPTURE_STEP
from headrace.contracts import codec
from headrace.contracts.capture import CaptureCount, CaptureMessage, CaptureRecord, CaptureRecords
from headrace.mesh.connection import Mesh
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.completion.world import Process, serving, sql, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def connection(tmp_path: Path) -> duckdb.DuckDBPyConnection:
    made = duckdb.connect(str(tmp_path / "x.duckdb"))
    for statement in CAPTURE_STEP:
        made.execute(statement)
    return made


def records(agent: str, numbers: list[int], run: str = "r", **fields: Any) -> CaptureRecords:
    return CaptureRecords(
        agent=agent,
        run=run,
        life=f"life-{agent}",
        records=[CaptureRecord(seq=n, at_us=1_000 * n, kind="note", **fields) for n in numbers],
    )


def count(
    agent: str, number: int, recorded: int, captured: int, dropped: int, *, final: bool = False
) -> CaptureCount:
    return CaptureCount(
        agent=agent, life=f"life-{agent}", number=number, at_us=number, recorded=recorded, captured=captured,
        dropped=dropped, waiting=recorded - captured - dropped, final=final,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_any_order_and_any_repetition_give_the_same_rows(
    connection: duckdb.DuckDBPyConnection, seed: int
) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    messages: list[CaptureMessage] = [
        records("a", [1, 2, 3]), records("a", [4, 6], run="other"), records("b", [1, 2]), count("a", 1, 3, 2, 0),
        count("a", 2, 6, 5, 1, final=True), count("b", 1, 2, 1, 0),
    ]  # fmt: skip
    sent = list(enumerate(messages, 1)) * 3
    rng.shuffle(sent)
    while sent:
        n = rng.randrange(1, 5)
        capture_rows.insert(connection, sent[:n])
        sent = sent[n:]
    found = connection.execute("SELECT agent, seq, run FROM capture ORDER BY ALL").fetchall()
    assert found == [
        ("a", 1, "r"), ("a", 2, "r"), ("a", 3, "r"), ("a", 4, "other"), ("a", 6, "other"), ("b", 1, "r"), ("b", 2, "r"),
    ]  # fmt: skip
    account = "SELECT agent, recorded, landed, dropped, missing, final FROM capture_account ORDER BY agent"
    assert connection.execute(account).fetchall() == [("a", 6, 5, 1, 0, True), ("b", 2, 2, 0, 0, False)]


def test_what_was_taken_for_dropped_and_is_here_counts_as_landed(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    capture_rows.insert(connection, [(1, records("a", [1, 2, 4])), (2, count("a", 1, 5, 2, 3, final=True))])
    capture_rows.insert(connection, [(3, records("b", [1, 3]))])  # killed before it counted
    account = "SELECT agent, recorded, landed, dropped, missing, final FROM capture_account ORDER BY agent"
    assert connection.execute(account).fetchall() == [("a", 5, 3, 2, 0, True), ("b", 3, 2, 0, 1, False)]


def test_the_messages_that_were_handled_are_a_view(connection: duckdb.DuckDBPyConnection) -> None:
    data = Raw(b'{"attempt":2,"body":{"q":1},"error":"late"}')
    record = CaptureRecord(seq=1, at_us=5, kind="failed", name="ask", message="m", peer="b", hop=3, data=data)
    other = CaptureRecord(seq=2, at_us=6, kind="handled", name="ask", message="m", data=Raw(b'"text"'))
    capture_rows.insert(
        connection, [(1, CaptureRecords(agent="a", run="r", life="l", records=[record, other]))]
    )
    found = connection.execute(
        "SELECT message, kind, sender, hop, outcome, attempt, body, error FROM messages ORDER BY outcome"
    ).fetchall()
    assert found == [
        ("m", "ask", "b", 3, "failed", 2, '{"q":1}', "late"),
        ("m", "ask", None, 0, "handled", None, None, None),
    ]


async def test_what_agents_record_is_landed_and_undecodable_ones_are_dead_letters(
    mesh: Mesh, settings: Settings
) -> None:
    async with serving(settings):
        planner, writer = Capture(mesh, "planner"), Capture(mesh, "writer", Recorder(limit=10))
        for i in range(20):
            writer.record("r", "note", {"i": i})
        planner.start()
        writer.start()
        for i in range(300):
            planner.record("r", "note", {"i": i})
        subject = mesh.subjects.capture("a", "r")
        await publish(mesh, mesh.topology.capture, subject, b"{")
        stranger = codec.CAPTURE.encode(records("b", [1]))  # on the subject of another
        await publish(mesh, mesh.topology.capture, subject, stranger)
        await planner.stop()
        await writer.stop()
        account = (
            "SELECT agent, recorded, landed, dropped, missing FROM capture_account WHERE final ORDER BY agent"
        )
        await until(lambda: _is(mesh, account, [["planner", 300, 300, 0, 0], ["writer", 20, 10, 10, 0]]))
        assert await sql(mesh, "SELECT data->>'i' FROM capture WHERE agent = 'writer' ORDER BY seq") == [
            [str(i)] for i in range(10)
        ]
        await until(lambda: _is(mesh, "SELECT count(*) FROM dead WHERE origin = 'HR_CAPTURE'", [[2]]))


async def _is(mesh: Mesh, query: str, expected: list[Any]) -> bool:
    return await sql(mesh, query) == expected


async def test_killed_between_commit_and_ack_each_record_is_there_once(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    settings = msgspec.structs.replace(settings, ack_wait_s=1.0)
    capture = Capture(mesh, "a")
    capture.start()
    for i in range(500):
        capture.record(f"r{i % 3}", "note", i)
    await capture.stop()
    completion = Process(settings, tmp_path, crash_at="capture-committed:1")
    await completion.start(wait=False)
    await until(lambda: completion.process is not None and completion.process.poll() is not None, 40)
    assert completion.process is not None
    assert completion.process.returncode == -signal.SIGKILL
    completion.crash_at = ""
    await completion.start()
    try:
        await until(lambda: _is(mesh, "SELECT count(*), max(seq) FROM capture", [[500, 500]]), 30)
        done = "SELECT landed, missing FROM capture_account"
        await until(lambda: _is(mesh, done, [[500, 0]]), 30)
    finally:
        completion.kill()
