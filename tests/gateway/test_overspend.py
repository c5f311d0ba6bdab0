"""Three gateways in processes of their own and more calls at once than a budget has room for: exactly what fits.

Each call costs all that it reserves, so that nothing is given back and the number that fits is one number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts.calls import CallAnswer
from headrace.contracts.ledger import Unit
from headrace.gateway.budgets import Budgets
from headrace.gateway.callees import Callee, read_body, worst_case
from headrace.gateway.keys import call_id
from headrace.gateway.ledger import StreamLedger
from headrace.mesh.callee_settings import CalleeSettings, PriceSettings
from headrace.mesh.connection import Mesh
from headrace.mesh.server import NatsServer
from tests.gateway.fleet import HI, Fleet
from tests.gateway.invariants import budgets_hold, check, heads_are_the_fold

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.slow]

OUTPUT = 50
PRICE = PriceSettings(version="1", input_micro_per_mtok=1_000_000, output_micro_per_mtok=1_000_000)
CALLEE = Callee(
    "cost_bearing",
    CalleeSettings(kind="openai", effect="cost_bearing", max_output_tokens=OUTPUT, free=True, price=PRICE),
)
"""As `governed` declares it."""


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def fleet(nats_server: NatsServer, mesh: Mesh, tmp_path: Path) -> Iterator[Fleet]:
    found = Fleet(nats_server, mesh, tmp_path / "m", gateways=3)
    try:
        yield found
    except BaseException:
        print(found.logs())
        raise
    finally:
        found.stop()


def dear(name: str) -> dict[str, Any]:
    """A body whose call will cost exactly what it reserves."""
    body = {**HI, "id": name, "usage": {"prompt_tokens": 100, "completion_tokens": OUTPUT}}
    bound = read_body(CALLEE, msgspec.Raw(msgspec.json.encode(body))).input_tokens
    assert 100 <= bound < 1_000  # as many digits, so the body's length stays
    body["usage"]["prompt_tokens"] = bound
    return body


def amount(unit: Unit) -> int:
    """What each of them takes of a budget of this unit."""
    found = worst_case(CALLEE, read_body(CALLEE, msgspec.Raw(msgspec.json.encode(dear("calls-0000")))))[unit]
    assert found is not None
    return found


async def ask_until_told(fleet: Fleet, agent: str, key: str) -> CallAnswer:
    """Ask, again where nobody answered, until the call is admitted or refused."""
    while True:
        answer = await fleet.ask("cost_bearing", key, dear(key), agent=agent, wait_s=4.0)
        if answer is not None and answer.state != "in_progress":
            return answer
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("unit", "killed"),
    [("calls", False), ("tokens", False), ("micro", False), ("calls", True)],
    ids=["calls", "tokens", "micro", "calls-one-killed-meanwhile"],
)
async def test_g6_exactly_what_fits_is_admitted(fleet: Fleet, unit: Unit, killed: bool) -> None:
    """A thousand at once for a hundred places (less of the other units, to be quick): ledger, heads, callee agree."""
    fits, asked = (100, 1_000) if unit == "calls" else (40, 300)
    one = amount(unit) if unit != "calls" else 1
    rest = one - 1
    # What the last call leaves over is not enough for one more.
    await Budgets(StreamLedger(fleet.mesh)).set("t", unit, unit=unit, limit=fits * one + rest)
    await fleet.mend()
    keys = [f"{unit:.5}-{n:04}" for n in range(asked)]
    assert len({len(dear(key)["id"]) for key in keys}) == 1

    async def kill_one() -> None:
        if killed:
            await fleet.until(lambda: len(fleet.heard()) >= fits // 5)
            fleet.gateways[0].kill()
            await fleet.mend()

    *answers, _ = await asyncio.gather(*(ask_until_told(fleet, "a", key) for key in keys), kill_one())
    admitted = [a for a in answers if a.state != "refused"]
    assert len(admitted) == fits
    assert {(a.error or {}).get("type") for a in answers if a.state == "refused"} == {"over_budget"}
    fold = await fleet.fold()
    assert len(fold.calls) == fits
    assert {call for _, call in fold.calls} == {a.call_id for a in admitted}
    head = fold.heads["t", unit].periods[""]
    assert (head.posted + head.held, head.held, head.overrun) == (fits * one, head.in_doubt, 0)
    heard = fleet.heard()
    assert len(heard) == len(set(heard)) <= fits
    if not killed:
        assert (len(heard), head.held) == (fits, 0)
        assert {a.state for a in admitted} == {"completed"}
    names = {call_id("t", "a", key): key for key in keys}
    witness = await fleet.witness(names, rejected=[a.call_id for a in answers if a.state == "refused"])
    check(witness)
    assert budgets_hold(witness) > fits
    assert heads_are_the_fold(witness) > 1


@pytest.mark.parametrize("killed", [False, True], ids=["", "one-killed-meanwhile"])
async def test_g13_fifty_submissions_of_one_key_are_one_intent(fleet: Fleet, killed: bool) -> None:
    """They are told the one outcome, or that it is under way; the callee hears of it once."""
    await Budgets(StreamLedger(fleet.mesh)).set("t", "calls", unit="calls", limit=10**9)
    await fleet.mend()
    body = {**HI, "id": "k", "behave": "late", "delay": 0.5}

    async def kill_one() -> None:
        if killed:
            await fleet.until(lambda: bool(fleet.heard()))
            fleet.gateways[0].kill()
            await fleet.mend()

    long_s = 4.0 if killed else 20.0  # who asked the dead one, hears nothing
    waits = [long_s if n % 2 else 0.2 for n in range(50)]
    *answers, _ = await asyncio.gather(
        *(fleet.ask("cost_bearing", "k", body, wait_s=wait_s) for wait_s in waits), kill_one()
    )
    told = [a for a in answers if a is not None]
    assert {a.call_id for a in told} == {call_id("t", "a", "k")}
    assert {a.state for a in told} <= {"completed", "in_progress", "in_doubt"}
    fold = await fleet.fold()
    (view,) = fold.calls.values()
    assert len(view.attempts) == 1
    assert fleet.heard() == ["k"]
    if not killed:
        # The call's own answer went to one of them; whose wait was over by then is not among these.
        assert [a.replayed for a in told if a.state == "completed"].count(False) <= 1
        assert sum(a.state == "completed" for a in told) >= 25
    check(await fleet.witness({call_id("t", "a", "k"): "k"}))
