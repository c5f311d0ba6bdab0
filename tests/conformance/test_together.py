"""Many at once, cancelling, and stopping."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.contracts.generation import StructuredOutput
from headrace.inference_worker.engines.protocol import Engine, EngineDied, ItemFailed
from headrace.inference_worker.engines.registry import create_engine
from tests.conformance.conftest import Holder, ask, ids, work
from tests.conformance.kinds import Kind

pytestmark = pytest.mark.anyio


async def test_many_at_once_each_get_their_own(kind: Kind, engine: Engine) -> None:
    """More than there are slots. Where the text is free it is forced, so that every answer is known."""
    names = [f"item-{i}" for i in range(kind.many)]
    if "choice" in kind.structured:
        forced = [StructuredOutput(choice=[name]) for name in names]
        items = [work("Which?", max_tokens=16, structured_outputs=one) for one in forced]
        outputs = await asyncio.gather(*(ask(engine, item) for item in items))
        assert [o.choices[0].text for o in outputs] == names
        return
    alone = [(await ask(engine, work(name, max_tokens=16))).choices[0].text for name in names[:5]]
    outputs = await asyncio.gather(*(ask(engine, work(name, max_tokens=16)) for name in names))
    assert [o.choices[0].text for o in outputs[:5]] == alone
    if not kind.samples:
        assert [o.choices[0].text for o in outputs] == names


async def test_two_items_of_one_id_do_not_mix(kind: Kind, engine: Engine) -> None:
    first = work(ids(*range(5, 25)), max_tokens=3, name="twin", ignore_eos=True)
    second = work(ids(*range(5, 25)), max_tokens=7, name="twin", ignore_eos=True)
    a, b = await asyncio.gather(ask(engine, first), ask(engine, second))
    assert (a.usage.completion_tokens, b.usage.completion_tokens) == (3, 7)


async def test_bad_items_leave_the_good_alone(kind: Kind, engine: Engine) -> None:
    """B1 and B2 at once: too long, and outside the vocabulary, between good ones."""
    info = engine.info
    items = [work(ids(5, 6, 7), max_tokens=3, ignore_eos=True) for _ in range(8)]
    items.insert(3, work(ids(*[5] * (info.max_model_len + 1))))
    items.insert(6, work(ids(5, info.vocab_size)))

    async def one(item):
        return await ask(engine, item)

    results = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    types = [r.error.type if isinstance(r, ItemFailed) else "ok" for r in results]
    assert types == ["ok"] * 3 + ["too_long"] + ["ok"] * 2 + ["invalid_token"] + ["ok"] * 3


async def _running(engine: Engine, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while engine.stats()["running"] == 0 and time.monotonic() < until:
        await asyncio.sleep(0.005)


async def test_cancelling_frees_the_engine(kind: Kind, engine: Engine) -> None:
    """S4: with every slot taken by long items, cancelled, a short one is answered at once."""
    prompt = ids(*range(5, 15))
    fillers = [
        asyncio.create_task(ask(engine, work(prompt, max_tokens=kind.filler, ignore_eos=True)))
        for _ in range(engine.info.slots + 2)
    ]
    await _running(engine)
    assert engine.stats()["running"] > 0
    began = time.monotonic()
    for task in fillers:
        task.cancel()
    results = await asyncio.gather(*fillers, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    assert time.monotonic() - began < 2
    while engine.stats()["running"] and time.monotonic() - began < 5:
        await asyncio.sleep(0.01)
    assert engine.stats()["running"] == 0
    assert engine.stats().get("waiting", 0) == 0
    output = await asyncio.wait_for(ask(engine, work(prompt, max_tokens=2, ignore_eos=True)), 5)
    assert output.usage.completion_tokens == 2


async def test_a_cancelled_neighbour_changes_nothing(engine: Engine) -> None:
    gone = asyncio.create_task(ask(engine, work(ids(*range(5, 25)), max_tokens=300, ignore_eos=True)))
    stays = asyncio.create_task(ask(engine, work(ids(*range(5, 25)), max_tokens=10, ignore_eos=True)))
    await _running(engine)
    gone.cancel()
    output = await stays
    assert output.usage.completion_tokens == 10
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_stop_ends_what_is_pending(kind: Kind, holder: Holder, engine: Engine) -> None:
    """Last of its kind: it stops the session's engine, and the next test would make a new one."""
    prompt = ids(*range(5, 15))
    item = engine.prepare(work(prompt, max_tokens=kind.filler, ignore_eos=True))
    pending = [asyncio.create_task(engine.run(item)) for _ in range(engine.info.slots + 2)]
    await _running(engine)
    await holder.drop()
    results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 10)
    assert all(isinstance(r, EngineDied) for r in results), results
    await engine.stop()
    with pytest.raises(EngineDied):
        await engine.run(item)


async def test_a_new_engine_after_a_stopped_one(kind: Kind, holder: Holder, model) -> None:
    """What the worker does after a death: another engine of the same options, in the same process."""
    if not kind.restarts:
        pytest.skip("its process takes too long to load twice; vllm-step covers the shared code")
    await holder.drop()
    engine = await holder.running()
    assert (await ask(engine, work(ids(5, 6), max_tokens=2, ignore_eos=True))).choices


async def test_run_before_start_is_a_dead_engine(kind: Kind, model) -> None:
    engine = create_engine(kind.engine, kind.options(model))
    with pytest.raises(EngineDied):
        await engine.run(work(ids(5, 6)))
    await engine.stop()
