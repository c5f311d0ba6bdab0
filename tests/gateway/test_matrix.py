"""Every crash point × effect × mood of the callee, in real processes: the invariants hold at rest.

A world for each point: all calls are at it when its gateway dies. A world mostly waits (for time-outs, leases and
redelivery), so some run at the same time. `python -m tests.gateway.matrix` does the same with several seeds, two
gateways, and the broker killed as well.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from headrace.contracts.ledger import EFFECTS
from tests.gateway.invariants import check
from tests.gateway.matrix_world import BEHAVIOURS, POINTS, Point, run_world

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.slow]

AT_ONCE = 3
GROUPS = [POINTS[n::6] for n in range(6)]


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.mark.parametrize(
    "points", GROUPS, ids=lambda points: "+".join(p.name.replace(", ", "-") for p in points)
)
async def test_killed_there_every_invariant_holds(tmp_path: Path, points: tuple[Point, ...]) -> None:
    await asyncio.gather(*(whole(point, tmp_path / str(n)) for n, point in enumerate(points)))


async def whole(point: Point, folder: Path) -> None:
    witness, rows, died_there = await run_world(point, folder)
    counts = check(witness)
    assert len(rows) == len(EFFECTS) * len(BEHAVIOURS)
    assert {row.state for row in rows} <= {"completed", "failed", "in_doubt"}
    assert all(counts[n] for n in (1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 14, 15, 17)), (point.name, counts)
    if point.how in ("hold", "pass", "recovery"):
        assert died_there, f"nobody came to {point.name}"
    if point.how == "pause":
        assert counts[13], "nobody was fenced"
