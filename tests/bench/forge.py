"""The forge's benchmark: one job in its three modes, and what budgets of tokens waste against counts of rows.

`python -m tests.bench.forge [--out docs/bench/forge.txt] [--rows 6000] [--cost-ms 2] [--seed 7]`

The function is a padded batch on an accelerator, by its time; the producer has a cost of its own for each row. With
rows and tokens both are one program: whoever is slower holds up the other. With submit the producer stores its rows and
exits, and a worker runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.client import Client
from headrace.forge.batching import Order, Sized, pack, parse_batching
from tests.bench.forge_producer import lengths
from tests.bench.machine import ROOT, describe
from tests.bench.report import Goal, Row, show, write_text
from tests.cli.harness import HEADRACE, Up, clean_environment

FUNCTIONS = "tests.bench.forge_functions"
BUSY_GOAL = 0.95


def main() -> int:
    """Measure, print, write; the exit code says whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=6_000)
    parser.add_argument("--cost-ms", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    machine = describe("not used")
    rows, notes = measure(given.rows, given.cost_ms, given.seed)
    show(Console(width=132), machine, rows, notes)
    if given.out is not None:
        write_text(given.out, machine, rows, notes)
    return 0 if all(row.verdict != "NOT met" for row in rows) else 1


def measure(rows: int, cost_ms: float, seed: int) -> tuple[list[Row], list[str]]:
    """Every line of the table, and what there is to say about them."""
    table: list[Row] = []
    for mode in ("rows:64", "tokens:8192"):
        said = producer(mode, rows, cost_ms, seed)
        table += _lines(f"{mode}, here", said, said["ran"], last=said["ended"])
    with tempfile.TemporaryDirectory() as folder:
        up = Up(Path(folder) / "D")
        worker = serve(up)
        try:
            for jobs in (1, 8):
                said = producer("submit", rows, cost_ms, seed, url=up.url, jobs=jobs)
                ran = landed(up.url, jobs)
                name = "submit, one job" if jobs == 1 else f"submit, {jobs} jobs"
                # With one job all rows are there when the worker begins: all of its time is time with a backlog.
                table += _lines(name, said, ran, last=time.time(), goal=jobs == 1)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(30)
            up.kill()
    table += wastes(rows, seed)
    total = rows * cost_ms / 1_000
    notes = [
        (
            f"{rows:,} rows of skewed length, made at {cost_ms:g} ms each ({total:.1f} s in all); seed {seed}. "
            "A call takes 4 ms and 6 µs for each token of the padded batch."
        ),
        (
            "Busy: the share of the time from the first call's begin to the last one's end in which a call ran. "
            "Here a function waits for its producer; by submit it waits for nobody, once rows are stored. "
            "The producer's exit: with submit it makes its rows, stores them and is gone."
        ),
        (
            "Padding: tokens that are not a row's own, of all that a padded batch computes. "
            "Budget: what is left of the budget, over all batches."
        ),
    ]
    return table, notes


def producer(
    mode: str, rows: int, cost_ms: float, seed: int, *, url: str = "-", jobs: int = 1
) -> dict[str, Any]:
    """Run the producer to its exit; what it says, with the time that it took in all."""
    began = time.time()
    arguments = [mode, str(rows), str(cost_ms), str(seed), url, str(jobs)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.forge_producer", *arguments],
        cwd=ROOT,
        env=clean_environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {**json.loads(done.stdout), "exit_s": time.time() - began, "launched": began}


def serve(up: Up) -> subprocess.Popen[bytes]:
    """A worker of the function, started and registered."""
    ready = up.folder / "functions-ready"
    flags = ["--functions", FUNCTIONS, "--batching", "tokens:8192", "--dir", str(up.folder), "--url", up.url]
    env = clean_environment(HEADRACE_READY_FILE=str(ready), PYTHONPATH=str(ROOT))
    log = (up.folder / "functions.log").open("wb")
    process = subprocess.Popen(
        [*HEADRACE, "worker", *flags, "--durability", "relaxed"], cwd=ROOT, env=env, stderr=log
    )
    deadline = time.monotonic() + 60
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((up.folder / "functions.log").read_text())
        time.sleep(0.02)
    return process


def landed(url: str, jobs: int) -> list[dict[str, Any]]:
    """What ran when, of all rows, once all have landed."""
    found: list[dict[str, Any]] = []
    with Client(url) as client:
        for job in range(jobs):
            status = client.wait(f"bench-{jobs}-{job}", timeout_s=600)
            if status.ok != status.submitted:
                raise SystemExit(f"{status.submitted - status.ok} rows failed")
            found += [json.loads(bytes(r.value)) for r in client.results(status.job)]  # type: ignore[arg-type]
    return found


def _lines(
    name: str, said: dict[str, Any], ran: list[dict[str, Any]], *, last: float, goal: bool = False
) -> list[Row]:
    calls = {(r["began"], r["ended"]): r for r in ran}
    busy = sum(ended - began for began, ended in calls)
    span = max(ended for _, ended in calls) - min(began for began, _ in calls)
    return [
        Row(part=name, what="until all results are there", unit="s", values=[last - said["launched"]]),
        Row(part=name, what="until the producer has exited", unit="s", values=[said["exit_s"]]),
        Row(
            part=name,
            what="of these, from its last row to its exit",
            unit="s",
            values=[said["launched"] + said["exit_s"] - said["made"]],
        ),
        Row(
            part=name,
            what="busy share of what runs the function",
            values=[busy / span],
            goal=Goal(BUSY_GOAL) if goal else None,
            note=f"{len(calls):,} calls, {busy:.1f} s of calls",
        ),
    ]


def wastes(rows: int, seed: int) -> list[Row]:
    """Padding and unused budget of each way to batch the same rows."""
    sized = [Sized(i, n, n) for i, n in enumerate(lengths(rows, seed))]
    table: list[Row] = []
    ways: list[tuple[str, Order]] = [
        ("rows:64", "ordered"),
        ("tokens:8192", "ordered"),
        ("tokens:8192", "free"),
    ]
    for text, order in ways:
        batching = parse_batching(text)
        batches = list(pack(sized, batching, order))
        total = sum(row.tokens for row in sized)
        padded = sum(len(b) * max(row.tokens for row in b) for b in batches)
        part = f"{text} {order}" if batching.mode == "tokens" else text
        table.append(
            Row(
                part=part,
                what="padding",
                unit="%",
                values=[100 * (1 - total / padded)],
                note=f"{len(batches):,} batches",
            )
        )
        if batching.mode == "tokens":
            unused = 1 - total / (batching.limit * len(batches))
            table.append(Row(part=part, what="unused budget", unit="%", values=[100 * unused]))
        else:
            largest = max(sum(row.tokens for row in b) for b in batches)
            table.append(
                Row(
                    part=part,
                    what="unused memory, if it must hold the largest batch",
                    unit="%",
                    values=[100 * (1 - total / (largest * len(batches)))],
                )
            )
    return table


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
