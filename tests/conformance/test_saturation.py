"""How full continuous refill keeps the batch, by step counts: they are free of timing noise (VLLM's and sim's alike).

512 items of log-normal length, 64 sequences: a window of 72 in flight, refilled one by one, must take as many steps as
the same items all handed over at once; a small window or a barrier must not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import Engine, Work
from headrace.inference_worker.engines.registry import create_engine
from tests.conformance.conftest import ids, work
from tests.conformance.kinds import VLLM_STEP
from tests.models.tiny_llama import make_tiny_llama

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

SEQS = 64
WINDOW = 72  # 1.125 x SEQS: what a worker sends to an engine that queues


def _engines() -> list[Any]:
    found = [pytest.param("sim", id="sim")]
    if find_spec("vllm") is not None:
        found.append(pytest.param("vllm", id="vllm-step", marks=pytest.mark.vllm))
    return found


@pytest.fixture(scope="module", params=_engines())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def loaded(
    name: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[Engine]:
    if name == "sim":
        options = EngineOptions(slots=SEQS, context=512, extra={"time_scale": "0"})
    else:
        options = VLLM_STEP.options(make_tiny_llama(Path(tmp_path_factory.mktemp("tiny"))))
    engine = create_engine(name, options)
    await engine.start()
    yield engine
    await engine.stop()


def _items(count: int = 512) -> list[Work]:
    rng = random.Random(20)
    lengths = [min(128, max(1, round(rng.lognormvariate(3.4, 0.8)))) for _ in range(count)]
    return [work(ids(*rng.choices(range(5, 255), k=12)), max_tokens=n, ignore_eos=True) for n in lengths]


async def _steps(engine: Engine, run: Any) -> int:
    before = engine.stats()["steps"]
    await run
    return engine.stats()["steps"] - before


async def _window(engine: Engine, size: int) -> None:
    items = iter([engine.prepare(item) for item in _items()])

    async def one() -> None:
        for item in items:
            await engine.run(item)

    await asyncio.gather(*(one() for _ in range(size)))


async def _barrier(engine: Engine, size: int) -> None:
    items = [engine.prepare(item) for item in _items()]
    for at in range(0, len(items), size):
        await asyncio.gather(*(engine.run(item) for item in items[at : at + size]))


async def test_refill_keeps_the_batch_as_full_as_preloading(loaded: Engine) -> None:
    preloaded = await _steps(loaded, _window(loaded, 512))
    refilled = await _steps(loaded, _window(loaded, WINDOW))
    coupled = await _steps(loaded, _barrier(loaded, SEQS))
    small = await _steps(loaded, _window(loaded, 32))
    print(
        f"steps: preloaded {preloaded}, window {WINDOW} {refilled}, window 32 {small}, barrier {SEQS} {coupled}"
    )
    assert refilled <= preloaded * 1.02
    assert small > preloaded * 1.5
    assert coupled > preloaded * 2
