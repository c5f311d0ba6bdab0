"""The faults of `sim`: each does what its name says, to whom it says, and none is on by itself."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import Any

import pytest

from headrace.contracts.generation import Generation
from headrace.contracts.messages import TextPrompt, TokenPrompt
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import Engine, EngineDied, OutOfMemory, Work
from headrace.inference_worker.engines.registry import create_engine
from headrace.inference_worker.engines.sim import SimEngine

pytestmark = pytest.mark.anyio


async def started(seed: int = 0, **extra: str) -> Engine:
    engine = create_engine("sim", EngineOptions(slots=8, seed=seed, extra={"time_scale": "0", **extra}))
    await engine.start()
    return engine


def work(
    engine: Engine, prompt: str | list[int], *, id_: str = "j/0@1.1.1", attempt: int = 1, **more: Any
) -> Work:
    shown = TextPrompt(text=prompt) if isinstance(prompt, str) else TokenPrompt(ids=prompt)
    return engine.prepare(
        Work(
            id=id_, prompt=shown, params=Generation(), max_tokens=more.get("max_tokens", 32), attempt=attempt
        )
    )


async def test_none_is_on_by_itself() -> None:
    engine = await started()
    assert isinstance(engine, SimEngine)
    assert not engine._faults.any
    assert (await engine.run(work(engine, "poison hang freeze segfault"))).choices


@pytest.mark.parametrize(("marker", "prompt"), [("POISON", "a POISON pill"), ("7 9", [5, 7, 9, 5])])
async def test_poison_kills_the_engine_and_all_that_is_in_it(marker: str, prompt: str | list[int]) -> None:
    engine = await started(poison=marker)
    good = [asyncio.create_task(engine.run(work(engine, f"good {i}", max_tokens=4_000))) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(EngineDied, match="as poison asked"):
        await engine.run(work(engine, prompt))
    for neighbour in good:
        with pytest.raises(EngineDied, match="as poison asked"):
            await neighbour
    with pytest.raises(EngineDied):
        await engine.run(work(engine, "later"))


async def test_poison_that_waits_for_a_slot_kills_nobody() -> None:
    engine = await started(poison="POISON", max_model_len="100000", capacity_tokens="1000")
    long = asyncio.create_task(engine.run(work(engine, "x" * 400, max_tokens=850)))
    await asyncio.sleep(0)
    poison = asyncio.create_task(engine.run(work(engine, "POISON" * 20, max_tokens=200)))
    assert (await long).choices
    with pytest.raises(EngineDied):
        await poison


async def test_hang_makes_no_more_tokens_until_a_stop() -> None:
    engine = await started(hang="HANG")
    hung = asyncio.create_task(engine.run(work(engine, "HANG here")))
    other = asyncio.create_task(engine.run(work(engine, "good", max_tokens=4_000)))
    for _ in range(50):
        await asyncio.sleep(0)
    made = engine.tokens_generated()
    for _ in range(200):
        await asyncio.sleep(0)
    assert engine.tokens_generated() == made
    assert not hung.done()
    assert not other.done()
    await engine.stop()
    for run in (hung, other):
        with pytest.raises(EngineDied):
            await run


async def test_memory_that_is_short_beside_others_is_enough_alone() -> None:
    engine = await started(oom_tokens="300")
    large = work(engine, "x" * 400, max_tokens=400)
    beside = asyncio.create_task(engine.run(work(engine, "good", max_tokens=250)))
    await asyncio.sleep(0)
    with pytest.raises(OutOfMemory):
        await engine.run(large)
    assert (await beside).choices, "its neighbour goes on"
    assert (await engine.run(large)).choices
    never = await started(oom_tokens="300", oom_always="true")
    with pytest.raises(OutOfMemory):
        await never.run(work(never, "x" * 400, max_tokens=400))
    assert (await never.run(work(never, "small", max_tokens=20))).choices


async def test_a_share_fails_on_its_first_try_and_the_same_ones_each_time() -> None:
    async def failing(seed: int, attempt: int) -> set[int]:
        engine = await started(seed, fail_share="0.3")
        found: set[int] = set()
        for i in range(200):
            try:
                await engine.run(
                    work(engine, "x", id_=f"j/{i}@1.{i}.{attempt}", attempt=attempt, max_tokens=1)
                )
            except RuntimeError as e:
                assert "as fail_share asked" in str(e)  # noqa: PT017
                found.add(i)
        return found

    first = await failing(1, 1)
    assert 30 <= len(first) <= 90
    assert await failing(1, 1) == first
    assert await failing(2, 1) != first
    assert await failing(1, 2) == set()


def test_segfault_ends_the_process_and_leaves_a_trace() -> None:
    code = """
import asyncio, faulthandler
faulthandler.enable()
from headrace.contracts.generation import Generation
from headrace.contracts.messages import TextPrompt
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import Work
from headrace.inference_worker.engines.registry import create_engine
async def main():
    engine = create_engine("sim", EngineOptions(extra={"segfault": "SEGV"}))
    await engine.start()
    prompt = TextPrompt(text="a SEGV here")
    await engine.run(engine.prepare(Work(id="w", prompt=prompt, params=Generation(), max_tokens=1)))
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
