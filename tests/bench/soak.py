"""A million items with twenty SIGKILLs among them, and what an item costs from ten thousand to a million.

    just soak                                      all of it, about 15 minutes on two cores
    just soak --items 20000 --kills 6 --flat 2000,20000 --out /tmp/soak.txt

Two parts, both on the kit of `headrace chaos`, with the `echo` engine at its full speed and one worker:

    flat    one undisturbed run for each size of --flat: wall and CPU time of an item, and the peak of resident memory
            (VmHWM) of each process. Settings are the defaults, so the whole job lies in the queue at first
    soak    --items with --kills SIGKILLs in all, shared by worker, completion, broker and submitter, spread evenly over
            the progress of the job; its account is audited all the while

The proof is that of `headrace chaos`: input, rows and streams are read and compared. Exit code 1 if anything is lost or
doubled. The load of the machine before the run is printed: numbers of a busy one mean little.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
import uvloop
from rich.console import Console

from headrace.cli.chaos_kit.load import Load
from headrace.cli.chaos_kit.local import LocalMesh, LocalOptions, forget_environment
from headrace.cli.chaos_kit.pace import queue_bound
from headrace.cli.chaos_kit.plan import BROKER, COMPLETION, SUBMIT, WORKER, make_plan
from headrace.cli.chaos_kit.report import Report
from headrace.cli.chaos_kit.run import JOB, drive
from headrace.cli.chaos_kit.submitter import Submitter
from headrace.cli.chaos_kit.verdict import judge
from headrace.cli.chaos_kit.view import ChaosView
from headrace.client.status import wait_for_job
from headrace.mesh.connection import Mesh
from tests.bench.fleet import ROOT, Durability, Watch
from tests.bench.machine import describe
from tests.bench.soak_report import MEASURED, WIDTH, Flat, print_soak, problems

LONGEST_S: Final = 3_600.0
"""A run that takes longer is given up."""
LARGE: Final = 200_000
"""Items from which on the account is audited every two seconds only, since it counts all rows each time, and leases
last ten seconds instead of three, so that a busy machine does not lose them by itself.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Memory(Watch):
    """Peak memory and CPU time by service, over all the processes that it was."""

    def __init__(self) -> None:
        super().__init__()
        self._pids: dict[str, int] = {}
        self.spent: dict[str, float] = {}

    def changed(self, pids: dict[str, int]) -> None:
        """These processes run now."""
        for name, pid in pids.items():
            if name in MEASURED and pid and self._pids.get(name) != pid:
                self._pids[name] = pid
                self.spent[name] = self.spent.get(name, 0.0) + self.cpu.pop(name, 0.0)
                try:
                    self.add(name, pid, new=True)
                except psutil.Error:
                    continue

    def cpu_s(self, name: str) -> float:
        """CPU seconds of a service so far."""
        return self.spent.get(name, 0.0) + self.cpu.get(name, 0.0)


@app.command(help=re.sub(r"\n\n(?=    )", "\n\n\b\n", __doc__))
def soak(
    items: Annotated[int, typer.Option(min=1_000, help="Items of the soak.")] = 1_000_000,
    kills: Annotated[int, typer.Option(min=0, help="SIGKILLs in all.")] = 20,
    flat: Annotated[str, typer.Option(help="Sizes of the undisturbed runs, with commas; empty: none.")] = (
        "10000,100000,1000000"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the kills.")] = 1,
    durability: Annotated[Durability, typer.Option(help="What an ack of the broker promises.")] = "safe",
    out: Annotated[Path, typer.Option(help="Write the tables here.")] = ROOT / "docs/bench/soak.txt",
) -> None:
    machine = describe("")
    del machine["vllm"]  # nothing here needs it
    forget_environment()
    logging.getLogger("headrace").addHandler(logging.NullHandler())  # brokers die here: that is no news
    sizes = [int(size) for size in flat.split(",") if size.strip()]
    began = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        flats = [runner.run(_flat(size, durability)) for size in sizes]
        report, memory = runner.run(_soak(items, kills, seed, durability))
    machine["took"] = f"{time.monotonic() - began:.0f} s"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for console in (Console(width=WIDTH), Console(file=file, width=WIDTH, no_color=True)):
            print_soak(console, machine, flats, report, memory.peak)
    wrong = [problem for one in flats for problem in problems(one)] + report.problems()
    for problem in wrong:
        print(f"NOT as promised: {problem}", file=sys.stderr)
    raise typer.Exit(1 if wrong else 0)


# --- the runs ---------------------------------------------------------------------------------------
def write_load(path: Path, items: int) -> Load:
    """`items` lines of about 100 bytes, each with its own id and its own prompt."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(items):
            text = f"item {i}: water turns the wheel, and the wheel turns the stone"
            file.write(f'{{"custom_id":"s-{i}","prompt":"{text}","max_tokens":16}}\n')
    return Load(path=path, items=items, distinct=items, size=path.stat().st_size)


async def _flat(items: int, durability: Durability) -> Flat:
    """One run that nothing disturbs: from the start of the submit to the last row."""
    _say(f"flat: {items:,} items")
    with tempfile.TemporaryDirectory(prefix="headrace-soak-", ignore_cleanup_errors=True) as base:
        load = write_load(Path(base) / "input.jsonl", items)
        options = LocalOptions(engine="echo", workers=1, durability=durability, ack_wait_s=30.0)
        memory = Memory()
        async with (
            LocalMesh(Path(base) / "mesh", options, pids=memory.changed) as local,
            await Mesh.connect(local.settings, name="soak") as mesh,
        ):
            submitter = Submitter(
                local, load, JOB, patience_s=600.0, pids=lambda pid: memory.changed({"submit": pid})
            )
            with memory:
                began = time.monotonic()
                await submitter.run()
                await wait_for_job(mesh, JOB, timeout_s=LONGEST_S)
                wall_s = time.monotonic() - began
            cpu_s = {name: memory.cpu_s(name) for name in MEASURED}
            verdict = await judge(mesh, JOB, load, engine="echo", submitted=True, patience_s=60.0)
        return Flat(items=items, wall_s=wall_s, cpu_s=cpu_s, peak_mb=dict(memory.peak), verdict=verdict)


async def _soak(items: int, kills: int, seed: int, durability: Durability) -> tuple[Report, Memory]:
    """The long run. Kills come by progress, not by time."""
    shares = dict.fromkeys((WORKER, COMPLETION, BROKER, SUBMIT), kills // 4)
    for name in (WORKER, COMPLETION, BROKER)[: kills % 4]:
        shares[name] += 1
    _say(f"soak: {items:,} items, {kills} kills ({shares}), seed {seed}")
    ack_wait_s, sample_every_s = (3.0, 0.5) if items < LARGE else (10.0, 2.0)
    plan = make_plan(seed, shares, workers=1, ack_wait_s=ack_wait_s, only_kills=True)
    with tempfile.TemporaryDirectory(prefix="headrace-soak-", ignore_cleanup_errors=True) as base:
        load = write_load(Path(base) / "input.jsonl", items)
        options = LocalOptions(
            engine="echo",
            workers=1,
            durability=durability,
            ack_wait_s=ack_wait_s,
            max_bytes=queue_bound(load),
        )
        memory = Memory()
        with ChaosView(items) as view, memory:
            report = await drive(
                load,
                options,
                plan,
                folder=Path(base) / "mesh",
                seed=seed,
                seconds=LONGEST_S,
                patience_s=LONGEST_S,
                view=view,
                pids=memory.changed,
                sample_every_s=sample_every_s,
            )
    return report, memory


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
