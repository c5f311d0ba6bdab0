"""The matrix as a command: every crash point × effect × mood of the callee, and the page of what was seen.

`python -m tests.gateway.matrix --out docs/gateway-matrix.md` takes some twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import uvloop

from tests.bench.machine import describe
from tests.gateway.invariants import violations
from tests.gateway.matrix_page import Cell, Sweep, page
from tests.gateway.matrix_world import POINTS, Point, Row, run_world


class Plan(NamedTuple):
    """One world of the sweep."""

    point: Point
    seed: int
    gateways: int
    broker: bool

    def __str__(self) -> str:
        with_ = ("two gateways" if self.gateways > 1 else "one gateway") + (
            ", broker killed" if self.broker else ""
        )
        return f"{self.point.name}, {with_}, seed {self.seed}"


def plans(seeds: int, points: str) -> list[Plan]:
    """Each point with one gateway, with two, and with the broker killed as well; each with every seed."""
    chosen = [p for p in POINTS if points in p.name]
    return [
        Plan(point, seed, gateways, broker)
        for seed in range(1, seeds + 1)
        for point in chosen
        for gateways, broker in ((1, False), (2, False), (1, True))
        if point.how in ("hold", "pass", "recovery") or not broker
        if point.how != "pause" or gateways == 1
    ]


async def sweep(todo: list[Plan], at_once: int, save: Callable[[Sweep], None]) -> Sweep:
    """Run all worlds, some at the same time, with a line for each; `save` gets what was seen so far after each."""
    places = asyncio.Semaphore(at_once)
    found = Sweep(
        planned=len(todo), worlds=0, calls=0, died=0, cells=defaultdict(Cell), counts=Counter(), wrong=[]
    )
    began = time.monotonic()

    async def one(plan: Plan) -> None:
        async with places:
            with tempfile.TemporaryDirectory(prefix="headrace-matrix-", ignore_cleanup_errors=True) as folder:
                try:
                    witness, rows, died = await run_world(
                        plan.point, Path(folder), seed=plan.seed, gateways=plan.gateways, broker=plan.broker,
                        rebuild=True,
                    )  # fmt: skip
                except Exception as e:  # noqa: BLE001  (a world that breaks is told, and the others go on)
                    found.wrong.append(f"{plan}: {type(e).__name__}: {str(e)[:300]}")
                    print(f"BROKEN {found.wrong[-1]}", flush=True)
                    return
        counts, wrong = violations(witness)
        found.worlds += 1
        found.calls += len(rows)
        found.died += died
        found.counts.update(counts)
        found.wrong.extend(f"{plan}: {sentence}" for sentence in wrong)
        for row in rows:
            _add(found.cells[plan.point.name, row.effect, row.behaviour], row)
        states = Counter(row.state for row in rows)
        print(
            f"{found.worlds:3}/{len(todo)} {time.monotonic() - began:6.0f} s  {plan}: died there {died}×, "
            + ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
            + "".join(f"\n     WRONG {sentence}" for sentence in wrong),
            flush=True,
        )
        found.took_s = time.monotonic() - began
        save(found)

    await asyncio.gather(*map(one, todo))
    return found


def _add(cell: Cell, row: Row) -> None:
    cell.states[row.state] += 1
    cell.heard.append(row.heard)
    cell.acted.append(row.acted)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the page is written; without it nothing is")
    parser.add_argument("--seeds", type=int, default=2, help="worlds of each kind (2)")
    parser.add_argument("--points", default="", help="only points whose name has this in it")
    parser.add_argument("--at-once", type=int, default=6, help="worlds at the same time (6)")
    given = parser.parse_args()
    # A shell ignores SIGINT for what it runs in the background; either signal ends the worlds in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("headrace").setLevel(logging.ERROR)  # brokers that go away are what is wanted here
    machine = describe("not used")
    todo = plans(given.seeds, given.points)
    print(f"{len(todo)} worlds, {given.at_once} at a time", flush=True)

    def save(found: Sweep) -> None:
        if given.out:
            given.out.write_text(page(found, machine, POINTS), "utf-8")

    found = uvloop.run(sweep(todo, given.at_once, save))
    print(
        f"{found.worlds} worlds, {found.calls} calls, {found.died} deaths at a point, {len(found.wrong)} violations"
    )
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
