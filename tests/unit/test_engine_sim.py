"""The sim engine: its arithmetic, its scheduler, and that both repeat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contracts.generation import Generation
from headrace.contracts.messages import TextPrompt, TokenPrompt
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import EngineDied, Output, Work
from headrace.inference_worker.engines.sim import SimEngine
from headrace.inference_worker.engines.sim_model import (
    SimSettings,
    answer,
    digest,
    estimate_tokens,
    read_settings,
)
from headrace.inference_worker.engines.sim_scheduler import Scheduler

pytestmark = pytest.mark.anyio


def configured(
    slots: int | None = None, context: int | None = None, seed: int = 0, **extra: str
) -> SimSettings:
    return read_settings(EngineOptions(slots=slots, context=context, seed=seed, extra=extra))


def work(name: str, *, max_tokens: int = 32, **fields: Any) -> Work:
    return Work(id=name, prompt=TextPrompt(text=name), params=Generation(**fields), max_tokens=max_tokens)


def engine(**extra: str) -> SimEngine:
    return SimEngine(EngineOptions(slots=8, context=512, extra={"time_scale": "0", **extra}))


# --- arithmetic -------------------------------------------------------------------------------------
def test_a_step_takes_what_the_settings_say() -> None:
    s = configured(
        prefill_tokens_per_s="1000",
        step_ms="5",
        step_per_seq_ms="0.1",
        step_per_kv_token_us="2",
        time_scale="0",
    )
    assert s.step_seconds(prefill=100, decoding=0, kv_tokens=0) == pytest.approx(0.105)
    assert s.step_seconds(prefill=0, decoding=10, kv_tokens=1000) == pytest.approx(0.005 + 0.001 + 0.002)


def test_slots_and_context_go_before_the_settings_of_the_same_meaning() -> None:
    s = configured(slots=4, context=64, max_num_seqs="9", max_model_len="99")
    assert (s.max_num_seqs, s.max_model_len) == (4, 64)


def test_tokens_of_a_text_are_a_quarter_of_its_bytes() -> None:
    assert [estimate_tokens(t) for t in ("a", "abcd", "abcde", "éé")] == [1, 1, 2, 1]


def test_an_answer_repeats_and_differs_by_prompt_choice_and_seed() -> None:
    s, params = configured(), Generation()
    base = answer(s, digest("x"), params, 64, 0)
    assert base == answer(s, digest("x"), params, 64, 0)
    others = [
        answer(s, digest("y"), params, 64, 0),
        answer(s, digest("x"), params, 64, 1),
        answer(s, digest("x"), Generation(seed=5), 64, 0),
        answer(configured(seed=1), digest("x"), params, 64, 0),
    ]
    assert all(other.choice.text != base.choice.text for other in others)


@given(st.text(min_size=1, max_size=20), st.integers(1, 64), st.integers(0, 64))
def test_an_answer_keeps_its_bounds(prompt: str, max_tokens: int, min_tokens: int) -> None:
    params = Generation(min_tokens=min(min_tokens, max_tokens))
    made = answer(configured(), digest(prompt), params, max_tokens, 0)
    assert max(1, params.min_tokens) <= made.tokens <= max_tokens
    assert len(made.choice.text.split()) == made.tokens
    if made.choice.finish_reason == "stop":
        assert made.tokens <= max_tokens


def test_lengths_are_log_normal_around_the_median() -> None:
    s = configured(output_median="100", output_sigma="0.5")
    lengths = sorted(answer(s, digest(str(i)), Generation(), 10_000, 0).tokens for i in range(999))
    assert 90 < lengths[499] < 110
    assert 140 < lengths[840] < 190  # one sigma up: 100 * e^0.5 = 165


def test_a_stop_string_cuts_text_and_tokens() -> None:
    whole = answer(configured(), digest("x"), Generation(ignore_eos=True), 20, 0).choice.text
    third = whole.split()[2]
    made = answer(configured(), digest("x"), Generation(ignore_eos=True, stop=[third]), 20, 0)
    assert made.tokens == 3
    assert made.choice.text == whole[: whole.index(third)]
    assert made.choice.stop_reason == third


# --- the scheduler ----------------------------------------------------------------------------------
def drain(scheduler: Scheduler) -> list[tuple[int, Any]]:
    """Step until empty; (step, owner) of each that finished."""
    done: list[tuple[int, Any]] = []
    while scheduler.running or scheduler.waiting:
        step = scheduler.step()
        done += [(scheduler.steps, seq.owner) for seq in step.finished]
        assert scheduler.steps < 100_000
    return done


def test_the_first_token_comes_with_the_prefill() -> None:
    scheduler = Scheduler(configured())
    scheduler.add("a", prompt=10, max_tokens=3, remaining=3, priority=0)
    assert drain(scheduler) == [(3, "a")]
    assert scheduler.tokens == 3


def test_a_long_prompt_is_prefilled_in_chunks_beside_the_decoding() -> None:
    scheduler = Scheduler(configured(max_num_batched_tokens="10"))
    scheduler.add("short", prompt=2, max_tokens=6, remaining=6, priority=0)
    scheduler.step()
    scheduler.add("long", prompt=27, max_tokens=1, remaining=1, priority=0)
    # One token of each step goes to the decoding sequence: 27 = 3 x 9.
    assert drain(scheduler) == [(4, "long"), (6, "short")]


def test_admission_is_by_whole_size_and_nothing_is_put_back() -> None:
    """B5: five of a quarter of the cache each; four run, the fifth waits."""
    scheduler = Scheduler(configured(capacity_tokens="400"))
    for i in range(5):
        scheduler.add(i, prompt=50, max_tokens=50, remaining=10, priority=0)
    scheduler.step()
    assert (scheduler.running, scheduler.waiting, scheduler.reserved) == (4, 1, 400)
    assert [owner for _, owner in drain(scheduler)] == [0, 1, 2, 3, 4]


def test_no_more_sequences_than_seats() -> None:
    scheduler = Scheduler(configured(slots=2))
    for i in range(3):
        scheduler.add(i, prompt=1, max_tokens=5, remaining=5, priority=0)
    assert drain(scheduler) == [(5, 0), (5, 1), (10, 2)]


def test_lower_priority_numbers_run_first() -> None:
    scheduler = Scheduler(configured(slots=1))
    for name, priority in (("late", 5), ("first", -1), ("middle", 0)):
        scheduler.add(name, prompt=1, max_tokens=1, remaining=1, priority=priority)
    assert [owner for _, owner in drain(scheduler)] == ["first", "middle", "late"]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=25),
    st.sets(st.integers(0, 24), max_size=8),
    st.integers(1, 6),
)
def test_everything_is_given_back(items: list[tuple[int, int, int]], cancelled: set[int], seats: int) -> None:
    scheduler = Scheduler(configured(slots=seats, capacity_tokens="100", max_num_batched_tokens="16"))
    made = [scheduler.add(i, p, n, min(n, r + 1), 0) for i, (p, n, r) in enumerate(items)]
    finished: list[Any] = []
    for count in range(2000):
        if not scheduler.running and not scheduler.waiting:
            break
        finished += [seq.owner for seq in scheduler.step().finished]
        assert scheduler.reserved <= 100
        assert scheduler.running <= seats
        assert 0 <= scheduler.kv_tokens <= scheduler.reserved
        if count in cancelled and count < len(made):
            scheduler.remove(made[count])
            scheduler.remove(made[count])
    assert (scheduler.running, scheduler.waiting, scheduler.reserved, scheduler.kv_tokens) == (0, 0, 0, 0)
    assert len(set(finished)) == len(finished)
    assert set(finished) | {i for i in cancelled if i < len(items)} == set(
        range(len(items))
    ) | cancelled & set(range(len(items)))


# --- the engine -------------------------------------------------------------------------------------
async def ask(sim: SimEngine, item: Work) -> Output:
    return await sim.run(sim.prepare(item))


async def run_all(sim: SimEngine, count: int) -> list[str]:
    await sim.start()
    outputs = await asyncio.gather(*(ask(sim, work(f"item {i}")) for i in range(count)))
    return [o.choices[0].text for o in outputs]


async def test_two_runs_are_the_same_to_the_step() -> None:
    first, second = engine(), engine()
    assert await run_all(first, 50) == await run_all(second, 50)
    a, b = first.stats(), second.stats()
    assert a["steps"] == b["steps"]
    assert a["virtual_s"] == b["virtual_s"]
    assert a["mean_batch"] > 4
    assert (a["running"], a["waiting"], a["reserved_tokens"], a["kv_tokens"]) == (0, 0, 0, 0)
    await first.stop()
    await second.stop()


async def test_starved_time_grows_when_too_few_are_in_flight() -> None:
    full, thin = engine(), engine()
    await run_all(full, 40)
    await thin.start()
    for i in range(40):
        await ask(thin, work(f"item {i}"))
    assert thin.stats()["starved_s"] == pytest.approx(thin.stats()["virtual_s"])
    assert full.stats()["starved_s"] < full.stats()["virtual_s"] / 2
    await full.stop()
    await thin.stop()


async def test_time_scale_makes_it_take_its_time() -> None:
    sim = engine(time_scale="1", step_ms="5", step_per_seq_ms="0", prefill_tokens_per_s="1000000")
    await sim.start()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await ask(sim, work("x", max_tokens=20, ignore_eos=True))
    assert loop.time() - began >= 0.095
    assert sim.stats()["virtual_s"] == pytest.approx(0.1, rel=0.02)
    await sim.stop()


async def test_a_failure_of_the_steps_is_an_engines_death(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = engine()
    await sim.start()

    def broken(_: Scheduler) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Scheduler, "step", broken)
    with pytest.raises(EngineDied, match="broken"):
        await ask(sim, work("x"))
    with pytest.raises(EngineDied):
        await ask(sim, work("y"))
    await sim.stop()


async def test_ids_are_counted_and_answered() -> None:
    sim = engine()
    await sim.start()
    item = Work(id="t", prompt=TokenPrompt(ids=[1, 2, 3]), params=Generation(n=2), max_tokens=8)
    output = await ask(sim, item)
    assert output.usage.prompt_tokens == 3
    assert len(output.choices) == 2
    assert output.usage.completion_tokens == sum(len(c.text.split()) for c in output.choices)
    await sim.stop()
