"""100 agents and 100,000 messages: each delivered once and in order, and how fast a stop gets through.

    python -m tests.bench.agents                                   both durabilities, about five minutes
    python -m tests.bench.agents --messages 10000 --durability relaxed
    python -m tests.bench.agents --out docs/bench/agents.txt

Agents are spread over hosts, each a process as `headrace agent run` makes it, on a fresh broker. Phases, one after the
other, each timed from its first message to the moment at which every mailbox is empty:

    work      bursts from outside make each agent send to ten neighbours; every message changes its receiver's state
    reply     each agent asks a neighbour durably, one question after the other's answer; questions are on the work lane
    control   words for every agent's control lane, each of which changes its state
    stop      with the mailboxes full once more: the time from sending `stop` to the agent's record that says so

Afterwards each agent's committed state says what it got from whom. Exit code 1 if anything is missing, doubled, out of
order, or dead. Memory is the peak of each process over the whole run (VmHWM).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import psutil
import typer
import uvloop
from msgspec import Raw
from nats.aio.msg import Msg
from rich.console import Console

from headrace.contracts import codec
from headrace.contracts.mail import AgentState, ControlBody, Mail
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import last_message, stream_info
from headrace.mesh.mail import Post, derived_id, mail_message, now_us
from headrace.mesh.provision import provision
from headrace.mesh.publisher import publish_all
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.bench.agents_crew import FAN_OUT, Burst, Chain, Counts, name, neighbours
from tests.bench.agents_report import WIDTH, Phase, Run, show
from tests.bench.fleet import Durability, tied
from tests.bench.machine import ROOT, describe

DURABILITIES: Final[tuple[Durability, ...]] = ("relaxed", "safe")
SETTINGS: Final = """url = "{url}"
durability = "{durability}"
mailbox_messages = 100000
[agent]
max_hops = 10000
"""
READY_S, QUIET_S = 120.0, 60.0
ASKED, CONTROLLED = 0.12, 0.1
"""Shares of the messages that are answers (and as many are questions), and words on the control lane."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=re.sub(r"\n\n(?=    )", "\n\n\b\n", __doc__))
def bench(
    messages: Annotated[int, typer.Option(min=1_000, help="Messages of the first three phases.")] = 100_000,
    agents: Annotated[int, typer.Option(min=2, max=1_000, help="Agents.")] = 100,
    hosts: Annotated[int, typer.Option(min=1, help="Processes that they are spread over.")] = 2,
    stops: Annotated[int, typer.Option(min=1, help="Stops that are timed.")] = 20,
    durability: Annotated[str, typer.Option(help="relaxed, safe, or both.")] = ",".join(DURABILITIES),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
) -> None:
    chosen = [d for d in DURABILITIES if d in durability.split(",")]
    if not chosen:
        raise typer.BadParameter(f"{durability!r} is none of relaxed, safe", param_hint="--durability")
    machine = describe("not asked")
    for unused in ("vllm", "duckdb"):
        del machine[unused]
    runs: list[Run] = []
    for one in chosen:
        with tempfile.TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True) as folder:
            bench_ = Bench(Path(folder), one, agents=agents, hosts=hosts)
            runs.append(uvloop.run(bench_.run(messages, stops)))
    show(Console(width=None if sys.stdout.isatty() else WIDTH), machine, runs)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") as file:
            show(Console(file=file, width=WIDTH, no_color=True, force_terminal=False), machine, runs)
    if json_file is not None:
        body = {"machine": machine, "runs": [run.plain() for run in runs]}
        json_file.write_text(json.dumps(body, indent=2) + "\n", "utf-8")
    raise typer.Exit(1 if any(run.wrong for run in runs) else 0)


