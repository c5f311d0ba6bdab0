"""The ledger's tables against the fold of the same records: any order, any repetition, and all of it anew."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import duckdb
import pytest
from msgspec.structs import replace

from headrace.completion import ledger_rebuild, ledger_rows
from headrace.completion.ledger_schema import LEDGER_STEP
from headrace.contracts.account import Fold
from headrace.contracts.ledger import (
    AttemptFailed,
    BudgetHead,
    CallError,
    CallOutcome,
    CallRequest,
    CallUsage,
    Completed,
    InDoubt,
    Intent,
    PeriodAccount,
    Roster,
)
from headrace.gateway.answers import held_micro, posted_micro
from tests.completion.ledger import history


@pytest.fixture
def connection() -> duckdb.DuckDBPyConnection:
    made = duckdb.connect()
    for statement in LEDGER_STEP:
        made.execute(statement)
    return made


def rows(connection: duckdb.DuckDBPyConnection, sql: str) -> list[Any]:
    return connection.execute(sql).fetchall()


@pytest.mark.parametrize("seed", range(3))
def test_calls_are_what_their_records_say(connection: duckdb.DuckDBPyConnection, seed: int) -> None:
    records = history(seed)
    rng = random.Random(seed)
    fold = Fold()
    for _, record in records:
        fold.take(record)
    # Delivered in pieces, some again and again, some late.
    pieces = [records[i : i + 7] for i in range(0, len(records), 7)]
    rng.shuffle(pieces)
    for piece in [*pieces, *rng.sample(pieces, len(pieces) // 2)]:
        ledger_rows.insert(connection, piece)
    found = {
        (tenant, call): rest
        for tenant, call, *rest in rows(
            connection,
            "SELECT tenant, call, state, attempts, posted_micro, held_micro, agent, effect FROM calls",
        )
    }
    assert found.keys() == fold.calls.keys()
    for key, view in fold.calls.items():
        assert found[key] == [
            view.state, len(view.attempts), posted_micro(view), held_micro(view), view.request.principal,
            view.request.effect,
        ]  # fmt: skip
    assert {state for state, *_ in found.values()} >= {"completed", "in_doubt"}
    assert rows(connection, "SELECT count(*) FROM call_records") == [
        (sum(not isinstance(r, BudgetHead | Roster) for _, r in records),)
    ]
    doubt = rows(connection, "SELECT count(*), coalesce(sum(held_micro), 0) FROM in_doubt")[0]
    attempts = [a for v in fold.calls.values() for a in v.attempts if a.state == "in_doubt"]
    assert doubt == (len(attempts), sum(a.intent.max_cost_micro for a in attempts if a.held))
    spent = rows(
        connection, "SELECT sum(posted_micro), sum(calls), sum(attempts), sum(held_micro) FROM spend"
    )[0]
    views = fold.calls.values()
    assert spent == (
        sum(map(posted_micro, views)), len(views), sum(len(v.attempts) for v in views), sum(map(held_micro, views)),
    )  # fmt: skip
    budgets = {
        name: (unit, limit)
        for name, unit, limit in rows(connection, 'SELECT budget, unit, "limit" FROM budgets')
    }
    assert budgets["calls"] == ("calls", 40)
    found = {
        (tenant, budget, name): PeriodAccount(posted=posted, held=held, in_doubt=in_doubt, overrun=overrun)
        for tenant, budget, name, posted, held, in_doubt, overrun in rows(
            connection, "SELECT tenant, budget, name, posted, held, in_doubt, overrun FROM budget_periods"
        )
    }
    assert found == {
        (tenant, budget, name): account
        for (tenant, budget), periods in fold.accounts.items()
        for name, account in periods.items()
    }


def test_what_is_delivered_again_changes_nothing(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(5)
    first = ledger_rows.insert(connection, records)
    assert first.new == sum(not isinstance(r, Roster) for _, r in records)
    before = everything(connection)
    for _ in range(3):
        random.Random(5).shuffle(records)
        assert ledger_rows.insert(connection, records) == ledger_rows.Inserted(new=0, others=[])
    assert everything(connection) == before


def test_another_record_under_a_number_is_said_and_changes_nothing(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    records = history(5)
    ledger_rows.insert(connection, records)
    before = everything(connection)
    call = next(n for n, r in records if isinstance(r, Intent))
    head = next(n for n, r in records if isinstance(r, BudgetHead))
    others = [
        (n, replace(r, at_us=r.at_us + 1) if n in (call, head) else r)
        for n, r in records
        if not isinstance(r, Roster)
    ]
    assert sorted(ledger_rows.insert(connection, others).others) == sorted([call, head])
    assert everything(connection) == before


def everything(connection: duckdb.DuckDBPyConnection) -> list[Any]:
    return [
        rows(connection, f"SELECT * FROM {name} ORDER BY ALL")
        for name in ("call_records", "budget_heads", "calls", "spend")
    ]


def rebuild(
    connection: duckdb.DuckDBPyConnection, records: list[ledger_rows.Numbered], settled: int = 1 << 40
) -> dict[str, int]:
    ledger_rebuild.begin(connection)
    ledger_rows.insert_rebuilt(connection, records)
    return ledger_rebuild.end(connection, settled)


def test_a_rebuild_is_identical_and_says_so(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(7)
    ledger_rows.insert(connection, records)
    before = everything(connection)
    for _ in range(2):
        assert rebuild(connection, records) == {"call_records": 0, "budget_heads": 0}
        assert everything(connection) == before
    # The tables that were put in place take what comes again as those before them did.
    assert ledger_rows.insert(connection, records).new == 0


def test_a_rebuild_mends_what_differed_and_says_so(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(8)
    ledger_rows.insert(connection, records)
    before = everything(connection)
    changed = rows(
        connection, "UPDATE call_records SET cost_micro = cost_micro + 1 WHERE kind = 'completed'"
    )[0][0]
    assert rebuild(connection, records) == {"call_records": changed, "budget_heads": 0}
    assert everything(connection) == before
    connection.execute("DELETE FROM call_records WHERE kind = 'intent' AND sequence > 50")
    connection.execute(
        "INSERT INTO budget_heads SELECT * REPLACE (99999 AS sequence) FROM budget_heads LIMIT 1"
    )
    lost = sum(isinstance(r, Intent) and n > 50 for n, r in records)
    assert rebuild(connection, records) == {"call_records": lost, "budget_heads": 1}
    assert everything(connection) == before


def test_a_record_that_was_on_its_way_is_no_difference(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(9)
    ledger_rows.insert(connection, records[:100])
    assert rebuild(connection, records, settled=100) == {"call_records": 0, "budget_heads": 0}
    connection.execute("DELETE FROM call_records WHERE sequence BETWEEN 50 AND 150")
    lost = sum(not isinstance(r, BudgetHead | Roster) and 50 <= n <= 100 for n, r in records)
    assert rebuild(connection, records, settled=100) == {"call_records": lost, "budget_heads": 0}


def test_what_comes_while_it_is_rebuilt_is_in_both(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(10)
    ledger_rows.insert(connection, records[:200])
    ledger_rebuild.begin(connection)
    ledger_rows.insert_rebuilt(connection, records[:150])
    ledger_rows.insert(connection, records[150:])
    assert ledger_rebuild.end(connection, 150) == {"call_records": 0, "budget_heads": 0}
    before = everything(connection)
    assert rebuild(connection, records) == {"call_records": 0, "budget_heads": 0}
    assert everything(connection) == before


def test_a_rebuild_that_was_cut_short_leaves_nothing(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(9)
    ledger_rows.insert(connection, records)
    before = everything(connection)
    ledger_rebuild.begin(connection)
    ledger_rows.insert_rebuilt(connection, records[:10])
    assert rebuild(connection, records) == {"call_records": 0, "budget_heads": 0}
    assert everything(connection) == before
    ledger_rebuild.begin(connection)
    ledger_rebuild.drop(connection)
    assert not ledger_rows.is_rebuilding(connection)


DAY_US = 86_400_000_000
MONDAY_US = 1_796_000_000_000_000 // DAY_US * DAY_US


def by_hand() -> list[ledger_rows.Numbered]:
    """Two tenants with a call of one id; a call over midnight that cost more than it had reserved; doubts."""

    def request(agent: str, model: str | None = None, task: str | None = None) -> CallRequest:
        return CallRequest(
            callee="chat", effect="cost_bearing", principal=agent, fingerprint="0" * 64, model=model, task=task,
            traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        )  # fmt: skip

    def of(call: str, tenant: str, attempt: int, day: float) -> dict[str, Any]:
        at_us = MONDAY_US + int(day * DAY_US)
        return {"call": call, "tenant": tenant, "attempt": attempt, "owner": "g", "epoch": 1, "at_us": at_us}

    broken = CallError(type="connection", message="reset")
    usage = CallUsage(input_tokens=7, output_tokens=3, source="counted")
    records = [
        Intent(
            **of("c1", "x", 1, 0.9), request=request("a", "m", "mail"), lease_until_us=1, max_cost_micro=20
        ),
        AttemptFailed(**of("c1", "x", 1, 0.95), error=broken, may_have_applied=True),
        Intent(
            **of("c1", "x", 2, 0.99), request=request("a", "m", "mail"), lease_until_us=1, max_cost_micro=20
        ),
        Completed(**of("c1", "x", 2, 1.1), outcome=CallOutcome(partial=True), usage=usage, cost_micro=32),
        Intent(**of("c1", "y", 1, 1.0), request=request("a"), lease_until_us=1, max_cost_micro=5),
        Completed(**of("c1", "y", 1, 1.0), outcome=CallOutcome(), cost_micro=4),
        Intent(**of("c2", "x", 1, 1.5), request=request("b", "m"), lease_until_us=1, max_cost_micro=50),
        InDoubt(**of("c2", "x", 1, 1.6), error=broken),
        Intent(**of("c3", "x", 1, 1.7), request=request("b", "m"), lease_until_us=1, max_cost_micro=60),
        Intent(**of("c4", "x", 1, 1.7), request=request("b", "n"), lease_until_us=1, max_cost_micro=9),
        AttemptFailed(**of("c4", "x", 1, 1.75), error=broken, may_have_applied=True),
        InDoubt(**of("c4", "x", 1, 1.8), error=broken),
    ]
    fold = Fold()
    for record in records:
        fold.take(record)
    assert [v.state for v in fold.calls.values()] == [
        "completed",
        "completed",
        "in_doubt",
        "open",
        "in_doubt",
    ]
    return list(enumerate(records, 1))


def test_spending_by_day_agent_model_and_task(connection: duckdb.DuckDBPyConnection) -> None:
    ledger_rows.insert(connection, by_hand())
    monday, tuesday = (datetime.fromtimestamp((MONDAY_US + n * DAY_US) / 1e6, UTC).date() for n in (0, 1))
    columns = (
        "agent, model, task, day, calls, attempts, posted_micro, held_micro, in_doubt_micro, overrun_micro"
    )
    # Each attempt on the day of its intent, whenever it ended; what was given back holds nothing, in doubt or not.
    assert rows(connection, f"SELECT {columns} FROM spend WHERE tenant = 'x' ORDER BY ALL") == [
        ("a", "m", "mail", monday, 1, 2, 32, 0, 0, 12),
        ("b", "m", None, tuesday, 2, 2, 0, 110, 50, 0),
        ("b", "n", None, tuesday, 1, 1, 0, 0, 0, 0),
    ]
    assert rows(connection, "SELECT posted_micro, calls FROM spend WHERE tenant = 'y'") == [(4, 1)]
    assert rows(connection, "SELECT call, held_micro, since::DATE FROM in_doubt ORDER BY call") == [
        ("c2", 50, tuesday), ("c4", 0, tuesday),
    ]  # fmt: skip
    [call] = rows(
        connection,
        "SELECT state, attempts, posted_micro, held_micro, overrun_micro, input_tokens, output_tokens, error_type, "
        "trace_id FROM calls WHERE tenant = 'x' AND call = 'c1'",
    )
    assert call == ("completed", 2, 32, 0, 12, 7, 3, None, "a" * 32)
    attempts = "SELECT attempt, state, error_type, partial, usage_source FROM call_attempts "
    assert rows(connection, attempts + "WHERE tenant = 'x' AND call = 'c1' ORDER BY attempt") == [
        (1, "attempt_failed", "connection", False, None), (2, "completed", None, True, "counted"),
    ]  # fmt: skip
    history = "SELECT attempt, kind, reserved_micro, cost_micro FROM call_history "
    assert rows(connection, history + "WHERE tenant = 'x' AND call = 'c1' ORDER BY sequence") == [
        (1, "intent", 20, None), (1, "attempt_failed", None, None), (2, "intent", 20, None), (2, "completed", None, 32),
    ]  # fmt: skip


def test_a_period_that_its_head_has_forgotten_is_still_told(connection: duckdb.DuckDBPyConnection) -> None:
    def head(at: int, **periods: PeriodAccount) -> BudgetHead:
        named = {name.removeprefix("d").replace("_", "-"): account for name, account in periods.items()}
        return BudgetHead(
            tenant="x", budget="b", unit="calls", limit=at, period="day", periods=named, at_us=at
        )

    ledger_rows.insert(
        connection,
        [
            (1, head(1, d2026_11_01=PeriodAccount(posted=3, held=2))),
            (2, head(2, d2026_11_01=PeriodAccount(posted=5), d2026_11_02=PeriodAccount(held=1, in_doubt=1))),
            (3, head(3, d2026_11_02=PeriodAccount(posted=1, overrun=1), d2026_11_03=PeriodAccount())),
        ],
    )
    columns = 'name, posted, held, in_doubt, overrun, "limit"'
    assert rows(connection, f"SELECT {columns} FROM budget_periods ORDER BY name") == [
        ("2026-11-01", 5, 0, 0, 0, 2), ("2026-11-02", 1, 0, 0, 1, 3), ("2026-11-03", 0, 0, 0, 0, 3),
    ]  # fmt: skip
    assert rows(connection, 'SELECT "limit", sequence FROM budgets') == [(3, 3)]
