"""Ledgers for tests of the projection: written by the gateways of a small world, stored in the real stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from headrace.completion.ledger_rows import Numbered
from headrace.contracts.ledger import BudgetHead, Roster
from headrace.gateway.ledger import Entry, StreamLedger
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import consumer_info, stream_info
from headrace.mesh.publisher import publish_all
from tests.completion.world import sql, until
from tests.property.ledger_world import EFFECTS, MODES, World

TABLES = ("call_records", "budget_heads")


def history(seed: int, asked: int = 40) -> list[Numbered]:
    """The ledger of some lives of two gateways that have asked for `asked` calls."""
    world = World(seed, limit=asked)
    rng = random.Random(seed)
    for n in range(asked):
        world.mode = rng.choice(MODES)
        world.ask(rng.choice(EFFECTS), f"k{rng.randrange(asked)}-{n % 3}")
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


async def made(seed: int, asked: int = 40) -> list[Numbered]:
    """`history`, from where a loop runs already."""
    return await asyncio.to_thread(history, seed, asked)


async def store(mesh: Mesh, records: Sequence[Numbered]) -> None:
    """Store records as they are, in their order."""
    ledger = StreamLedger(mesh)
    messages = [ledger._message(Entry(record, 0)) for _, record in records]
    for start in range(0, len(messages), 500):
        await publish_all(mesh, mesh.topology.ledger, messages[start : start + 500])


async def acked(mesh: Mesh) -> bool:
    """Whether all of the ledger is projected and acked."""
    spec = mesh.topology.ledger_consumer()
    last = (await stream_info(mesh, spec.stream))["state"]["last_seq"]
    info = await consumer_info(mesh, spec.stream, spec.durable)
    return info["ack_floor"]["stream_seq"] == last and info["num_ack_pending"] == 0


async def projected(mesh: Mesh, timeout_s: float = 30.0) -> None:
    """Return when all of the ledger is."""
    await until(lambda: acked(mesh), timeout_s)


async def counts(mesh: Mesh) -> tuple[int, int]:
    """Rows of both tables, of which none has the sequence of another."""
    found = []
    for table in TABLES:
        [[rows, distinct]] = await sql(mesh, f"SELECT count(*), count(DISTINCT sequence) FROM {table}")
        assert rows == distinct
        found.append(rows)
    return found[0], found[1]


def expected(records: Sequence[Numbered]) -> tuple[int, int]:
    """What `counts` has to be."""
    heads = sum(isinstance(r, BudgetHead) for _, r in records)
    return len(records) - heads - sum(isinstance(r, Roster) for _, r in records), heads


async def contents(mesh: Mesh) -> list[list[Any]]:
    """Sums over every column of both tables, and the calls."""
    sums = [await sql(mesh, f"SELECT count(*), sum(hash(t)) FROM {table} AS t") for table in TABLES]
    return [*sums, await sql(mesh, "SELECT * FROM calls ORDER BY last_sequence")]
