"""What the data plane says of calls that a real gateway made: every view, and the examples of docs/ledger.md."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts.calls import CallAnswer
from headrace.contracts.ledger import PeriodAccount
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos.processes import Part
from tests.cli.harness import headrace
from tests.completion.ledger import projected
from tests.completion.world import sql
from tests.gateway.governed import Governed, governed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

DOC = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text("utf-8")


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """What a killed completion had leased comes again after a second."""
    return msgspec.structs.replace(settings, ack_wait_s=1.0)


class Accounts(Governed):
    """The same mesh with completion."""

    completion: Part

    async def call(self, callee: str, key: str, *, tenant: str, agent: str = "a", **more: Any) -> CallAnswer:
        task = more.pop("task", None)
        body = {"messages": [{"role": "user", "content": "hi"}], "id": key} | more
        request = {
            "callee": callee,
            "body": body,
            "tenant": tenant,
            "agent": agent,
            "key": key,
            "wait_s": 10,
            "task": task,
        }
        return msgspec.json.decode(await call_api(self.mesh, "call", request, timeout_s=15), type=CallAnswer)

    async def budget(self, tenant: str, name: str, unit: str, limit: int, **more: Any) -> None:
        await call_api(
            self.mesh, "budget.set", {"budget": name, "tenant": tenant, "unit": unit, "limit": limit} | more
        )

    async def budgets(self) -> dict[tuple[str, str], dict[str, Any]]:
        found = msgspec.json.decode(await call_api(self.mesh, "budget.show", {}))["budgets"]
        return {(line["tenant"], line["name"]): line for line in found}


@pytest.fixture
async def world(nats_server: NatsServer, mesh: Mesh, tmp_path: Path) -> AsyncIterator[Accounts]:
    with governed(nats_server, mesh, tmp_path / "m", timeout_s=3.0) as made:
        made.__class__ = Accounts
        made.completion = Part("completion", tmp_path / "m")  # type: ignore[attr-defined]
        await made.start()
        try:
            yield made  # type: ignore[misc]
        finally:
            made.completion.kill()  # type: ignore[attr-defined]


async def test_g3_a_completion_delivered_five_times_is_one_row_and_one_charge(world: Accounts) -> None:
    """Killed between commit and ack, so that it comes again; and what is stored is read five times."""
    await world.budget("t", "b", "micro", 10_000)
    answer = await world.call("cost_bearing", "k", tenant="t")
    assert (answer.state, answer.posted_micro) == ("completed", 15)
    for _ in range(4):
        world.completion.start(crash_at="projection-committed")
        assert await world.completion.died(30) == -signal.SIGKILL, world.completion.tail()
    world.completion.start()
    await world.completion.ready()
    for _ in range(5):
        again = await world.call("cost_bearing", "k", tenant="t")
        assert (again.state, again.replayed, again.posted_micro) == ("completed", True, 15)
        assert again.outcome == answer.outcome
    await projected(world.mesh)
    kinds = await sql(
        world.mesh, "SELECT kind, count(*), sum(cost_micro) FROM call_records GROUP BY kind ORDER BY ALL"
    )
    assert kinds == [["completed", 1, 15], ["intent", 1, 0]]
    assert await sql(world.mesh, "SELECT state, attempts, posted_micro FROM calls") == [["completed", 1, 15]]
    assert await sql(world.mesh, "SELECT posted, held FROM budget_periods") == [[15, 0]]
    line = (await world.budgets())["t", "b"]
    assert (line["posted"], line["held"]) == (15, 0)
    assert len(world.heard("k")) == 1


async def mixed(world: Accounts) -> dict[str, CallAnswer]:
    """Two tenants and two agents; answers, retries, refusals, doubts, and a bill above what was reserved."""
    await world.budget("acme", "money", "micro", 10_000, period="day")
    await world.budget("acme", "tokens", "tokens", 10_000, period="month")
    await world.budget("acme", "a-calls", "calls", 100, agent="a")
    await world.budget("other", "money", "micro", 1_000)
    asked = {
        "plain": world.call("cost_bearing", "plain", tenant="acme", task="mail", model="small"),
        "two": world.call("cost_bearing", "two", tenant="acme", agent="b", task="mail", model="large"),
        "doubt": world.call(
            "cost_bearing", "doubt", tenant="acme", behave="closes", task="web", model="small"
        ),
        "decided": world.call("cost_bearing", "decided", tenant="acme", agent="b", behave="closes"),
        "bad": world.call("cost_bearing", "bad", tenant="acme", behave="400"),
        "busy": world.call("cost_bearing", "busy", tenant="other", behave="500"),
        "elsewhere": world.call("cost_bearing", "elsewhere", tenant="other", model="small"),
        "read": world.call("read", "read", tenant="other", behave="500"),
    }
    answers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
    decision = {
        "call": answers["decided"].call_id, "verdict": "applied", "cost_micro": 533, "why": "the bill", "by": "ann",
    }  # fmt: skip
    data = await call_api(world.mesh, "calls.resolve", decision)
    answers["decided"] = msgspec.json.decode(data, type=CallAnswer)
    return answers


async def test_the_views_say_what_was_answered_and_the_examples_run(world: Accounts) -> None:
    world.completion.start()
    answers = await mixed(world)
    await world.completion.ready()
    await projected(world.mesh)
    fold = await world.fold()

    # Calls, as their askers were told.
    columns = "call, state, attempts, posted_micro, held_micro"
    calls = {row[0]: row[1:] for row in await sql(world.mesh, f"SELECT {columns} FROM calls")}
    for name, answer in answers.items():
        assert calls[answer.call_id] == [
            answer.state,
            answer.attempt,
            answer.posted_micro,
            answer.held_micro,
        ], name
    assert len(calls) == len(answers)
    assert answers["read"].attempt == 3
    assert {answers[n].state for n in ("doubt", "bad", "plain")} == {"in_doubt", "failed", "completed"}

    # Spending, by whatever it is asked.
    per: dict[str, dict[Any, int]] = {by: defaultdict(int) for by in ("tenant", "agent", "model", "task")}
    for view in fold.calls.values():
        posted = sum(getattr(a.end, "cost_micro", 0) for a in view.attempts)
        names = (view.tenant, view.request.principal, view.request.model, view.request.task)
        for by, name in zip(per, names, strict=True):
            per[by][name] += posted
    for by, sums in per.items():
        rows = await sql(world.mesh, f"SELECT {by}, sum(posted_micro)::BIGINT FROM spend GROUP BY {by}")
        assert dict(map(tuple, rows)) == sums, by
    [[overrun, days]] = await sql(
        world.mesh, "SELECT sum(overrun_micro)::BIGINT, count(DISTINCT day) FROM spend WHERE tenant = 'acme'"
    )
    assert days in (1, 2)

    # What is in doubt, and what it holds, here and in the budgets.
    doubts = await sql(
        world.mesh, "SELECT tenant, call, held_micro, error_type FROM in_doubt ORDER BY held_micro DESC"
    )
    assert ["acme", answers["doubt"].call_id, answers["doubt"].held_micro, "connection"] in doubts
    heads = await world.budgets()
    assert overrun == heads["acme", "money"]["overrun"] > 0
    held = await sql(world.mesh, "SELECT sum(held_micro)::BIGINT FROM in_doubt WHERE tenant = 'acme'")
    assert held == [[heads["acme", "money"]["held_in_doubt"]]]

    # Budgets, as the gateway shows them and as their records make them.
    rows = await sql(
        world.mesh, "SELECT tenant, budget, name, posted, held, in_doubt, overrun FROM budget_periods"
    )
    accounts = {
        (t, b, n): PeriodAccount(posted=p, held=h, in_doubt=d, overrun=o) for t, b, n, p, h, d, o in rows
    }
    made = {(*key, n): account for key, periods in fold.accounts.items() for n, account in periods.items()}
    assert accounts == made
    for (tenant, budget, _), account in accounts.items():
        line = heads[tenant, budget]
        assert (line["posted"], line["held"], line["held_in_doubt"], line["overrun"]) == (
            account.posted, account.held, account.in_doubt, account.overrun,
        )  # fmt: skip
    assert accounts["acme", "a-calls", ""].posted == 1

    # One call, in order.
    history = await sql(
        world.mesh,
        "SELECT attempt, kind, resolved_by, why FROM call_history "
        f"WHERE call = '{answers['decided'].call_id}' ORDER BY sequence",
    )
    assert history == [
        [1, "intent", None, None], [1, "in_doubt", None, None], [1, "completed", "operator ann", "the bill"],
    ]  # fmt: skip

    await run_the_examples(world, answers)


async def run_the_examples(world: Accounts, answers: dict[str, CallAnswer]) -> None:
    """Every `headrace sql` of docs/ledger.md, as a shell would run it."""
    lines = [
        line.strip()
        for block in re.findall(r"^ *```sh\n(.*?)^ *```", DOC, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.strip().startswith("headrace sql")
    ]
    assert len(lines) >= 12
    for line in lines:
        arguments = shlex.split(line.replace("'CALL'", f"'{answers['decided'].call_id}'"))[1:]
        folder = str(world.completion.log.parent)
        done = await asyncio.to_thread(headrace, *arguments, "--dir", folder, "--json")
        assert done.returncode == 0, (line, done)
        assert msgspec.json.decode(done.stdout), line
