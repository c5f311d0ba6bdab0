"""Turns of items that run apart: one at a time, the newest first, and only when the engine is empty."""

from __future__ import annotations

import asyncio

import pytest

from headrace.inference_worker.apart import Apart

pytestmark = pytest.mark.anyio


class Thing:
    """Stands for an item: its order is all that a queue asks of it."""

    def __init__(self, order_us: int) -> None:
        self.order_us = order_us


class World:
    """An engine that is free or not, and a log of what happened."""

    def __init__(self) -> None:
        self.free = True
        self.cleared: set[int] = set()
        self.log: list[str] = []
        self.running = 0
        self.known: set[int] = set()
        self.apart = Apart(
            must=lambda item: item.order_us not in self.known,
            is_free=lambda: self.free and not self.running,
            is_cleared=self._is_cleared,
            release=lambda item: self.log.append(f"released {item.order_us}"),
            run=self._run,
            resume=lambda: self.log.append("resumed"),
        )

    async def _is_cleared(self, item: Thing) -> bool:
        await asyncio.sleep(0)
        return item.order_us in self.cleared

    async def _run(self, item: Thing) -> None:
        assert not self.running, "one at a time"
        assert self.apart.on_trial, "nothing else may start"
        self.running += 1
        await asyncio.sleep(0)
        self.log.append(f"ran {item.order_us}")
        self.running -= 1

    async def rest(self) -> None:
        for _ in range(200):
            await asyncio.sleep(0)


async def test_the_newest_runs_first_and_then_all_goes_on() -> None:
    world = World()
    for order in (3, 9, 1):
        world.apart.add(Thing(order))
    assert world.apart.busy
    await world.rest()
    assert world.log == ["ran 9", "resumed", "ran 3", "resumed", "ran 1", "resumed", "resumed"]
    assert not world.apart.busy
    world.apart.add(Thing(4))
    await world.rest()
    assert world.log[-3:] == ["ran 4", "resumed", "resumed"], "and again"


async def test_nothing_runs_before_the_engine_is_empty() -> None:
    world = World()
    world.free = False
    world.apart.add(Thing(1))
    await world.rest()
    assert world.log == []
    assert world.apart.busy
    world.apart.look()
    await world.rest()
    assert world.log == [], "a look changes nothing by itself"
    world.free = True
    world.apart.look()
    await world.rest()
    assert world.log == ["ran 1", "resumed", "resumed"]


async def test_who_is_cleared_meanwhile_is_released() -> None:
    world = World()
    world.cleared = {3, 2}
    for order in (1, 2, 3):
        world.apart.add(Thing(order))
    await world.rest()
    assert world.log == ["released 3", "released 2", "ran 1", "resumed", "resumed"]


async def test_who_is_known_to_be_cleared_is_released_before_anything_runs() -> None:
    world = World()
    world.free = False
    for order in (1, 2, 3):
        world.apart.add(Thing(order))
    await world.rest()
    world.known = {1, 2}
    world.apart.look()
    await world.rest()
    assert world.log == ["released 1", "released 2"], "though the engine is not empty"
    world.free = True
    world.apart.look()
    await world.rest()
    assert world.log[2:] == ["ran 3", "resumed", "resumed"]


async def test_what_is_dropped_or_taken_does_not_run() -> None:
    world = World()
    world.free = False
    things = [Thing(n) for n in range(4)]
    for thing in things:
        world.apart.add(thing)
    await world.rest()
    world.apart.drop(things[3])
    assert things[3] not in world.apart
    assert set(world.apart.take_all()) == set(things[:3])
    await world.rest()
    assert world.log == ["resumed"]
    assert not world.apart.busy


async def test_one_that_is_dropped_while_it_is_asked_about_does_not_run() -> None:
    world = World()
    thing = Thing(1)
    world.apart.add(thing)
    await asyncio.sleep(0)  # it is being asked about
    world.apart.drop(thing)
    await world.rest()
    assert world.log == ["resumed"]