class Bench:
    """One run on a fresh broker."""

    def __init__(self, folder: Path, durability: Durability, *, agents: int, hosts: int) -> None:
        self._folder = folder
        self._durability: Durability = durability
        self._agents = agents
        self._hosts = min(hosts, agents)
        self._server = NatsServer(folder / "nats", durability=durability)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._mesh: Mesh
        self.bursts = 0
        self.cancelled: list[str] = []

    async def run(self, messages: int, stops: int) -> Run:
        """All phases; the processes are ended whatever happens."""
        self._server.start()
        url = self._server.url
        (self._folder / "headrace.toml").write_text(
            SETTINGS.format(url=url, durability=self._durability), "utf-8"
        )
        settings = Settings(url=url, durability=self._durability, mailbox_messages=100_000)
        try:
            async with await Mesh.connect(settings, name="bench") as self._mesh:
                await provision(self._mesh)
                await self._start()
                run = Run(self._durability, self._agents, self._hosts)
                each = messages / self._agents
                bursts = max(1, round(each * (1 - 2 * ASKED - CONTROLLED) / (FAN_OUT + 1)))
                chain, words = max(1, round(each * ASKED)), max(1, round(each * CONTROLLED))
                for phase in (self._work(bursts), self._reply(chain), self._control(words)):
                    before = self._cpu_s()
                    done = await phase
                    after = self._cpu_s()
                    cpu_us = {which: 1e6 * (after[which] - before[which]) for which in after}
                    run.phases.append(replace(done, cpu_us=cpu_us))
                run.backlog, run.stop_ms = await self._stops(stops)
                run.memory_mib = self._memory()
                run.wrong = await self._check(chain)
                return run
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            self._server.stop()

    # --- processes -----------------------------------------------------------------------------------
    async def _start(self) -> None:
        bounds = [self._agents * n // self._hosts for n in range(self._hosts + 1)]
        waiting: list[tuple[Path, Path]] = []
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "OTEL_"))}
        for at, (first, past) in enumerate(itertools.pairwise(bounds), 1):
            ready, log = self._folder / f"host-{at}.ready", self._folder / f"host-{at}.log"
            command = [sys.executable, "-m", "tests.bench.agents_host", str(self._folder)]
            environment = clean | {"HEADRACE_READY_FILE": str(ready)}
            if profile := os.environ.get("HEADRACE_BENCH_PROFILE"):
                environment["HEADRACE_BENCH_PROFILE"] = profile
            with log.open("wb") as output:
                self._processes.append(
                    subprocess.Popen(
                        [*tied(), *command, str(first), str(past)],
                        stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=ROOT,
                    )
                )  # fmt: skip
            waiting.append((ready, log))
        until = time.monotonic() + READY_S
        for process, (ready, log) in zip(self._processes, waiting, strict=True):
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"a host did not start:\n{log.read_text('utf-8')[-2_000:]}")
                await asyncio.sleep(0.02)

    def _cpu_s(self) -> dict[str, float]:
        """CPU time that hosts and broker have used, in seconds."""

        def used(pid: int) -> float:
            times = psutil.Process(pid).cpu_times()
            return times.user + times.system

        hosts = sum(used(process.pid) for process in self._processes)
        return {"hosts": hosts, "broker": used(self._server.pid)}

    def _memory(self) -> dict[str, float]:
        pids = {"broker": self._server.pid}
        pids |= {f"host {at}": process.pid for at, process in enumerate(self._processes, 1)}
        found: dict[str, float] = {}
        for which, pid in pids.items():
            status = Path(f"/proc/{pid}/status").read_text("utf-8")
            (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
            found[which] = int(peak) / 1_024
        return found

    # --- phases --------------------------------------------------------------------------------------
    async def _work(self, bursts: int) -> Phase:
        began = time.monotonic()
        await self._send_bursts(bursts)
        await self._empty()
        fan_out = len(neighbours(0, self._agents))
        return Phase("work", bursts * self._agents * (1 + fan_out), time.monotonic() - began)

    async def _reply(self, chain: int) -> Phase:
        began = time.monotonic()
        chains = [Chain(neighbours(n, self._agents)[0], chain) for n in range(self._agents)]
        await self._store([self._mail(n, "chain", body) for n, body in enumerate(chains)])
        await self._empty()
        answers = chain * self._agents
        return Phase("reply", answers, time.monotonic() - began, beside=answers + self._agents)

    async def _control(self, words: int) -> Phase:
        began = time.monotonic()
        self.cancelled = [f"nobody-{n}" for n in range(words)]
        for at in range(words):
            body = ControlBody(mail=self.cancelled[at])
            await self._store([self._mail(n, "cancel", body, lane="control") for n in range(self._agents)])
        await self._empty()
        return Phase("control", words * self._agents, time.monotonic() - began)

    async def _stops(self, tries: int) -> tuple[tuple[int, int], list[float]]:
        """How long each stop took, in ms, and what waited in all mailboxes at the first and at the last of them."""
        await self._send_bursts(max(2, 2 * tries // 10 + 10))
        first = last = await self._waiting()
        took: list[float] = []
        post = Post(self._mesh)
        for at in range(tries):
            agent = (at * 37) % self._agents
            seen = asyncio.Event()

            async def heard(message: Msg, seen: asyncio.Event = seen) -> None:
                if codec.AGENT_STATE.decode(message.data, message.headers).stopped:
                    seen.set()

            subscription = await self._mesh.nc.subscribe(
                self._mesh.subjects.agent_state(name(agent)), cb=heard
            )
            await self._mesh.nc.flush()
            last = await self._waiting()
            began = time.monotonic()
            await post.send(self._mail(agent, "stop", ControlBody(), lane="control"))
            async with asyncio.timeout(QUIET_S):
                await seen.wait()
            took.append(1_000 * (time.monotonic() - began))
            await subscription.unsubscribe()
            await post.send(self._mail(agent, "resume", ControlBody(), lane="control"))
        await self._empty()
        return (first, last), took

    # --- messages ------------------------------------------------------------------------------------
    async def _send_bursts(self, bursts: int) -> None:
        for _ in range(bursts):
            self.bursts += 1
            body = Burst(self.bursts, self._agents)
            await self._store([self._mail(n, "burst", body) for n in range(self._agents)])

    def _mail(self, agent: int, kind: str, body: Any, **more: Any) -> Mail:
        at_us = now_us()
        id_ = derived_id(name(agent), kind, msgspec.json.encode(body).decode(), str(at_us))
        raw = Raw(msgspec.json.encode(body))
        return Mail(id=id_, to=name(agent), sender="bench", kind=kind, body=raw, created_us=at_us, **more)

    async def _store(self, mails: Sequence[Mail]) -> None:
        await publish_all(self._mesh, self._mesh.topology.mail, [mail_message(self._mesh, m) for m in mails])

    async def _waiting(self) -> int:
        return int((await stream_info(self._mesh, self._mesh.topology.mail))["state"]["messages"])

    async def _empty(self) -> None:
        """Return when no mailbox holds anything; a message stays until all that it caused is stored."""
        before, moved = -1, time.monotonic()
        while left := await self._waiting():
            if left != before:
                before, moved = left, time.monotonic()
            if time.monotonic() - moved > QUIET_S:
                raise RuntimeError(f"{left} messages wait, and nothing moves")
            await asyncio.sleep(0.05)

    # --- the account ---------------------------------------------------------------------------------
    async def _check(self, chain: int) -> list[str]:
        wrong: list[str] = []
        if dead := int((await stream_info(self._mesh, self._mesh.topology.dead))["state"]["messages"]):
            wrong.append(f"{dead} dead letters")
        for number in range(self._agents):
            agent, subject = name(number), self._mesh.subjects.agent_state(name(number))
            stored = await last_message(self._mesh, self._mesh.topology.agents, subject)
            if stored is None:
                wrong.append(f"{agent} has no state")
                continue
            record = codec.AGENT_STATE.decode(stored.data, stored.headers)
            wrong += [f"{agent}: {what}" for what in self.differences(number, record, chain)]
        return wrong

    def differences(self, number: int, record: AgentState, chain: int) -> list[str]:
        """What the state of an agent should not say."""
        counts = msgspec.json.decode(record.state, type=Counts)
        senders = [name(n) for n in range(self._agents) if name(number) in neighbours(n, self._agents)]
        expected = dict.fromkeys(senders, (self.bursts, self.bursts))
        got = {sender: (tally.count, tally.last) for sender, tally in counts.numbers.items()}
        facts = {
            "numbers out of order": (counts.wrong, 0),
            "bursts": (counts.bursts, self.bursts),
            "numbers by sender": (got, expected),
            "questions asked": (counts.asked, chain),
            "answers": (counts.answered, chain),
            "open questions": (len(record.questions), 0),
            "words of control": (record.cancelled, self.cancelled[-256:]),
        }
        return [
            f"{what}: {seen} in place of {wanted}" for what, (seen, wanted) in facts.items() if seen != wanted
        ]


if __name__ == "__main__":
    sys.exit(app())
