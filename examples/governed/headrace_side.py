"""The calls by way of two gateways that share them, with gateways and broker killed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
from parts import Callee, Part, Plan, gateway, say
from sides import Side

from headrace.contracts import codec
from headrace.contracts.account import CallView, Fold
from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import HeadraceError
from headrace.gateway.answers import held_micro, posted_micro
from headrace.gateway.keys import call_id
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.provision import provision
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from headrace.mesh.tail import read_all

TENANT, AGENT, BUDGET = "demo", "agent", "money"
ENDS = ("completed", "failed", "in_doubt")
LIMIT_S = 600.0
SETTINGS = """url = "{url}"
durability = "relaxed"
ack_wait_s = 2.0
[callees.model]
kind = "openai"
effect = "cost_bearing"
base_url = "{callee}"
timeout_s = 10.0
max_output_tokens = 50
[callees.model.price]
version = "1"
input_micro_per_mtok = 1000000
output_micro_per_mtok = 1000000
"""


async def run(folder: Path, plan: Plan) -> Side:
    """Make the calls, kill gateways as planned and half as many brokers, and compare ledger and callee."""
    server = NatsServer(folder / "nats", durability="relaxed")
    server.start()
    side = Side("Headrace", plan.calls)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        callee = stack.enter_context(Callee(folder))
        (folder / "headrace.toml").write_text(SETTINGS.format(url=server.url, callee=callee.url), "utf-8")
        settings = Settings(url=server.url, dir=str(folder), durability="relaxed", ack_wait_s=2.0)
        mesh = await Mesh.connect(settings, name="demonstration")
        try:
            await provision(mesh)
            gateways = [stack.enter_context(gateway(f"gateway-{i}", folder)) for i in (1, 2)]
            await call_api(
                mesh, "budget.set", {"budget": BUDGET, "unit": "micro", "limit": 10**9, "tenant": TENANT}
            )
            began = time.monotonic()
            over = asyncio.Event()
            killing = asyncio.create_task(_kill(side, server, gateways, callee, plan, over))
            names = iter([f"call-{n}" for n in range(plan.calls)])
            answers: dict[str, CallAnswer] = {}
            try:
                async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
                    for _ in range(plan.callers):
                        group.create_task(_caller(mesh, names, answers))
            finally:
                over.set()
                await killing
            side.seconds = time.monotonic() - began
            fold = await _fold(mesh)
        finally:
            await mesh.close()
        compare(side, answers, fold, callee)
    return side


async def _caller(mesh: Mesh, names: Any, answers: dict[str, CallAnswer]) -> None:
    """One caller after the other call, each asked with its key until it has an end."""
    for name in names:
        request = {
            "callee": "model", "body": {"messages": [{"role": "user", "content": name}]}, "tenant": TENANT,
            "agent": AGENT, "key": name, "wait_s": 3.0,
        }  # fmt: skip
        while True:
            with contextlib.suppress(HeadraceError):
                data = await call_api(mesh, "call", request, timeout_s=5.0)
                answer = msgspec.json.decode(data, type=CallAnswer)
                if answer.state in ENDS:
                    answers[name] = answer
                    break
            await asyncio.sleep(0.05)


async def _kill(  # noqa: PLR0917  (all that may be killed, and when)
    side: Side, server: NatsServer, gateways: list[Part], callee: Callee, plan: Plan, over: asyncio.Event
) -> None:
    """Kill gateways in turn, and the broker after every second one; start them again."""
    order = ["gateway-1", "broker", "gateway-2"]
    victims = [order[n % 3] for n in range(plan.kills + (plan.kills + 1) // 2)]
    parts = {part.name: part for part in gateways}
    for victim, mark in zip(victims, plan.marks(len(victims)), strict=True):
        if not await callee.has_done(mark, over):
            return
        say(f"  {victim}: SIGKILL with {callee.count():,} calls done")
        if victim == "broker":
            server.kill()
            await asyncio.to_thread(server.restart)
        else:
            await asyncio.to_thread(parts[victim].wait_ready)
            parts[victim].kill()
            parts[victim].start(wait=False)
        kind = victim.partition("-")[0]
        side.kills[kind] = side.kills.get(kind, 0) + 1


async def _fold(mesh: Mesh) -> Fold:
    fold = Fold()
    schemas = {"budget": codec.BUDGET_HEAD, "roster": codec.ROSTER}
    async for batch in read_all(mesh, mesh.topology.ledger, f"{mesh.subjects.prefix}.ledger.>"):
        for m in batch:
            schema = schemas.get(m.subject.split(".")[2], codec.CALL_RECORD)
            fold.take(schema.decode(m.data, m.headers))
    return fold


def compare(side: Side, answers: dict[str, CallAnswer], fold: Fold, callee: Callee) -> None:
    """The ledger against the callee's own log, call by call."""
    entries = callee.entries()
    side.done = sum(map(len, entries.values()))
    side.doubled = sorted(name for name, at in entries.items() if len(at) > 1)
    by_name = {
        f"call-{n}": fold.calls.get((TENANT, call_id(TENANT, AGENT, f"call-{n}"))) for n in range(side.calls)
    }
    for name, view in by_name.items():
        at = entries.get(name, [])
        if view is None:
            side.wrong.append(f"{name} stands nowhere in the ledger")
            side.unrecorded += len(at)
            continue
        _judge(side, name, view, at)
        if name in answers and answers[name].state != view.state and answers[name].state != "in_doubt":
            side.wrong.append(
                f"{name}: its caller was told {answers[name].state}, the ledger says {view.state}"
            )
        side.posted_micro += posted_micro(view)
        side.held_micro += held_micro(view)
    side.unrecorded += sum(len(at) for name, at in entries.items() if name not in by_name)
    side.wrong += fold.differences()
    head = fold.heads.get((TENANT, BUDGET))
    account = head.periods.get("") if head else None
    if account is None or (account.posted, account.held) != (side.posted_micro, side.held_micro):
        side.wrong.append(
            f"the budget says {account}, its calls {side.posted_micro} posted, {side.held_micro} held"
        )


def _judge(side: Side, name: str, view: CallView, at: list[float]) -> None:
    if any(view.attempts[0].intent.at_us > moment * 1e6 for moment in at):
        side.wrong.append(f"{name} was done before its intent was written")
    match view.state:
        case "completed":
            side.answered += 1
            if len(at) != 1:
                side.wrong.append(f"{name} is completed, and the callee did it {len(at)} times")
        case "failed":
            side.failed += 1
            if at:
                side.failed_done += 1
                side.wrong.append(f"{name} is failed, and the callee did it")
        case "in_doubt":
            side.in_doubt += 1
            side.in_doubt_done += bool(at)
        case state:
            side.wrong.append(f"{name} is left {state}")
