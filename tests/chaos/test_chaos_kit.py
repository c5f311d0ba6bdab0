"""The parts of the fault kit: a plan that repeats, faults that are undone, and a verdict that finds what is wrong."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from headrace.cli.chaos_kit import guard, quota
from headrace.cli.chaos_kit.conductor import Conductor
from headrace.cli.chaos_kit.load import Load, Source, mean_tokens, prepare, with_id
from headrace.cli.chaos_kit.pace import engine_flags, queue_bound
from headrace.cli.chaos_kit.plan import KILLED, Fault, even_kills, make_plan
from headrace.cli.chaos_kit.report import Report
from headrace.cli.chaos_kit.run import kills_in
from headrace.cli.chaos_kit.sampler import Sampler
from headrace.cli.chaos_kit.streams import Streams
from headrace.cli.chaos_kit.verdict import Verdict, judge
from headrace.contracts import codec
from headrace.contracts.api import JobAudit, Sources
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import Choice, JobCompleted
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.consumer import Delivery, PullConsumer
from headrace.mesh.jsapi import JetStreamError
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings
from tests.completion.world import FUNCTION, SHAPE, Producer, register, result, serving, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> object:
    """The command runs on uvloop."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


# --- the plan ---------------------------------------------------------------------------------------
def test_a_seed_is_a_sequence() -> None:
    def plan(seed: int) -> list[object]:
        return make_plan(seed, even_kills(10), workers=3, ack_wait_s=3.0)  # type: ignore[return-value]

    assert plan(5) == plan(5)
    assert plan(5) != plan(6)


@pytest.mark.parametrize("kills", [1, 3, 10, 25])
def test_a_plan_has_as_many_kills_as_were_asked_for_and_all_else_among_them(kills: int) -> None:
    plan = make_plan(kills, even_kills(kills), workers=2, ack_wait_s=3.0)
    for name in KILLED:
        assert sum(f.kind == "kill" and f.component == name for f in plan) == kills
    assert {f.kind for f in plan} == {"kill", "pause", "disk-full", "queue-full", "delay", "duplicate"}
    assert {f.component for f in plan if f.kind == "pause"} == {*KILLED, "gateway"}
    assert any(f.kind == "pause" and f.component == "worker" and f.seconds > 3.0 for f in plan)
    assert [f.at for f in plan] == sorted(f.at for f in plan)
    assert all(0 < f.at < 0.9 for f in plan)
    assert {f.victim for f in plan if f.component == "worker"} <= {"worker-1", "worker-2"}


def test_a_run_of_half_a_minute_has_ten_kills_of_each() -> None:
    assert [kills_in(s) for s in (1, 6, 30, 60, 120)] == [1, 2, 10, 10, 20]


def test_no_kills_no_faults_and_only_kills_on_request() -> None:
    assert make_plan(1, even_kills(0), workers=2, ack_wait_s=3.0) == []
    plan = make_plan(1, {"worker": 7, "broker": 2}, workers=1, ack_wait_s=3.0, only_kills=True)
    assert [f.kind for f in plan] == ["kill"] * 9


# --- when, and what it means ------------------------------------------------------------------------
def audit(ok: int = 0, *, balanced: bool = True, state: str = "sealed", **fields: Any) -> JobAudit:
    sources = Sources(
        manifest_stored=10, manifest_closed="sealed", tasks_in_broker=0, results_in_broker=0, rows_landed=ok,
        distinct_indices=ok,
    )  # fmt: skip
    return JobAudit(
        job="j", state=state, submitted=10, ok=ok, balanced=balanced, missing=[], sources=sources, **fields
    )


