"""The ledger's tables against the fold of the same records: any order, any repetition, and all of it anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import duckdb
import pytest

from headrace.completion import ledger_rows
from headrace.completion.ledger_schema import LEDGER_STEP
from headrace.contracts.account import Fold
from headrace.contracts.ledger import BudgetHead, Roster
from headrace.gateway.answers import held_micro, posted_micro
from tests.property.ledger_world import EFFECTS, MODES, World


@pytest.fixture
def connection(tmp_path: Path) -> duckdb.DuckDBPyConnection:
    made = duckdb.connect(str(tmp_path / "x.duckdb"))
    for statement in LEDGER_STEP:
        made.execute(statement)
    return made


def history(seed: int) -> list[ledger_rows.Numbered]:
    """The ledger of some lives of two gateways."""
    world = World(seed, limit=40)
    rng = random.Random(seed)
    for n in range(40):
        world.mode = rng.choice(MODES)
        world.ask(rng.choice(EFFECTS), f"k{rng.randrange(30)}-{n % 3}")
        world.deliver()
        world.turns(rng.randrange(12))
        if rng.random() < 0.2:
            world.crash(rng.choice(world.names))
    world.settle()
    for gateway in world.gateways.values():
        gateway.die()
    world.turns(2)
    world.loop.close()
    return list(enumerate(world.ledger.log, 1))


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
    views = [v for v in fold.calls.values() if v.state == "in_doubt"]
    assert doubt == (len(views), sum(held_micro(v) for v in views))
    spent = rows(connection, "SELECT sum(posted_micro), sum(calls) FROM spend")[0]
    assert spent == (sum(posted_micro(v) for v in fold.calls.values()), len(fold.calls))
    budgets = {
        name: (unit, limit)
        for name, unit, limit in rows(connection, 'SELECT budget, unit, "limit" FROM budgets')
    }
    assert budgets["calls"] == ("calls", 40)


def test_a_rebuild_is_identical_and_says_so(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(7)
    ledger_rows.insert(connection, records)
    before = rows(connection, "SELECT * FROM calls ORDER BY ALL")
    ledger_rows.begin_rebuild(connection)
    ledger_rows.insert(connection, records, suffix="_new")
    assert ledger_rows.end_rebuild(connection) == {"call_records": True, "budget_heads": True}
    assert rows(connection, "SELECT * FROM calls ORDER BY ALL") == before


def test_a_rebuild_mends_what_differed_and_says_so(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(8)
    ledger_rows.insert(connection, records)
    before = rows(connection, "SELECT * FROM calls ORDER BY ALL")
    connection.execute("UPDATE call_records SET cost_micro = cost_micro + 1 WHERE kind = 'completed'")
    ledger_rows.begin_rebuild(connection)
    ledger_rows.insert(connection, records, suffix="_new")
    assert ledger_rows.end_rebuild(connection) == {"call_records": False, "budget_heads": True}
    assert rows(connection, "SELECT * FROM calls ORDER BY ALL") == before


def test_a_rebuild_that_begins_again_starts_from_nothing(connection: duckdb.DuckDBPyConnection) -> None:
    records = history(9)
    ledger_rows.begin_rebuild(connection)
    ledger_rows.insert(connection, records[:10], suffix="_new")
    ledger_rows.begin_rebuild(connection)
    ledger_rows.insert(connection, records, suffix="_new")
    ledger_rows.end_rebuild(connection)
    assert rows(connection, "SELECT count(*) FROM call_records")[0][0] > 10
