"""Rates of each stage of the mesh, beside what the same broker and DuckDB do for a bare loop in the same run.

    just bench                                  all parts, about five minutes
    just bench --items 2000                     a quick look
    just bench --parts submit,e2e --durability relaxed
    just bench --vllm-python PATH               the feed part with vLLM of another environment
    just bench-gateway                          what the gateway adds to a call, by itself (tests/bench/gateway.py)

Parts:

    submit   the client's API stores a JSONL file of 600-byte lines, both passes, with nobody pulling
    pull     one worker with the echo engine takes what was submitted and stores the results, with nobody landing
    landing  completion takes those results into DuckDB, with nothing else running
    e2e      everything runs; `headrace submit` is started; the time ends when the last row is landed
    feed     tokens/s of an engine fed by the queue ÷ preloaded in memory (sim, and vLLM on a tiny model)

submit, pull and landing take half of --items, the raw chain a quarter (a tenth and a twentieth under safe, where the
broker writes each ack to the disk by itself). Each service is a process of its own, started with the command line
that `headrace up` uses, on a fresh broker in a temporary folder for each durability. The raw loops
(`tests/bench/raw.py`) publish the same number of bytes and check nothing; the last of their acks is confirmed, and
acks are handled in order. DuckDB is measured by itself. Numbers are medians of the repetitions, of which there are
fewer when the time is over. Nothing is tuned between parts. A quiet machine is worth more than repetitions: the load
before the run is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import uvloop
from rich.console import Console

from tests.bench import feed
from tests.bench.fleet import ROOT, Durability, Fleet
from tests.bench.machine import describe
from tests.bench.rates import Rates, raw_duckdb
from tests.bench.report import WIDTH, Row, show, write_text

PARTS: Final = ("submit", "pull", "landing", "e2e", "feed")
DURABILITIES: Final[tuple[Durability, ...]] = ("relaxed", "safe")
SECTION_S: Final = 70.0
"""Seconds after which the short parts of one durability begin no further repetition."""
FEED_ITEMS: Final = 512

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=re.sub(r"\n\n(?=    )", "\n\n\b\n", __doc__))
def bench(
    items: Annotated[int, typer.Option(min=1_000, help="Items of the end-to-end part.")] = 100_000,
    parts: Annotated[str, typer.Option(help="Which parts, with commas.")] = ",".join(PARTS),
    durability: Annotated[str, typer.Option(help="relaxed, safe, or both.")] = ",".join(DURABILITIES),
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each short part.")] = 3,
    vllm_python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter that has vLLM [default: this one, else .venv-vllm/bin/python].",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here too.")] = None,
    out: Annotated[Path, typer.Option(help="Write the table here.")] = ROOT / "docs/bench/latest.txt",
) -> None:
    chosen = _chosen("--parts", parts, PARTS)
    durabilities = _chosen("--durability", durability, DURABILITIES)
    python, version = feed.find_vllm(vllm_python) if "feed" in chosen else ("", "")
    machine = describe(version or ("not installed" if "feed" in chosen else "not asked"))
    for name in [name for name in os.environ if name.startswith(("HEADRACE_", "OTEL_"))]:
        del os.environ[name]  # a mesh or a receiver of the person who runs this is no part of the measurement
    started = time.monotonic()
    rows, notes = _run(_measure(chosen, durabilities, items=items, repeats=repeats, vllm_python=python))
    machine["took"] = f"{time.monotonic() - started:.0f} s for --items {items} --repeats {repeats}"
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    show(console, machine, rows, notes)
    write_text(out, machine, rows, notes)
    if json_file:
        body = {"machine": machine, "rows": [row.plain() for row in rows], "notes": notes}
        json_file.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", "utf-8")


async def _measure(
    parts: list[str], durabilities: list[str], *, items: int, repeats: int, vllm_python: str
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True) as folder:
        base = Path(folder)
        duckdb = None
        if "landing" in parts:
            _say("raw DuckDB")
            duckdb = await raw_duckdb(base, count=max(500, items // 2), repeats=repeats)
            rows.append(duckdb)
        if set(parts) - {"feed"}:
            for durability in DURABILITIES:
                if durability not in durabilities:
                    continue
                async with Fleet(base / durability, durability, worker_flags=("--engine", "echo")) as fleet:
                    rates = Rates(
                        fleet,
                        items=items,
                        parts=parts,
                        repeats=repeats,
                        deadline=time.monotonic() + SECTION_S,
                        say=_say,
                    )
                    if duckdb is not None:
                        rates.compare_with("duckdb", duckdb)
                    await rates.run(base)
                rows += rates.rows
        if "feed" in parts:
            async with Fleet(base / "feed", "relaxed") as fleet:
                made, told = await feed.run(
                    fleet,
                    count=min(FEED_ITEMS, max(128, items // 20)),
                    rounds=repeats,
                    vllm_python=vllm_python,
                    say=_say,
                )
            rows += made
            notes += told
    if any(row.what.startswith("memory") for row in rows):
        notes.insert(0, MEMORY_NOTE)
    return rows, notes


MEMORY_NOTE: Final = (
    "Memory is sampled five times a second; where the kernel keeps a high-water mark of resident memory (VmHWM), "
    "the sample is of that. The services' figures at a tenth of the items and at all of them are of the same processes."
)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it on uvloop. SIGTERM and SIGHUP end it as Ctrl-C does: what it started is ended too."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()

        async def main() -> Any:
            task = asyncio.current_task()
            assert task is not None
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, task.cancel)
            return await work

        with contextlib.suppress(asyncio.CancelledError):
            return runner.run(main())
    raise typer.Exit(130)


def _chosen(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return names


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