class Recorder:
    """Stands where the faults are done; a fault takes as long as it says."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.over: list[float] = []

    async def inject(self, fault: Fault) -> None:
        self.begun.append(fault.at)
        await asyncio.sleep(fault.seconds)
        self.over.append(fault.at)


async def test_faults_are_due_by_the_clock_or_by_the_progress_of_the_job(mesh: Mesh) -> None:
    sampler, faults = Sampler(mesh, "j", show=lambda _: None), Recorder()
    conductor = Conductor(faults, sampler, seconds=1_000.0, items=10)  # type: ignore[arg-type]
    plan = [
        Fault(at=at, kind="kill", victim="broker", seconds=s) for at, s in ((0.2, 0), (0.5, 0), (0.7, 600))
    ]
    running = asyncio.create_task(conductor.run(plan))
    await asyncio.sleep(0.2)
    assert faults.begun == []
    sampler.take(audit(5))
    await until(lambda: faults.over == [0.2, 0.5])
    sampler.take(audit(8))
    await until(lambda: len(faults.begun) == 3)
    sampler.take(audit(10, state="completed"))  # nothing more is broken once the job has ended
    await asyncio.wait_for(running, 5)
    assert faults.over == [0.2, 0.5]
    soon = Conductor(faults, Sampler(mesh, "j", show=lambda _: None), seconds=0.2, items=10)  # type: ignore[arg-type]
    await asyncio.wait_for(soon.run(plan[:2]), 5)
    assert faults.over == [0.2, 0.5, 0.2, 0.5]


async def test_samples_are_counted_and_the_last_word_is_the_furthest(mesh: Mesh) -> None:
    sampler = Sampler(mesh, "j", show=lambda _: None)
    for found in (audit(3), audit(5, balanced=False), audit(4)):
        sampler.take(found)
    assert (sampler.balanced, [a.ok for a in sampler.unbalanced], sampler.landed) == (2, [5], 5)
    assert not sampler.ended.is_set()


def report(
    *, unbalanced: list[JobAudit] | None = None, last: JobAudit | None = None, **fields: Any
) -> Report:
    whole = {"items": 10, "rows": 10, "ok": 10, "completed_events": 1}
    return Report(
        seed=1, seconds=2.0, verdict=Verdict(**(whole | fields)), audit=last or audit(10, state="completed"),
        balanced_samples=5, unbalanced=unbalanced or [], unanswered_samples=1, faults=[], submits=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"lost": 1},
        {"doubled": 1},
        {"mismatched": 1},
        {"not_stored": 1},
        {"dead_letters": 1},
        {"results_left": 1},
        {"completed_events": 0},
        {"ok": 9, "failed": 1},  # the account says ten are ok
        {"unbalanced": [audit(4, balanced=False)]},
        {"last": audit(10, balanced=False, state="completed")},
    ],
)
def test_anything_that_is_not_as_promised_is_a_problem(wrong: dict[str, Any]) -> None:
    assert report().problems() == []
    found = report(**wrong)
    assert len(found.problems()) == 1
    assert found.summary()["problems"] == found.problems()


# --- the input --------------------------------------------------------------------------------------
def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def test_lines_are_repeated_or_cut_and_each_has_an_id_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"custom_id": "a", "prompt": "x"}\n\n{"prompt":"y", "max_tokens": 3}\r\n{}\n')
    load = prepare(Source(file=str(file)), tmp_path / "whole.jsonl")
    assert (load.items, load.distinct, load.limits) == (3, 3, [256, 3, 256])
    assert (tmp_path / "whole.jsonl").read_bytes() == (
        b'{"custom_id": "a", "prompt": "x"}\n\n'
        b'{"custom_id":"chaos-1","prompt":"y", "max_tokens": 3}\n{"custom_id":"chaos-2"}\n'
    )
    longer = prepare(Source(file=str(file)), tmp_path / "longer.jsonl", items=7)
    ids = [line["custom_id"] for line in lines(longer.path)]
    assert ids == ["a", "chaos-1", "chaos-2", "a-3", "chaos-4", "chaos-5", "a-6"]
    assert (longer.items, longer.distinct) == (7, 3)
    shorter = prepare(Source(file=str(file)), tmp_path / "shorter.jsonl", items=2)
    assert [line["custom_id"] for line in lines(shorter.path)] == ["a", "chaos-1"]


def test_what_is_no_line_stays_for_submit_to_name(tmp_path: Path) -> None:
    assert with_id(b'{"custom_id": 5, "prompt": "x"}', 1) == b'{"custom_id": 5, "prompt": "x"}'
    assert with_id(b"{cut", 1) == b"{cut"
    assert with_id(b"[1]", 1) == b"[1]"
    file = tmp_path / "rows.jsonl"
    file.write_text('{"any": 1}\n[2]\n')
    load = prepare(Source(file=str(file), rows=True), tmp_path / "out.jsonl", items=3)
    assert load.path.read_text() == '{"any": 1}\n[2]\n{"any": 1}\n'
    file.write_text("\n \n")
    with pytest.raises(InvalidInput, match="has no line"):
        prepare(Source(file=str(file)), tmp_path / "none.jsonl", items=3)


def test_the_mean_of_capped_answers_is_that_of_drawn_ones() -> None:
    rng = random.Random(1)
    for limit in (8, 100, 5_000):
        drawn = [min(limit, 128 * rng.lognormvariate(0.0, 0.8)) for _ in range(20_000)]
        mean = mean_tokens([limit], median=128.0, sigma=0.8)
        assert mean == pytest.approx(sum(drawn) / len(drawn), rel=0.03)


def test_pretended_engines_are_slowed_and_real_ones_are_not(tmp_path: Path) -> None:
    load = Load(path=tmp_path, items=1_000, distinct=1, size=100_000, limits=[16])
    assert engine_flags("echo", load, seconds=20, workers=2, slots=50) == ["delay_ms=1000.000"]
    assert engine_flags("llamacpp", load, seconds=20, workers=2, slots=None) == []
    (flag,) = engine_flags("sim", load, seconds=20, workers=2, slots=50)
    assert float(flag.removeprefix("time_scale=")) == pytest.approx(1.0 / (16 * 0.0083), rel=0.05)
    assert load.size < queue_bound(load) * 3 < 2 * (load.size + 300_000)


# --- processes --------------------------------------------------------------------------------------
def state_of(pid: int) -> str:
    return psutil.Process(pid).status()


async def test_a_pause_ends_with_its_block(tmp_path: Path) -> None:
    process = subprocess.Popen(SLEEPER)
    try:
        async with guard.stopped(process.pid, seconds=30):
            await until(lambda: state_of(process.pid) == psutil.STATUS_STOPPED)
        await until(lambda: state_of(process.pid) != psutil.STATUS_STOPPED)
    finally:
        process.kill()
        process.wait()


async def test_a_pause_ends_though_whoever_made_it_was_killed() -> None:
    process = subprocess.Popen(SLEEPER)
    code = (
        "import asyncio, os, signal\nfrom headrace.cli.chaos_kit import guard\n"
        "async def main():\n"
        f"    async with guard.stopped({process.pid}, seconds=4.0):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    try:
        pauser = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        assert await pauser.wait() == -signal.SIGKILL
        await until(lambda: state_of(process.pid) == psutil.STATUS_STOPPED)
        await until(lambda: state_of(process.pid) != psutil.STATUS_STOPPED)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not quota.SUPPORTED, reason="another process can be limited on Linux only")
async def test_a_full_disk_is_one_for_new_bytes_only_and_is_freed_again(tmp_path: Path) -> None:
    """The writer goes on trying, as completion does."""
    file, log = tmp_path / "data", tmp_path / "said"
    file.write_bytes(b"x" * 1_000)
    code = (
        "import sys, time\nout = open(sys.argv[1], 'ab', buffering=0)\n"
        "while True:\n"
        "    try:\n        out.write(b'y' * 100); print('stored', flush=True)\n"
        "    except OSError as e:\n        print('refused', flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    with log.open("wb") as said:
        process = subprocess.Popen((sys.executable, "-c", code, str(file)), stdout=said)
    try:
        await until(lambda: "stored" in log.read_text())
        with quota.full(process.pid, [file, tmp_path / "none"]) as bound:
            assert bound >= 1_000
            await until(lambda: "refused" in log.read_text())
            assert file.stat().st_size <= bound
        await until(lambda: log.read_text().endswith("stored\n") and file.stat().st_size > bound)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    with quota.full(process.pid, [file]):  # gone meanwhile: nothing to limit
        pass


# --- streams ----------------------------------------------------------------------------------------
async def test_a_full_queue_refuses_and_loses_nothing_that_it_has(mesh: Mesh) -> None:
    await register(mesh)
    job = Producer(mesh, "j")
    await job.open()
    await job.submit(500)
    streams = Streams(mesh, "j")

    async def stored() -> int:
        return await jsapi.count_subject(mesh, mesh.topology.tasks, mesh.subjects.tasks_of_job("j"))

    async with streams.full("tasks") as bound:
        assert bound > 10_000
        assert await stored() == 500
        with pytest.raises(JetStreamError) as refused:
            await job.submit(100)
        assert refused.value.err_code in jsapi.STREAM_IS_FULL
        # Even a bound below what lies there takes nothing away.
        config = (await jsapi.stream_info(mesh, mesh.topology.tasks))["config"]
        await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", config | {"max_bytes": 1_000})
        assert await stored() == 500
    assert (await jsapi.stream_info(mesh, mesh.topology.tasks))["config"][
        "max_bytes"
    ] == mesh.settings.max_bytes
    await job.submit(100)
    assert await stored() == 600


async def test_the_queue_is_made_whole_again_after_the_broker_was_away(mesh: Mesh, nats_server) -> None:
    streams = Streams(mesh, "j")
    async with streams.full("results"):
        nats_server.kill()
        await until(lambda: not mesh.connected)
        restart = asyncio.get_running_loop().call_later(0.5, nats_server.restart)
    assert restart.when() <= asyncio.get_running_loop().time()
    info = await jsapi.stream_info(mesh, mesh.topology.results)
    assert info["config"]["max_bytes"] == mesh.settings.max_bytes


async def test_what_a_thief_takes_comes_again_to_who_works(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    job = Producer(mesh, "j")
    await job.whole(5)
    assert await Streams(mesh, "j").take("tasks", 3) == 3
    got: list[Delivery] = []
    spec = mesh.topology.task_consumer(FUNCTION, "normal", SHAPE)
    worker = PullConsumer(mesh, spec, got.append)
    await worker.start()
    worker.ask(5)
    await until(lambda: len(got) == 5, settings.ack_wait_s + 10)
    assert sorted(d.delivered for d in got) == [1, 1, 2, 2, 2]
    await worker.stop()


async def test_a_result_that_comes_twice_is_a_duplicate(mesh: Mesh, settings: Settings) -> None:
    await register(mesh)
    job = Producer(mesh, "j")
    await job.whole(10)
    await job.work(range(10))
    streams = Streams(mesh, "j")
    assert await streams.duplicate(3) == 1  # the only one that it has seen so far
    async with serving(settings):
        await job.ended()
        await until(job.results_empty)
        assert await streams.duplicate(3) == 1  # long after it landed
        await until(job.results_empty)
        status = await job.status()
    assert (status.ok, status.duplicates) == (10, 2)


# --- the verdict ------------------------------------------------------------------------------------
@pytest.fixture
async def landed(mesh: Mesh, settings: Settings, tmp_path: Path) -> AsyncIterator[tuple[Producer, Load]]:
    """A job of ten echoed prompts, stored and sealed, with a completion service and nothing landed yet."""
    await register(mesh)
    path = tmp_path / "input.jsonl"
    path.write_text(
        "".join(json.dumps({"custom_id": f"c{i}", "prompt": f"say {i}"}) + "\n" for i in range(10))
    )
    job = Producer(mesh, "j")
    await job.whole(10)
    async with serving(settings):
        yield job, Load(path=path, items=10, distinct=10, size=path.stat().st_size)


async def land(job: Producer, indices: range | list[int], **fields: object) -> None:
    """Outcomes as the engine echo would give them, unless `fields` say otherwise."""
    results = [
        result("j", i, **({"custom_id": f"c{i}", "choices": [Choice(text=f"say {i}")]} | fields))
        for i in indices
    ]
    await job.results(results)
    await job.take_away(list(indices))
    await until(job.results_empty)


async def verdict(job: Producer, load: Load, **more: object) -> Verdict:
    return await judge(
        job.mesh, "j", load, **({"engine": "echo", "submitted": True, "patience_s": 0.2} | more)
    )  # type: ignore[arg-type]


async def test_all_is_well(landed: tuple[Producer, Load]) -> None:
    job, load = landed
    await land(job, range(10))
    await job.ended()
    found = await verdict(job, load)
    assert (found.ok, found.rows, found.completed_events) == (10, 10, 1)
    assert (found.lost, found.doubled, found.mismatched, found.missing, found.examples) == (0, 0, 0, [], [])


async def test_items_that_are_nowhere_are_lost(landed: tuple[Producer, Load]) -> None:
    job, load = landed
    await land(job, [0, 1, 2, 5, 9])
    # As somebody who acks on read would do it: the tasks are gone, and no outcome ever comes.
    await jsapi.purge(job.mesh, job.mesh.topology.tasks, filter_=job.mesh.subjects.tasks_of_job("j"))
    found = await verdict(job, load)
    assert (found.lost, found.missing, found.ok) == (5, [(3, 4), (6, 8)], 5)


async def test_items_that_wait_are_not_lost(landed: tuple[Producer, Load]) -> None:
    job, load = landed
    await land(job, range(4))
    found = await verdict(job, load)
    assert (found.lost, found.tasks_left, found.missing) == (0, 6, [(4, 9)])
    more = Load(path=load.path, items=10, distinct=10, size=load.size)
    unfinished = await verdict(job, more, submitted=False)
    assert (unfinished.not_stored, unfinished.lost) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"custom_id": "c3"}, "custom id 'c3' instead of 'c7'"),
        ({"custom_id": None}, "custom id None instead of 'c7'"),
        ({"choices": [Choice(text="say 3")]}, "the answer is not its own prompt"),
    ],
)
async def test_outcomes_of_another_line_are_found(
    landed: tuple[Producer, Load], fields: dict[str, object], said: str
) -> None:
    job, load = landed
    await land(job, [0, 1, 2, 3, 4, 5, 6, 8, 9])
    await land(job, [7], **fields)
    await job.ended()
    found = await verdict(job, load)
    assert (found.mismatched, found.examples, found.lost) == (1, [f"item 7: {said}"], 0)


async def test_an_index_that_no_line_has_is_found(landed: tuple[Producer, Load]) -> None:
    job, load = landed
    await land(job, range(10))
    await job.results([result("j", 10, custom_id="c10")])
    await until(job.results_empty)
    found = await verdict(job, load)
    assert (found.mismatched, found.examples) == (1, ["item 10: no line of the input has this index"])


async def test_a_job_that_ends_twice_is_doubled(landed: tuple[Producer, Load]) -> None:
    job, load = landed
    await land(job, range(10))
    await job.ended()
    await until(job.completed)
    again = JobCompleted(job="j", state="completed", count=10, ok=10)
    subject = job.mesh.subjects.job_event("j", "completed")
    await publish(job.mesh, job.mesh.topology.jobs, subject, codec.JOB_EVENT.encode(again))
    found = await verdict(job, load)
    assert (found.doubled, found.completed_events) == (1, 2)


async def test_the_same_line_must_get_the_same_answer(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    """What can be known of an engine that does not echo: here line 1 was answered as line 0 was."""
    await register(mesh)
    source = tmp_path / "two.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    load = prepare(Source(file=str(source)), tmp_path / "input.jsonl", items=6)
    ids = [str(line["custom_id"]) for line in lines(load.path)]
    job = Producer(mesh, "j")
    await job.whole(6)
    async with serving(settings):
        for i, text in enumerate(["A", "B", "A", "A", "A", "B"]):
            await land(job, [i], custom_id=ids[i], choices=[Choice(text=text)])
        await job.ended()
        found = await verdict(job, load, engine="sim")
    assert found.examples == ["item 3: another answer than that of the same line at index 1"]


async def test_pages_that_are_cut_lose_no_row(mesh: Mesh, settings: Settings, tmp_path: Path) -> None:
    """Ids so long that a page of them is larger than a message may be."""
    await register(mesh)
    count = 6_000
    path = tmp_path / "input.jsonl"
    ids = [f"{i:0>400}" for i in range(count)]
    path.write_text("".join(json.dumps({"custom_id": c, "prompt": "p"}) + "\n" for c in ids))
    job = Producer(mesh, "j")
    await job.whole(count)
    async with serving(settings):
        for start in range(0, count, 1_000):
            await job.results(
                result("j", i, custom_id=ids[i], choices=[Choice(text="p")])
                for i in range(start, start + 1_000)
            )
        await jsapi.purge(mesh, mesh.topology.tasks, filter_=mesh.subjects.tasks_of_job("j"))
        await job.ended(40)
        load = Load(path=path, items=count, distinct=count, size=path.stat().st_size)
        found = await verdict(job, load)
    assert (found.ok, found.lost, found.doubled, found.mismatched) == (count, 0, 0, 0)
