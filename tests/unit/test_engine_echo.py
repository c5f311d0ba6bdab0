"""The echo engine: exact answers, counts, faults, and no suspension."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from msgspec import Raw

from headrace.contracts.generation import Generation
from headrace.contracts.messages import ChatPrompt, Row, TextPrompt, TokenPrompt
from headrace.inference_worker.engines.echo import EchoEngine
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed, Output, Work

pytestmark = pytest.mark.anyio


def work(prompt: Any, *, max_tokens: int = 16, prompt_tokens: int = 0, **fields: Any) -> Work:
    params = Generation(**fields)
    return Work(id="w", prompt=prompt, params=params, max_tokens=max_tokens, prompt_tokens=prompt_tokens)


async def started(context: int | None = None, **extra: str) -> EchoEngine:
    engine = EchoEngine(EngineOptions(context=context, extra=extra))
    await engine.start()
    return engine


async def ask(engine: EchoEngine, item: Work) -> Output:
    return await engine.run(engine.prepare(item))


async def test_text_comes_back_whole() -> None:
    output = await ask(await started(), work(TextPrompt(text="hé llo"), prompt_tokens=40))
    assert output.choices[0].text == "hé llo"
    assert output.choices[0].finish_reason == "stop"
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (40, 16)


async def test_ids_come_back_as_ids_and_text() -> None:
    output = await ask(await started(), work(TokenPrompt(ids=[3, 1, 4])))
    assert output.choices[0].token_ids == [3, 1, 4]
    assert output.choices[0].text == "3 1 4"
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (3, 3)


async def test_ids_are_cut_at_max_tokens() -> None:
    choice = (await ask(await started(), work(TokenPrompt(ids=[3, 1, 4]), max_tokens=2))).choices[0]
    assert (choice.token_ids, choice.text, choice.finish_reason) == ([3, 1], "3 1", "length")


async def test_a_chat_gives_its_last_user_message() -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "user", "content": [{"type": "text", "text": "sec"}, {"type": "text", "text": "ond"}]},
        {"role": "assistant", "content": "third"},
    ]
    assert (await ask(await started(), work(ChatPrompt(messages=messages)))).choices[0].text == "second"


async def test_a_row_gives_its_value() -> None:
    output = await ask(await started(), work(Row(value=Raw(b'{"x": [1]}'))))
    assert output.value == Raw(b'{"x": [1]}')
    assert output.choices == []


async def test_n_and_stop() -> None:
    output = await ask(await started(), work(TextPrompt(text="ab|cd"), n=2, stop=["|", "b"]))
    assert [c.text for c in output.choices] == ["a", "a"]
    assert output.choices[0].stop_reason == "b"
    kept = work(TextPrompt(text="ab|cd"), stop=["|"], include_stop_str_in_output=True)
    assert (await ask(await started(), kept)).choices[0].text == "ab|"


async def test_the_defaults_of_capacity() -> None:
    info = (await started()).info
    assert (info.slots, info.capacity_tokens, info.max_model_len, info.vocab_size) == (4096, 1 << 24, 0, 0)


async def test_run_does_not_suspend() -> None:
    engine = await started()
    coroutine = engine.run(engine.prepare(work(TextPrompt(text="x"))))
    with pytest.raises(StopIteration):
        coroutine.send(None)


async def test_prepare_returns_the_same_item_where_nothing_changes() -> None:
    engine = await started()
    text, counted = work(TextPrompt(text="x")), work(TokenPrompt(ids=[1, 2]), prompt_tokens=2)
    assert engine.prepare(text) is text
    assert engine.prepare(counted) is counted


async def test_what_would_need_a_model_is_refused() -> None:
    engine = await started()
    for name, value in {"min_tokens": 2, "logit_bias": {1: 2.0}, "lora": "a", "bad_words": ["x"]}.items():
        with pytest.raises(ItemFailed) as caught:
            engine.prepare(work(TextPrompt(text="x"), **{name: value}))
        assert caught.value.error.type == "unsupported_parameter"
        assert caught.value.error.field == name


async def test_more_than_the_capacity_is_too_long() -> None:
    engine = await started(capacity_tokens="100")
    with pytest.raises(ItemFailed, match="too_long"):
        engine.prepare(work(TokenPrompt(ids=[1] * 60), max_tokens=41))
    with pytest.raises(ItemFailed, match="too_long"):
        engine.prepare(work(TokenPrompt(ids=[1] * 60), max_tokens=21, n=2))
    engine.prepare(work(TokenPrompt(ids=[1] * 60), max_tokens=40))


async def test_fail_on_fails_the_item_only() -> None:
    engine = await started(fail_on="poison")
    with pytest.raises(ItemFailed, match="poisoned"):
        await ask(engine, work(TextPrompt(text="a poison pill")))
    assert (await ask(engine, work(TextPrompt(text="water")))).choices[0].text == "water"


async def test_die_on_ends_all_until_the_next_start() -> None:
    engine = await started(die_on="9 9", delay_ms="20")
    neighbour = asyncio.create_task(ask(engine, work(TextPrompt(text="water"))))
    with pytest.raises(EngineDied):
        await ask(engine, work(TokenPrompt(ids=[9, 9])))
    with pytest.raises(EngineDied):
        await neighbour
    with pytest.raises(EngineDied):
        await engine.run(work(TextPrompt(text="later")))
    await engine.start()
    assert (await ask(engine, work(TextPrompt(text="water")))).choices


async def test_stop_ends_a_delayed_item() -> None:
    engine = await started(delay_ms="60000")
    pending = asyncio.create_task(ask(engine, work(TextPrompt(text="x"))))
    await asyncio.sleep(0)
    assert engine.stats()["running"] == 1
    await engine.stop()
    await engine.stop()
    with pytest.raises(EngineDied):
        await pending


def test_exit_on_ends_the_process() -> None:
    code = """
import asyncio
from headrace.contracts.generation import Generation
from headrace.contracts.messages import TextPrompt
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import Work
from headrace.inference_worker.engines.registry import create_engine
async def main():
    engine = create_engine("echo", EngineOptions(extra={"exit_on": "crash"}))
    await engine.start()
    await engine.run(Work(id="w", prompt=TextPrompt(text="crash here"), params=Generation(), max_tokens=1))
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 70
