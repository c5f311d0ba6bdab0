"""The parts that measure the mesh itself, with the `echo` engine: submit, pull, landing, end to end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, Final

from headrace.cli.supervisor.plan import SERVER as BROKER
from headrace.client import AsyncClient
from headrace.contracts import codec
from headrace.contracts.specs import ConsumerSpec, StreamSpec
from headrace.mesh.jsapi import call, consumer_info, get_message, purge, stream_info
from headrace.mesh.provision import create_consumer
from tests.bench.fleet import Command, Durability, Fleet, Watch, loops
from tests.bench.items import LINE_BYTES, RESULT_BYTES, write_lines
from tests.bench.report import Goal, Row

GOALS: Final[dict[tuple[str, Durability], float]] = {
    ("submit", "relaxed"): 40_000,
    ("e2e", "relaxed"): 8_000,
    ("e2e", "safe"): 2_500,
}
SHORT: Final[dict[Durability, int]] = {"relaxed": 2, "safe": 10}
"""The short parts take this part of the items. Under `safe` each ack is a write of its own to the disk."""
MEMORY_MB: Final = 300.0
POLL_S: Final = 0.02
RAW_TASKS, RAW_RESULTS = "BENCH_TASKS", "BENCH_RESULTS"
TASK_BYTES: Final = LINE_BYTES + 180
"""A task is its line and what Headrace adds: job, index, function, times."""


class Rates:
    """Measures one durability on a fleet of its own.

    `say` is told what is going on; `repeat` says how often, and stops sooner when the time is over.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        items: int,
        parts: Collection[str],
        repeats: int,
        deadline: float,
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._durability: Durability = fleet.settings.durability
        self._short = max(500, items // SHORT[self._durability])
        self._chain = max(500, items // (2 * SHORT[self._durability]))
        self._items = items
        self._parts = parts
        self._repeats = repeats
        self._deadline = deadline
        self._say = say
        self._jobs = 0
        self._raw: dict[str, Row] = {}
        self.rows: list[Row] = []

    async def run(self, folder: Path) -> None:
        """All parts that were asked for, and the raw rates that they are compared with."""
        parts = self._parts
        if {"submit", "pull"} & set(parts):
            await self._raw_queue()
        if "e2e" in parts:
            await self._raw_chain()
        await self._register()
        if {"submit", "pull", "landing"} & set(parts):
            await self._stages(write_lines(folder / "short.jsonl", self._short))
        if "e2e" in parts:
            await self._end_to_end(folder)

    # --- raw ---------------------------------------------------------------------------------------
    async def _raw_queue(self) -> None:
        n, url = self._short, self._fleet.settings.url
        stored = self._row("raw", "durable publish, atomic batches of 1,000", "items/s", raw="publish")
        pulled = self._row("raw", "pull and ack through one inbox", "items/s", raw="pull")

        async def once() -> None:
            await self._raw_streams()
            publish = {"url": url, "subject": "bench.tasks.x", "count": n, "size": TASK_BYTES}
            async with loops(("publish", publish)) as [loop]:
                loop.go()
                stored.values.append(n / _seconds(await loop.result()))
            async with loops(("pull", {"url": url, "stream": RAW_TASKS, "count": n})) as [loop]:
                loop.go()
                pulled.values.append(n / _seconds(await loop.result()))

        await self._repeat("raw publish and pull", once)
        await self._drop_raw_streams()

    async def _raw_chain(self) -> None:
        n, url = self._chain, self._fleet.settings.url
        row = self._row("raw", "three hops: publish, pull, result, ack, pull, ack", "items/s", raw="chain")

        async def once() -> None:
            await self._raw_streams()
            async with loops(
                ("pull", {"url": url, "stream": RAW_RESULTS, "count": n}),
                (
                    "work",
                    {
                        "url": url,
                        "stream": RAW_TASKS,
                        "subject": "bench.results.x",
                        "count": n,
                        "size": RESULT_BYTES,
                    },
                ),
                ("publish", {"url": url, "subject": "bench.tasks.x", "count": n, "size": TASK_BYTES}),
            ) as running:
                for loop in running:
                    loop.go()
                last, _, first = [await loop.result() for loop in running]
                row.values.append(n / (last["ended"] - first["started"]))

        await self._repeat("raw chain", once)
        await self._drop_raw_streams()

    async def _raw_streams(self) -> None:
        await self._drop_raw_streams()
        mesh = self._fleet.mesh
        for name, subject in ((RAW_TASKS, "bench.tasks.>"), (RAW_RESULTS, "bench.results.>")):
            spec = StreamSpec(name=name, subjects=[subject], retention="workqueue", allow_atomic=True)
            await call(mesh, f"STREAM.CREATE.{name}", spec.config(), timeout_s=10)
            consumer = ConsumerSpec(
                stream=name, durable="bare", filter_subject=subject, max_ack_pending=20_000
            )
            await create_consumer(mesh, consumer)

    async def _drop_raw_streams(self) -> None:
        names = (await call(self._fleet.mesh, "STREAM.NAMES"))["streams"] or []
        for name in {RAW_TASKS, RAW_RESULTS} & set(names):
            await call(self._fleet.mesh, f"STREAM.DELETE.{name}", timeout_s=30)

    # --- stage by stage ----------------------------------------------------------------------------
    async def _register(self) -> None:
        """Let a worker register its function: submit checks against it."""
        await self._fleet.start("worker-1")
        await self._fleet.stop("worker-1")

    async def _stages(self, lines: Path) -> None:
        """Submit with nobody pulling, then one worker with nobody landing, then completion alone."""
        submit = self._part("submit", "submit: both passes, durable, sealed", raw="publish")
        pull = self._part("pull", "worker: pull, echo, store the result, ack", raw="pull")
        landing = self._part("landing", "completion: pull, land in DuckDB, ack", raw="duckdb", unit="rows/s")

        async def once() -> None:
            job = self._job("stage")
            submit.values.append(self._short / await self._submit(lines, job))
            if not {"pull", "landing"} & set(self._parts):
                await purge(self._fleet.mesh, self._fleet.mesh.topology.tasks, filter_=self._tasks(job))
                return
            pull.values.append(self._short / await self._drain_tasks())
            if "landing" not in self._parts:
                await purge(self._fleet.mesh, self._fleet.mesh.topology.results, filter_="*.results.>")
                return
            landing.values.append(self._short / await self._drain_results(job))

        await self._repeat("submit, pull, landing", once)
        self.rows += [row for row in (submit, pull, landing) if row.part.split()[0] in self._parts]

    def _tasks(self, job: str) -> str:
        return self._fleet.mesh.subjects.tasks_of_job(job)

    async def _submit(self, lines: Path, job: str) -> float:
        async with AsyncClient(settings=self._fleet.settings) as client:
            started = time.perf_counter()
            receipt = await client.submit(lines, job=job)
            seconds = time.perf_counter() - started
        _expect("items submitted", receipt.submitted, self._short)
        return seconds

    async def _drain_tasks(self) -> float:
        """Seconds from the first delivery to the worker until its last task is acked."""
        mesh, topology = self._fleet.mesh, self._fleet.mesh.topology
        kept = await _messages(self._fleet, topology.tasks) - self._short  # manifests stay
        first = (await stream_info(mesh, topology.results))["state"]["last_seq"] + 1
        await self._fleet.start("worker-1")
        ended = await self._until("the worker", topology.tasks, kept)
        stored = await get_message(mesh, topology.results, first)
        _expect("results stored", await _messages(self._fleet, topology.results), self._short)
        await self._fleet.stop("worker-1")
        assert stored is not None
        return ended - codec.RESULT.decode(stored.data).timings.received_us / 1e6

    async def _drain_results(self, job: str) -> float:
        """Seconds from the first delivery to completion until the last row is committed and acked."""
        mesh, spec = self._fleet.mesh, self._fleet.mesh.topology.results_consumer()
        before = (await consumer_info(mesh, spec.stream, spec.durable))["delivered"]["consumer_seq"]
        starting = asyncio.create_task(self._fleet.start("completion"))
        while (await consumer_info(mesh, spec.stream, spec.durable))["delivered"]["consumer_seq"] == before:
            await asyncio.sleep(POLL_S / 4)
        started = time.time()
        ended = await self._until("completion", spec.stream, 0)
        await starting
        await self._check(job, self._short)
        await self._fleet.stop("completion")
        return ended - started

    async def _until(self, who: str, stream: str, left: int) -> float:
        """The time at which the stream holds only `left` messages."""
        moved, last = time.time(), -1
        while (now := await _messages(self._fleet, stream)) > left:
            if now != last:
                moved, last = time.time(), now
            elif time.time() - moved > 60:
                raise RuntimeError(
                    f"{who} stands still with {now - left:,} to go: see {self._fleet.layout.logs}"
                )
            await asyncio.sleep(POLL_S)
        return time.time()

    async def _check(self, job: str, count: int) -> Any:
        """Every item landed once, as the accounts say; the job's last status."""
        async with AsyncClient(settings=self._fleet.settings) as client:
            status = await client.wait(job, timeout_s=300)
        _expect(f"rows of {job}", status.ok, count)
        _expect(f"duplicates of {job}", status.duplicates, 0)
        return status

    # --- end to end --------------------------------------------------------------------------------
    async def _end_to_end(self, folder: Path) -> None:
        """Everything runs; `headrace submit` is started. A tenth of the items first, then all."""
        services = ("completion", "gateway", "worker-1")
        for name in services:
            await self._fleet.start(name)
        tenth = max(100, self._items // 10)
        watches: list[Watch] = []
        seconds = 0.0
        for count in (tenth, self._items):
            self._say(f"{self._durability}: end to end, {count:,} items")
            lines = write_lines(folder / f"e2e-{count}.jsonl", count)
            with Watch() as watch:
                for name in (*services, BROKER):
                    watch.add(name, self._fleet.pid(name))
                seconds = await self._one_job(lines, count, watch)
            watches.append(watch)
            lines.unlink()
        for name in services:
            await self._fleet.stop(name)
        row = self._part("e2e", f"{self._items:,} items: `headrace submit` … last row", raw="chain")
        row.values.append(self._items / seconds)
        self.rows.append(row)
        used = {name: s / self._items * 1e6 for name, s in watches[-1].cpu.items()}
        note = ", ".join(f"{name} {used[name]:.0f}" for name in ("submit", "worker-1", "completion", BROKER))
        cpu = Row(
            part=self._name("e2e"), what="CPU of all processes", unit="µs/item", values=[sum(used.values())]
        )
        cpu.note = note
        self.rows.append(cpu)
        for name in ("submit", "worker-1", "completion"):
            small, large = (w.peak[name] for w in watches)
            note = f"peak; {small:.0f} MB after {tenth:,} items"
            goal = Goal(MEMORY_MB, most=True)
            part = self._name("e2e")
            self.rows.append(
                Row(part=part, what=f"memory of {name}", unit="MB", values=[large], goal=goal, note=note)
            )

    async def _one_job(self, lines: Path, count: int, watch: Watch) -> float:
        job = self._job("e2e")
        started = time.time()
        command = await Command.start(
            "submit", str(lines), "--job", job, "--json", "--url", self._fleet.settings.url
        )
        watch.add("submit", command.pid, new=True)
        receipt = json.loads(await command.output())
        _expect("items submitted", receipt["submitted"], count)
        status = await self._check(job, count)
        return status.ended_us / 1e6 - started

    # --- small -------------------------------------------------------------------------------------
    def _name(self, part: str) -> str:
        return f"{part} {self._durability}"

    def _row(self, part: str, what: str, unit: str, *, raw: str) -> Row:
        row = self._raw[raw] = Row(part=self._name(part), what=what, unit=unit)
        self.rows.append(row)
        return row

    def _part(self, part: str, what: str, *, raw: str, unit: str = "items/s") -> Row:
        wanted = GOALS.get((part, self._durability))
        compared = self._raw.get(raw)
        return Row(
            part=self._name(part),
            what=what,
            unit=unit,
            raw=compared.value if compared is not None and compared.values else None,
            goal=Goal(wanted) if wanted else None,
        )

    def compare_with(self, name: str, row: Row) -> None:
        """Take a raw rate that was measured elsewhere."""
        self._raw[name] = row

    def _job(self, kind: str) -> str:
        self._jobs += 1
        return f"bench-{kind}-{self._jobs}"

    async def _repeat(self, what: str, once: Callable[[], Awaitable[None]]) -> None:
        for i in range(self._repeats):
            if i and time.monotonic() > self._deadline:
                self._say(f"{self._durability}: {what}: {i} of {self._repeats} runs, the time is over")
                return
            self._say(f"{self._durability}: {what}, run {i + 1} of {self._repeats}")
            await once()


async def raw_duckdb(folder: Path, *, count: int, repeats: int) -> Row:
    """Rows a second by one JSON parameter for each 2,000, with the primary key of the outcomes."""
    row = Row(part="raw", what="DuckDB, 2,000 rows a transaction, primary key", unit="rows/s")
    for i in range(repeats):
        options = {"path": str(folder / f"raw-{i}.duckdb"), "count": count, "size": LINE_BYTES}
        async with loops(("duckdb", options)) as [loop]:
            loop.go()
            row.values.append(count / _seconds(await loop.result()))
    return row


async def _messages(fleet: Fleet, stream: str) -> int:
    return int((await stream_info(fleet.mesh, stream))["state"]["messages"])


def _seconds(result: dict[str, float]) -> float:
    return result["ended"] - result["started"]


def _expect(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{what}: {found:,}, and there should be {wanted:,}")
