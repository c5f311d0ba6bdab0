"""What the gateway adds to a call, beside the callee itself and, if it is there, LiteLLM's proxy.

    just bench-gateway                              all of it, about three minutes
    just bench-gateway --only latency --seconds 1   a quick look
    just bench-gateway --litellm PATH               with LiteLLM's proxy of another environment (its bin/python)

The callee is an HTTP server in a process of its own that answers at once. Callers ask in closed loops: each waits for
its answer and asks again, so calls/s and latency tell of each other. What a way adds is its latency less that of the
callee, which the same loops ask in the same run, before each measurement.

    the callee itself   a POST of 300 bytes on an open connection
    agent               a call is stored in hr.calls.<tenant>.<agent>, its PubAck awaited, then its answer
    agent, a budget     the same for a tenant with a budget of money, which each call reserves from and posts to
    agent, 2 gateways   as agent, with two gateway processes that share the calls
    hr.api.call         the front door, as `nats request` asks it
    LiteLLM             its proxy, one worker, no database, on the same callee

Each call has a key of its own; it is looked up, its intent is written before the callee is asked, and what came of it
before the answer is given. Times are in ms; CPU is of all gateways or the proxy, and of the broker, for each call.
Medians of the repetitions.

    recovery            a gateway starts on a ledger in which its last life left 10,000 calls open
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
import uvloop
from rich.console import Console

from headrace.gateway.budgets import Budgets
from headrace.gateway.ledger import StreamLedger
from tests.bench import callers as load
from tests.bench import recovery
from tests.bench.fleet import ROOT, Durability, Fleet, tied
from tests.bench.gateway_report import ITSELF, PAID, WIDTH, Goal, Line, goals, median, show, write_text
from tests.bench.machine import describe

sys.path.append(str(ROOT / "examples/governed"))

from litellm_proxy import Proxy

CALLERS: Final = (1, 16, 64)
DURABILITIES: Final[tuple[Durability, ...]] = ("relaxed", "safe")
CONFIG: Final = """[callees.bench]
kind = "openai"
effect = "cost_bearing"
base_url = "http://127.0.0.1:{port}"
timeout_s = 30.0
max_output_tokens = 16
concurrency = 1024
[callees.bench.price]
version = "1"
input_micro_per_mtok = 1000000
output_micro_per_mtok = 2000000
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=re.sub(r"\n\n(?=    )", "\n\n\b\n", __doc__))
def bench(
    only: Annotated[str, typer.Option(help="latency, recovery, or both.")] = "latency,recovery",
    durability: Annotated[str, typer.Option(help="relaxed, safe, or both.")] = ",".join(DURABILITIES),
    seconds: Annotated[float, typer.Option(min=0.2, help="How long callers ask in one measurement.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each line.")] = 3,
    intents: Annotated[int, typer.Option(min=1, help="Open calls of the recovery.")] = 10_000,
    litellm: Annotated[
        Path | None,
        typer.Option(help="Interpreter of an environment with litellm[proxy].", show_default=False),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here too.")] = None,
    out: Annotated[Path, typer.Option(help="Write the table here.")] = ROOT / "docs/bench/gateway.txt",
) -> None:
    parts = [part.strip() for part in only.split(",")]
    if unknown := set(parts) - {"latency", "recovery"}:
        raise typer.BadParameter(f"{unknown.pop()!r} is none of latency, recovery", param_hint="--only")
    chosen = [d for d in DURABILITIES if d in durability.split(",")]
    if not chosen:
        raise typer.BadParameter(f"{durability!r} is none of relaxed, safe", param_hint="--durability")
    machine = describe("not asked")
    for name in ("vllm", "duckdb"):
        del machine[name]
    for name in [name for name in os.environ if name.startswith(("HEADRACE_", "OTEL_"))]:
        del os.environ[name]
    machine["LiteLLM"] = "not asked" if litellm is None else Proxy.version(litellm)
    began = time.monotonic()
    lines, said, reached = uvloop.run(_measure(parts, chosen, seconds, repeats, intents, litellm))
    machine["took"] = f"{time.monotonic() - began:.0f} s for --seconds {seconds:g} --repeats {repeats}"
    show(Console(width=None if sys.stdout.isatty() else WIDTH), machine, lines, said, reached)
    write_text(out, machine, lines, said, reached)
    if json_file:
        goals_ = [{"what": g.what, "seen": g.seen, "met": g.met} for g in reached]
        body = {"machine": machine, "lines": [x.plain() for x in lines], "goals": goals_, "notes": said}
        json_file.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", "utf-8")


async def _measure(
    parts: list[str],
    durabilities: list[Durability],
    seconds: float,
    repeats: int,
    intents: int,
    litellm: Path | None,
) -> tuple[list[Line], list[str], list[Goal]]:
    lines: list[Line] = []
    said: list[str] = []
    reached: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if "latency" in parts:
            async with lean_callee() as (port, pid):
                meter = Meter(port, pid, seconds, repeats)
                for durability in durabilities:
                    await _ours(meter, folder / durability, durability)
                if litellm is not None:
                    await _litellm(meter, folder, litellm)
            lines = meter.lines
            reached += goals(lines)
        if "recovery" in parts:
            for durability in durabilities:
                _say(f"recovery of {intents:,} open calls, {durability}")
                took = await recovery.measure(folder / f"recovery-{durability}", durability, intents)
                said.append(str(took))
                reached.append(
                    Goal(
                        f"recovery within 10 s under {durability}",
                        f"{took.classified_s:.1f} s",
                        took.classified_s <= 10,
                    )
                )
    return lines, said, reached


class Meter:
    """Measures ways to call, each beside the callee itself, and keeps the lines."""

    def __init__(self, port: int, pid: int, seconds: float, repeats: int) -> None:
        self.port = port
        self.lines: list[Line] = []
        self._pid = pid
        self._seconds = seconds
        self._repeats = repeats

    async def line(
        self, way: str, durability: str, call: load.Call | None, callers: int, pids: dict[str, int]
    ) -> None:
        """One line; without `call` of the callee itself."""
        found: list[Line] = []
        for _ in range(self._repeats):
            async with load.Http(self.port) as direct:
                before = await load.run(direct, callers, self._seconds / 3)
            spent = {name: _cpu_s(pid) for name, pid in pids.items()}
            seen = before if call is None else await load.run(call, callers, self._seconds)
            count = len(seen.latencies)
            found.append(
                Line(
                    way=way, durability=durability, callers=callers, p50=seen.ms(50), p99=seen.ms(99),
                    direct_p50=before.ms(50), direct_p99=before.ms(99), rate=seen.rate,
                    cpu={name: (_cpu_s(pid) - spent[name]) / count * 1e6 for name, pid in pids.items()},
                )
            )  # fmt: skip
        self.lines.append(line := median(found))
        _say(
            f"{way} {durability}, {callers} callers: p50 {line.p50:.2f} ms, {line.rate:,.0f} calls/s, CPU {line.cpu}"
        )


async def _ours(meter: Meter, folder: Path, durability: Durability) -> None:
    async with Fleet(folder, durability, gateways=2) as fleet:
        (folder / "headrace.toml").write_text(CONFIG.format(port=meter.port), "utf-8")
        await fleet.start("gateway")
        agent, api = load.Agent(fleet.mesh, "bench"), load.Api(fleet.mesh, "bench")
        pids = {"gateway": fleet.pid("gateway"), "broker": fleet.pid("nats-server")}
        await load.run(agent, 8, 1.0)  # the first calls open connections
        for callers in CALLERS:
            await meter.line(ITSELF, durability, None, callers, {})
            await meter.line("agent", durability, agent, callers, pids)
        await Budgets(StreamLedger(fleet.mesh)).set("paid", "money", unit="micro", limit=10**12)
        paid = load.Agent(fleet.mesh, "bench", "paid")
        for callers in CALLERS[1:]:
            await meter.line(PAID, durability, paid, callers, pids)
        await meter.line("hr.api.call", durability, api, 16, pids)
        await fleet.start("gateway-2")
        await load.run(agent, 8, 1.0)
        pids["gateway-2"] = fleet.pid("gateway-2")
        await meter.line("agent, 2 gateways", durability, agent, 64, pids)


async def _litellm(meter: Meter, folder: Path, python: Path) -> None:
    proxy = Proxy(python, folder / "litellm", f"http://127.0.0.1:{meter.port}")
    await asyncio.to_thread(proxy.start)
    try:
        async with load.Http(proxy.port, "/v1/chat/completions", proxy.key) as call:
            await load.run(call, 4, 1.0)
            for callers in CALLERS:
                await meter.line("LiteLLM", "", call, callers, {"proxy": proxy.pid})
    finally:
        proxy.kill()


@contextlib.asynccontextmanager
async def lean_callee() -> AsyncIterator[tuple[int, int]]:
    """A callee that answers at once: its port and process id."""
    command = tied(sys.executable, "-m", "tests.bench.lean_callee")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield int(await process.stdout.readline()), process.pid
    finally:
        process.kill()
        await process.wait()


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
