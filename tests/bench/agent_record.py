"""What recording costs an agent: the time that `ctx.record` takes of its caller, with the broker up, slow, and down.

    python -m tests.bench.agent_record                   50,000 records in each state of the broker
    python -m tests.bench.agent_record --records 2000    a quick look

Slow is a broker that is stopped (SIGSTOP): connected, and never answering. Down is a broker that is killed. Each call
is timed by itself, in bursts with a turn of the event loop between them, as handlers record; the buffer holds 10,000
records, so that slow and down come to dropping. At the end the account must hold: what was recorded is captured or
dropped, and what is in the stream is what was captured. Exit code 1 if it does not, or if the goal is missed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import psutil
import typer
import uvloop
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.table import Table

from headrace.agent.asking import Waiting
from headrace.agent.capture import Capture
from headrace.agent.context import Context
from headrace.agent.handling import Case
from headrace.agent.hosting import Host
from headrace.agent.runner import RunnerPort
from headrace.contracts import codec
from headrace.contracts.capture import CaptureRecords
from headrace.contracts.mail import Mail
from headrace.mesh.connection import Mesh
from headrace.mesh.mail import Post, new_id
from headrace.mesh.provision import provision
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from headrace.mesh.tail import read_all
from tests.bench.machine import describe

GOAL_US: Final = 10.0
BURST: Final = 100
NOTE: Final = {"step": "asked the model", "tokens": 412, "model": "m-small", "answer": "x" * 160, "ok": True}
"""What an agent may note: about 230 bytes of JSON."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Measured(Struct):
    """One state of the broker."""

    broker: str
    calls: int
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    captured: int
    dropped: int
    waiting: int


@app.command(help=__doc__)
def bench(
    records: Annotated[int, typer.Option(min=1_000, help="Records in each state of the broker.")] = 50_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here too.")] = None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        rows, account = uvloop.run(measure(Path(folder), records))
    show(rows, account)
    if json_file is not None:
        from msgspec.structs import asdict

        json_file.write_text(json.dumps({"rows": [asdict(r) for r in rows], "account": account}), "utf-8")
    raise typer.Exit(0 if account["exact"] and all(r.p99_us <= GOAL_US for r in rows[1:]) else 1)


async def measure(folder: Path, records: int) -> tuple[list[Measured], dict[str, Any]]:
    """All three states with one agent, then the account."""
    server = NatsServer(folder / "nats", durability="relaxed")
    server.start()
    try:
        async with await Mesh.connect(Settings(url=server.url, durability="relaxed"), name="bench") as mesh:
            await provision(mesh)
            capture = Capture(mesh, "bench")
            capture.start()
            record = context(mesh, capture).record
            control = await calls("(nothing is recorded)", capture, records, _nothing)
            rows = [await calls("up", capture, records, record)]
            os.kill(server.pid, signal.SIGSTOP)
            try:
                await stopped(server.pid)
                rows.append(await calls("slow (stopped)", capture, records, record))
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await settled(capture)
            server.kill()
            rows.append(await calls("down (killed)", capture, records, record))
            await asyncio.to_thread(server.restart)
            await settled(capture)
            counts = await capture.stop(30.0)
            stored: set[int] = set()
            async for batch in read_all(mesh, mesh.topology.capture, "hr.capture.bench.>"):
                for m in batch:
                    message = codec.CAPTURE.decode(m.data, m.headers)
                    if isinstance(message, CaptureRecords):
                        stored |= {r.seq for r in message.records}
    finally:
        server.kill()
    account = {
        "recorded": counts.recorded, "captured": counts.captured, "dropped": counts.dropped,
        "waiting": counts.waiting, "in_stream": len(stored),
        "exact": counts.recorded == 3 * records == counts.captured + counts.dropped
        and len(stored) == counts.captured and not counts.waiting,
    }  # fmt: skip
    return [control, *rows], account


def _nothing(*_positional: object, **_named: object) -> None:
    """What the clock and this machine's other work cost by themselves."""


def context(mesh: Mesh, capture: Capture) -> Context[dict[str, Any]]:
    """What a handler gets, of a mail in the middle of a traced conversation."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    mail = Mail(
        id=new_id(), to="bench", sender="other", kind="k", conversation="run", hops=2, traceparent=traceparent
    )
    nothing: Any = None
    host = Host(
        mesh=mesh,
        settings=mesh.settings,
        leases=nothing,
        settler=nothing,
        post=Post(mesh),
        states=nothing,
        recorders={"bench": capture},
    )
    case = Case(delivery=nothing, mail=mail, question=None, origin=None, redriven=False)
    return Context("bench", mail, {}, port=RunnerPort(host, Waiting("bench"), case, again=False))


async def calls(broker: str, capture: Capture, records: int, record: Callable[..., None]) -> Measured:
    """Time `records` calls, each by itself."""
    clock, took = time.perf_counter_ns, [0] * records
    before = capture.counts
    for n in range(records):
        began = clock()
        record("step", NOTE)
        took[n] = clock() - began
        if n % BURST == BURST - 1:
            await asyncio.sleep(0)
    after = capture.counts
    took.sort()
    return Measured(
        broker=broker,
        calls=records,
        p50_us=took[records // 2] / 1e3,
        p99_us=took[records * 99 // 100] / 1e3,
        p999_us=took[records * 999 // 1_000] / 1e3,
        max_us=took[-1] / 1e3,
        captured=after.captured - before.captured,
        dropped=after.dropped - before.dropped,
        waiting=after.waiting,
    )


async def stopped(pid: int) -> None:
    """Return when the process stands still: a signal takes a moment."""
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)


async def settled(capture: Capture) -> None:
    """Return when nothing waits any more."""
    deadline = time.monotonic() + 120
    while capture.counts.waiting and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


def show(rows: list[Measured], account: dict[str, Any]) -> None:
    """The table."""
    console = Console(width=132, highlight=False)
    console.print("  ".join(f"{name} {value}" for name, value in describe("").items() if value))
    table = Table("broker", box=box.SIMPLE_HEAD)
    for column in (
        "calls",
        "p50 µs",
        "p99 µs",
        "p99.9 µs",
        "max µs",
        "captured meanwhile",
        "dropped",
        "waiting",
        "goal",
    ):
        table.add_column(column, justify="right")
    for r in rows:
        goal = r is not rows[0]
        verdict = f"p99 ≤ {GOAL_US:g}: {'met' if r.p99_us <= GOAL_US else 'NOT met'}" if goal else ""
        cells = [f"{r.calls:,}", *(f"{v:.1f}" for v in (r.p50_us, r.p99_us, r.p999_us, r.max_us))]
        table.add_row(r.broker, *cells, f"{r.captured:,}", f"{r.dropped:,}", f"{r.waiting:,}", verdict)
    console.print(table)
    console.print(
        "recorded {recorded:,} = captured {captured:,} + dropped {dropped:,}; in the stream {in_stream:,}: ".format(
            **account
        )
        + ("exact" if account["exact"] else "DOES NOT ADD UP")
    )


if __name__ == "__main__":
    sys.exit(app())
