"""The same kill against a consumer that acknowledges on read, and against Headrace, side by side.

Both run the same items with the same work time and as many at once, on the same nats-server. Each worker is killed
with SIGKILL at the same share of the way and started again. Then the items that have a result are counted.

Exit code 1 if Headrace lost an item, or if the other one lost none: then the kill hit nothing and the run shows
nothing (try another seed, or more items).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import ack_on_read
import nats
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig
from processes import Process, headrace
from rich.console import Console
from rich.table import Table

from headrace.client import AsyncClient
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import stream_info
from headrace.mesh.provision import provision
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings

ACK_WAIT_S = 2.0
"""The lease on both sides: what a killed worker was given and did not acknowledge comes again after this long."""
STILL_S = 3.0
"""A side is at its end when it has done nothing for this long."""
LIMIT_S = 300.0


@dataclass
class Side:
    """What one side did, in items."""

    name: str
    submitted: int
    queue_says_consumed: int = 0
    done: int = 0
    lost: int = 0
    ran_again: int = 0
    lost_indices: tuple[int, ...] = ()


def say(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


async def kill_on_the_way(
    process: Process, marks: list[int], done: Callable[[], Awaitable[int]], *, items: int
) -> None:
    """Kill `process` when so many items are done, and start it again; return when nothing more gets done."""
    deadline, last, since = time.monotonic() + LIMIT_S, -1, time.monotonic()
    while (count := await done()) < items:
        if marks and count >= marks[0]:
            marks = marks[1:]
            process.kill()
            say(f"  {process.name}: SIGKILL with {count:,} of {items:,} done")
            process.start()
            since = time.monotonic()
        if count != last:
            last, since = count, time.monotonic()
        elif time.monotonic() - since > STILL_S + ACK_WAIT_S:
            return
        if time.monotonic() > deadline:
            msg = f"{process.name} did not end within {LIMIT_S:g} s: see {process.log}"
            raise RuntimeError(msg)
        await asyncio.sleep(0.01)


# --- the consumer that acknowledges on read ---------------------------------------------------------


async def run_ack_on_read(url: str, folder: Path, given: argparse.Namespace, marks: list[int]) -> Side:
    """Store the items, let the other consumer work, count."""
    connection = await nats.connect(url)
    js = connection.jetstream()
    await js.add_stream(
        StreamConfig(
            name=ack_on_read.STREAM, subjects=[ack_on_read.SUBJECT], retention=RetentionPolicy.WORK_QUEUE
        )
    )
    await js.add_stream(StreamConfig(name=ack_on_read.RESULTS, subjects=[ack_on_read.RESULT_SUBJECT]))
    await js.add_consumer(
        ack_on_read.STREAM,
        ConsumerConfig(
            durable_name=ack_on_read.DURABLE,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_ack_pending=10_000,
        ),
    )
    for index in range(given.items):
        await js.publish(ack_on_read.SUBJECT, json.dumps({"index": index}).encode())

    async def done() -> int:
        return (await js.stream_info(ack_on_read.RESULTS)).state.messages

    command = [sys.executable, ack_on_read.__file__, url, "--concurrency", str(given.slots)]
    command += ["--prefetch", str(given.prefetch), "--work-ms", str(given.work_ms)]
    with Process("ack on read", command, folder / "ack-on-read.log") as process:
        await kill_on_the_way(process, marks, done, items=given.items)
    left = (await js.stream_info(ack_on_read.STREAM)).state.messages
    results = Counter([await _index(js, sequence) for sequence in range(1, await done() + 1)])
    await connection.close()
    return account("ack on read", given.items, given.items - left, results, again=0)


async def _index(js: nats.js.JetStreamContext, sequence: int) -> int:
    found = await js.get_msg(ack_on_read.RESULTS, sequence)
    return int(json.loads(found.data or b"{}")["index"])


# --- Headrace ---------------------------------------------------------------------------------------


async def run_headrace(url: str, folder: Path, given: argparse.Namespace, marks: list[int]) -> Side:
    """The same through `headrace worker` and `headrace completion`."""
    common = {"url": url, "dir": folder, "durability": "relaxed", "ack-wait-s": ACK_WAIT_S}
    work = {"engine": "echo", "slots": given.slots, "engine-option": f"delay_ms={given.work_ms:g}"}
    worker, completion = headrace("worker", common | work, folder), headrace("completion", common, folder)
    settings = Settings(url=url, dir=str(folder), durability="relaxed", ack_wait_s=ACK_WAIT_S)
    async with await Mesh.connect(settings, name="demonstration") as mesh:
        await provision(mesh)
        async with AsyncClient(mesh=mesh) as client:
            with completion, worker:
                await client.submit([{"prompt": str(index)} for index in range(given.items)], job="demo")

                async def done() -> int:
                    return (await client.status("demo")).ok

                await kill_on_the_way(worker, marks, done, items=given.items)
                rows = await client.query('SELECT "index", attempt FROM outcomes', max_rows=10_000)
                tasks = await stream_info(
                    mesh, mesh.topology.tasks, subjects_filter=mesh.subjects.tasks_of_job("demo")
                )
                left = sum(tasks["state"]["subjects"].values())
                audit = await client.audit("demo")
    if not audit.balanced:
        msg = f"headrace audit does not balance: {audit}"
        raise RuntimeError(msg)
    again = sum(1 for _, attempt in rows.rows if attempt > 1)
    return account(
        "headrace", given.items, given.items - left, Counter(row[0] for row in rows.rows), again=again
    )


# --- the account ------------------------------------------------------------------------------------


def account(name: str, items: int, consumed: int, results: Counter[int], *, again: int) -> Side:
    """Compare what has a result with what was submitted."""
    lost = tuple(sorted(set(range(items)) - set(results)))
    return Side(
        name=name,
        submitted=items,
        queue_says_consumed=consumed,
        done=len(results),
        lost=len(lost),
        ran_again=again + sum(n - 1 for n in results.values()),
        lost_indices=lost,
    )


def table(sides: list[Side]) -> Table:
    """Both sides, row by row."""
    shown = Table("", *(side.name for side in sides), title="the same kill, the same work")
    for column in shown.columns[1:]:
        column.justify = "right"
    shown.add_row("submitted", *(f"{s.submitted:,}" for s in sides))
    shown.add_row("the queue says: consumed", *(f"{s.queue_says_consumed:,}" for s in sides))
    shown.add_row("have a result", *(f"{s.done:,}" for s in sides))
    shown.add_row("LOST", *(f"[bold {'red' if s.lost else 'green'}]{s.lost:,}[/]" for s in sides))
    shown.add_row("started again after the kill", *(f"{s.ran_again:,}" for s in sides))
    return shown


def verdict(naive: Side, ours: Side) -> tuple[int, list[str]]:
    """The exit code, and what is to be said beside the table."""
    said: list[str] = []
    if ours.lost:
        said.append(f"Headrace lost {ours.lost:,} items: {list(ours.lost_indices[:20])}")
    if not naive.lost:
        said.append(
            "the other consumer lost nothing: the kill hit nothing, and this run shows nothing. Try another --seed"
        )
    return (1 if said else 0), said


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run.py"
    )
    parser.add_argument("--items", type=int, default=2_000, help="items on each side [2000]")
    parser.add_argument("--kills", type=int, default=1, help="how often each worker is killed [1]")
    parser.add_argument("--seed", type=int, default=None, help="moves the kills a little; printed [random]")
    parser.add_argument("--slots", type=int, default=16, help="items at work at once [16]")
    parser.add_argument(
        "--prefetch", type=int, default=64, help="items read ahead by the other consumer [64]"
    )
    parser.add_argument("--work-ms", type=float, default=20.0, help="work time of an item [20]")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    given = parser.parse_args(arguments)
    if not 10 <= given.items <= 10_000:  # noqa: PLR2004  (a page of SQL)
        parser.error(f"--items {given.items} is outside 10..10000")
    most_kills = 10  # more of them, and little work is left between two
    if not 1 <= given.kills <= most_kills or given.slots < 1 or given.prefetch < 1 or given.work_ms < 0:
        parser.error("--kills is 1..10, --slots and --prefetch at least 1, --work-ms at least 0")
    if given.seed is None:
        given.seed = random.randrange(1 << 30)
    return given


def kill_marks(items: int, kills: int, seed: int) -> list[int]:
    """After how many items to kill: one kill at about a third of the way, more of them evenly spread."""
    rng = random.Random(seed)
    return [int(items * (k + rng.uniform(-0.05, 0.05)) / (kills + 2)) for k in range(1, kills + 1)]


async def demonstrate(given: argparse.Namespace) -> list[Side]:
    """Run both sides, one after the other, on one broker."""
    marks = kill_marks(given.items, given.kills, given.seed)
    with tempfile.TemporaryDirectory(prefix="headrace-loss-") as name:
        folder = Path(name)
        server = NatsServer(folder / "nats", durability="relaxed")
        server.start()
        try:
            say(f"{given.items:,} items of {given.work_ms:g} ms, {given.slots} at once, seed {given.seed}")
            return [
                await run_ack_on_read(server.url, folder, given, marks),
                await run_headrace(server.url, folder, given, marks),
            ]
        finally:
            server.stop()


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say by the exit code whether it shows what it should."""
    given = read_arguments(arguments)
    naive, ours = sides = asyncio.run(demonstrate(given))
    if given.json:
        print(json.dumps({"seed": given.seed, "kills": given.kills, "sides": [asdict(s) for s in sides]}))
    else:
        Console().print(table(sides))
    code, sentences = verdict(naive, ours)
    for sentence in sentences:
        say(sentence)
    return code


if __name__ == "__main__":
    sys.exit(main())
