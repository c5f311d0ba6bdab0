"""Worker processes that die of a fault, are killed, or are paused: what their items become (A20, S10)."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from headrace.contracts import codec
from headrace.contracts.messages import Result
from headrace.contracts.suspects import Suspect
from headrace.inference_worker.flight import FlightRecorder
from headrace.inference_worker.wreckage import take_over
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import last_message
from headrace.mesh.suspects import SuspectBook
from tests.worker.conftest import StartWorker
from tests.worker.harness import (
    WorkerProcess,
    left,
    one_loop,
    put,
    results,
    stored,
    task,
    until,
    until_empty,
    until_stored,
)
from tests.worker.test_triage import by_index, prompts, records

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

OPTIONS = {"time_scale": "0.05", "output_median": "40", "segfault": "SEGV", "hang": "HANG"}


def flights(worker: WorkerProcess) -> list[Path]:
    return sorted((worker.log.parent / "run").glob("*"))


def first_of(found: list[Result]) -> dict[int, Result]:
    """The outcomes as they land: the first of each counts. What was stored and not yet acked at a death comes twice."""
    first: dict[int, Result] = {}
    for result in found:
        assert first.setdefault(result.index, result).status == result.status
    return first


async def suspects(mesh: Mesh) -> dict[str, Suspect]:
    return {key: r for key, r in (await records(mesh)).items() if isinstance(r, Suspect)}


@one_loop
@pytest.mark.parametrize("bad", [(33,), (5, 9, 12)])
async def test_items_that_end_the_process_are_convicted_within_two_deaths_each(
    bad: tuple[int, ...], mesh: Mesh, start_worker: StartWorker
) -> None:
    worker = start_worker(ack_wait_s=1.0, engine="sim", slots=16, engine_options=OPTIONS, max_tries=4)
    await put(mesh, prompts(80, dict.fromkeys(bad, "SEGV")))
    deaths = 0
    while await left(mesh):
        assert worker.process is not None
        if worker.process.poll() is not None:
            assert worker.wait() == -signal.SIGSEGV
            deaths += 1
            worker.start()
        await asyncio.sleep(0.02)
    found = first_of(await results(mesh))
    print("deaths", deaths, "attempts", Counter(r.attempt for r in found.values()))
    assert deaths <= 2 * len(bad)
    for i in bad:
        poison = found.pop(i)
        assert poison.status == "dead"
        assert poison.error is not None
        assert poison.error.type == "poison", (poison, await records(mesh), worker.log.read_text())
        assert "Fatal Python error: Segmentation fault" in poison.error.message
    assert Counter(r.status for r in found.values()) == {"ok": 80 - len(bad)}
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert flights(worker) == [], "an orderly end leaves no recorder"


@one_loop
async def test_a_process_whose_loop_stands_still_ends_and_its_culprit_is_convicted(
    mesh: Mesh, start_worker: StartWorker
) -> None:
    """The leases are renewed by a thread: without an end they would be held for ever."""
    options = {**OPTIONS, "freeze": "FREEZE"}
    worker = start_worker(ack_wait_s=1.0, engine="sim", slots=8, engine_options=options, token_timeout_s=1.0)
    await put(mesh, prompts(20, {4: "FREEZE"}))
    for _ in range(2):
        assert await asyncio.to_thread(worker.wait, 40) == -signal.SIGABRT
        worker.start()
    await until_empty(mesh)
    assert "event loop stands still" in worker.log.read_text()
    found = first_of(await results(mesh))
    frozen = found.pop(4)
    assert frozen.error is not None
    assert (frozen.status, frozen.error.type) == ("dead", "poison")
    assert Counter(r.status for r in found.values()) == {"ok": 19}


@one_loop
async def test_a_killed_process_makes_no_suspects(mesh: Mesh, start_worker: StartWorker) -> None:
    slow = {"time_scale": "1", "output_median": "40"}
    worker = start_worker(ack_wait_s=1.0, engine="sim", slots=16, engine_options=slow)
    await put(mesh, prompts(40, {}))
    await until_stored(mesh, 2)
    worker.kill()
    assert [p.suffix for p in flights(worker)] == [".fault", ".flight"]
    dead = flights(worker)
    worker.start()
    await until_empty(mesh)
    assert not set(dead) & set(flights(worker)), "the dead one's files are removed"
    assert await suspects(mesh) == {}
    found = await results(mesh)
    assert {r.index for r in found} == set(range(40))
    assert {r.status for r in found} == {"ok"}


@one_loop
async def test_a_worker_that_dies_while_it_takes_a_recorder_over_counts_the_crash_once(
    mesh: Mesh, start_worker: StartWorker
) -> None:
    worker = start_worker(ack_wait_s=1.0, engine="sim", slots=4, engine_options=OPTIONS)
    await put(mesh, prompts(4, {3: "SEGV"}))
    assert worker.wait() == -signal.SIGSEGV
    with pytest.raises(AssertionError):  # it does not get ready
        worker.start(HEADRACE_CRASH_AT="wreckage-recorded")
    assert worker.wait() == -signal.SIGKILL
    first = await suspects(mesh)
    assert {r.crashes for r in first.values()} == {1}
    worker.start()
    assert worker.process is not None
    again = await suspects(mesh)
    assert {
        key: r.crashes for key, r in again.items() if key in first and r.incident == first[key].incident
    } == (dict.fromkeys(first, 1))


@one_loop
async def test_of_two_that_start_at_once_one_takes_a_recorder_over(mesh: Mesh, tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path, "w", seats=8)
    assert recorder is not None
    for sequence in (5, 6, 7):
        recorder.enter(sequence, 1_000 + sequence, 2_000 + sequence)
    assert await take_over(tmp_path, SuspectBook(mesh)) == 0, "its owner lives"
    path = abandon(recorder, trace="Fatal Python error: Aborted\n\nThread 0x1:")
    books = [SuspectBook(mesh) for _ in range(8)]
    counts = await asyncio.gather(*(take_over(tmp_path, book) for book in books))
    assert sorted(counts) == [0] * 7 + [3]
    assert not path.exists()
    found = await suspects(mesh)
    assert {int(k): (r.crashes, r.alone, r.stored_us, r.started_us) for k, r in found.items()} == {
        n: (1, False, 1_000 + n, 2_000 + n) for n in (5, 6, 7)
    }
    assert {r.error for r in found.values()} == {"the process died: Fatal Python error: Aborted"}
    assert {r.worker for r in found.values()} == {"w"}


@one_loop
async def test_a_recorder_that_nobody_can_read_is_removed_and_no_obstacle(mesh: Mesh, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "w-1.flight").write_bytes(b"garbage")
    (run / "w-1.fault").write_bytes(b"Fatal Python error: Bus error\n")
    (run / "worker-1.ready").write_text("1")
    assert await take_over(tmp_path, SuspectBook(mesh)) == 0
    assert [p.name for p in run.iterdir()] == ["worker-1.ready"]
    assert await take_over(tmp_path / "nowhere", SuspectBook(mesh)) == 0


def abandon(recorder: FlightRecorder, *, trace: str) -> Path:
    """Leave the files as the death of a process leaves them: complete, and not locked any more."""
    faulthandler.disable()
    recorder._map.close()  # it has the file open once more
    os.close(recorder._fd)
    recorder.path.with_suffix(".fault").write_text(trace)
    return recorder.path


@one_loop
async def test_what_is_recorded_and_not_given_back_runs_apart_when_its_lease_lapses(
    mesh: Mesh, start_worker: StartWorker
) -> None:
    """The worker dies between recording its suspects and giving them back."""
    options = {**OPTIONS, "poison": "POISON"}
    worker = start_worker(ack_wait_s=1.0, engine="sim", slots=8, engine_options=options)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    await put(mesh, prompts(8, {5: "POISON"}))
    worker.start(HEADRACE_CRASH_AT="suspects-recorded")
    assert worker.wait(20) == -signal.SIGKILL
    recorded = await suspects(mesh)
    assert len(recorded) >= 2
    worker.start()
    await until_empty(mesh)
    found = by_index(await results(mesh))
    assert found.pop(5).status == "dead"
    assert {r.status for r in found.values()} == {"ok"}


@one_loop
async def test_s10_a_paused_workers_tasks_move_on_and_its_late_results_change_nothing(
    mesh: Mesh, start_worker: StartWorker
) -> None:
    n = 12
    paused = start_worker(name="paused", ack_wait_s=1.0, slots=n, engine_options={"delay_ms": "1500"})
    await put(mesh, [task(i) for i in range(n)])
    await asyncio.sleep(0.5)  # leased and running: a third of what they take
    assert await stored(mesh) == 0
    paused.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    other = start_worker(name="other", ack_wait_s=1.0, slots=64, engine_options={"delay_ms": "4000"})
    await until(lambda: held_by(mesh, "other", n), within_s=10)
    print(f"moved on {time.monotonic() - stopped:.1f} s after the pause began")
    # Tasks that the paused one never had.
    await put(mesh, [task(i, job="others") for i in range(10)])
    await until(lambda: held_by(mesh, "other", n + 10), within_s=10)
    paused.signal(signal.SIGCONT)
    await until_stored(mesh, n)
    late = await results(mesh)
    assert {("j", r.index) for r in late if r.worker == "paused" and r.attempt == 1} == {
        ("j", i) for i in range(n)
    }
    assert await left(mesh, "others") == 10, "it acks nothing that it did not finish"
    await until_empty(mesh)
    await until_stored(mesh, 2 * n + 10)
    found = await results(mesh)
    seen = Counter((r.job, r.index) for r in found)
    print(seen)
    assert set(seen) == {("j", i) for i in range(n)} | {("others", i) for i in range(10)}
    # A pull that was open when it was paused took one more, so some were delivered three times.
    assert all(seen["j", i] in (2, 3) and seen["others", i] in (1, 2) for i in range(10))
    assert all(r.attempt > 1 for r in found if r.job == "j" and r.worker == "other"), (
        "and landing counts it twice"
    )
    assert await suspects(mesh) == {}
    for worker in (paused, other):
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0


async def held_by(mesh: Mesh, worker: str, n: int) -> bool:
    bucket = mesh.topology.workers_bucket
    found = await last_message(mesh, f"KV_{bucket}", f"$KV.{bucket}.{worker}")
    return found is not None and codec.WORKER_REPORT.decode(found.data).in_flight >= n


@one_loop
async def test_s10_a_pause_is_no_time_without_tokens(mesh: Mesh, start_worker: StartWorker) -> None:
    """The watchdog counts the time that the engine had, not that of the clock on the wall."""
    slow = {"step_ms": "600", "output_median": "300", "output_sigma": "0"}
    worker = start_worker(
        name="w", ack_wait_s=30.0, engine="sim", slots=4, token_timeout_s=1.0, engine_options=slow
    )
    await put(mesh, [task(i, max_tokens=10) for i in range(4)])
    await until(lambda: held_by(mesh, "w", 4), within_s=10)
    for _ in range(4):
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        worker.signal(signal.SIGCONT)
        await asyncio.sleep(0.3)
    await until_empty(mesh)
    assert sorted((r.index, r.status, r.attempt) for r in await results(mesh)) == [
        (i, "ok", 1) for i in range(4)
    ]
    assert "engine died" not in worker.log.read_text()
