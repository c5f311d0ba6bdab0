"""What vLLM alone can do: every sampling field, adapters, tools; and how it dies. Collected where it is installed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import Choice
from headrace.inference_worker.engines.protocol import Engine, EngineDied, ItemFailed
from headrace.inference_worker.engines.registry import EngineOptions, create_engine
from tests.conformance.conftest import ask, chat, ids, work
from tests.conformance.kinds import VLLM_ASYNC, VLLM_STEP
from tests.models.tiny_llama import make_tiny_llama
from tests.models.tiny_lora import make_tiny_lora

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
async def own(model: Path, anyio_backend: str) -> AsyncIterator[Engine]:
    """The step way, with an adapter and a tool call parser."""
    adapter = make_tiny_lora(model / "adapter")
    base = VLLM_STEP.options(model)
    extra = {**base.extra, "lora_adapters": f"river={adapter}", "tool_call_parser": "hermes"}
    engine = create_engine("vllm", structs.replace(base, extra=extra))
    await engine.start()
    yield engine
    await engine.stop()


async def test_info_names_the_tokenizer(own: Engine, model: Path) -> None:
    info = own.info
    assert info.tokenizer == str(model)
    assert len(info.tokenizer_fingerprint) == 64
    assert info.capacity_tokens == 16 * 2**20 // (2 * 2 * 32 * 4)  # layers, K and V, head_dim, float32


async def test_prompt_logprobs_stand_beside(own: Engine) -> None:
    item = work(ids(5, 6, 7), max_tokens=2, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    logprobs = (await ask(own, item)).choices[0].logprobs
    assert logprobs["prompt_logprobs"][0] is None
    assert "6" in logprobs["prompt_logprobs"][1]
    assert len(logprobs["tokens"]) == 2


async def test_a_prompt_is_cut_from_the_left(own: Engine) -> None:
    prepared = own.prepare(work(ids(*range(5, 25)), max_tokens=2, truncate_prompt_tokens=4))
    assert prepared.prompt_tokens == 4
    whole = await ask(own, work(ids(21, 22, 23, 24), max_tokens=5, temperature=0.0, ignore_eos=True))
    cut = work(ids(*range(5, 25)), max_tokens=5, temperature=0.0, ignore_eos=True, truncate_prompt_tokens=4)
    assert (await ask(own, cut)).choices[0].token_ids == whole.choices[0].token_ids


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"allowed_token_ids": [70, 71]}, lambda c: set(c.token_ids) <= {70, 71}),
        ({"logit_bias": {99: 100.0}, "temperature": 0.0}, lambda c: set(c.token_ids) == {99}),
        ({"min_tokens": 6, "allowed_token_ids": [2, 70]}, lambda c: len(c.token_ids) >= 6),
        ({"stop_token_ids": [70], "allowed_token_ids": [70]}, lambda c: c.stop_reason == 70),
        ({"top_k": 1, "temperature": 2.0, "seed": 1}, lambda c: len(c.token_ids) == 8),
        (
            {"stop": ["a"], "include_stop_str_in_output": True, "allowed_token_ids": [69]},
            lambda c: c.text == "a",
        ),
        (
            {"allowed_token_ids": [3], "skip_special_tokens": False},
            lambda c: c.text.startswith("<|im_start|>"),
        ),
        ({"allowed_token_ids": [3], "skip_special_tokens": True}, lambda c: c.text == ""),
    ],
)
async def test_sampling_fields_do_what_they_say(own: Engine, fields, holds) -> None:
    choice = (await ask(own, work("The wheel", max_tokens=8, **fields))).choices[0]
    assert holds(choice), choice


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {9999: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [9999]}, "allowed_token_ids"),
        ({"stop_token_ids": [9999]}, "stop_token_ids"),
        ({"lora": "lake"}, "lora"),
    ],
)
async def test_fields_are_checked_against_the_model(own: Engine, fields, field: str) -> None:
    with pytest.raises(ItemFailed) as caught:
        own.prepare(work("x", **fields))
    assert (caught.value.error.type, caught.value.error.field) == ("invalid_parameter", field)


async def test_an_adapter_changes_the_answer(own: Engine) -> None:
    item = {"max_tokens": 10, "temperature": 0.0, "ignore_eos": True}
    plain = await ask(own, work(ids(*range(30, 40)), **item))
    adapted = await ask(own, work(ids(*range(30, 40)), lora="river", **item))
    again = await ask(own, work(ids(*range(30, 40)), **item))
    assert adapted.choices[0].token_ids != plain.choices[0].token_ids
    assert again.choices[0].token_ids == plain.choices[0].token_ids


async def test_tool_calls_are_read_by_the_models_parser(own: Engine) -> None:
    prompt = chat("Weather?", tools=TOOLS)
    assert (await ask(own, work(prompt, max_tokens=3))).choices
    text = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    read = own._tools.read(prompt, Choice(text=text))
    assert read.finish_reason == "tool_calls"
    assert read.tool_calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert "tool_call" not in read.text
    plain = own._tools.read(prompt, Choice(text="No tool."))
    assert (plain.text, plain.tool_calls) == ("No tool.", None)


async def test_a_choice_of_tool_that_nothing_enforces_is_refused(own: Engine) -> None:
    with pytest.raises(ItemFailed) as caught:
        own.prepare(work(chat("Weather?", tools=TOOLS, tool_choice="required")))
    assert (caught.value.error.type, caught.value.error.field) == ("unsupported_parameter", "tool_choice")


async def test_a_lower_priority_number_runs_first(own: Engine) -> None:
    order: list[str] = []

    async def one(name: str, priority: int, max_tokens: int) -> None:
        await ask(own, work(ids(5, 6), max_tokens=max_tokens, priority=priority, ignore_eos=True))
        order.append(name)

    fillers = [asyncio.create_task(one("filler", 0, 60)) for _ in range(own.info.slots)]
    await asyncio.sleep(0.1)
    late = [asyncio.create_task(one("late", 9, 2)) for _ in range(64)]
    first = asyncio.create_task(one("first", -1, 2))
    await asyncio.gather(*fillers, *late, first)
    waited = [name for name in order if name != "filler"]
    assert waited.index("first") < 2


async def test_a_failed_step_is_a_death_for_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A2: whatever was in it gets EngineDied, and so does what comes later; a new engine works."""
    engine = create_engine("vllm", VLLM_STEP.options(model))
    await engine.start()
    items = [engine.prepare(work(ids(5, 6, i), max_tokens=400, ignore_eos=True)) for i in range(7, 12)]
    pending = [asyncio.create_task(engine.run(item)) for item in items]
    await asyncio.sleep(0.3)

    def broken(_: object) -> None:
        raise RuntimeError("the kernel failed")

    monkeypatch.setattr("vllm.v1.engine.llm_engine.LLMEngine.step", broken)
    results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 10)
    assert all(isinstance(r, EngineDied) for r in results)
    assert "the kernel failed" in str(results[0])
    with pytest.raises(EngineDied):
        await engine.run(items[0])
    await engine.stop()


async def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    engine = create_engine("vllm", EngineOptions(model=str(tmp_path / "nothing"), extra={"mode": "step"}))
    with pytest.raises(HeadraceError, match="nothing") as caught:
        await engine.start()
    assert "\n" not in str(caught.value)
    await engine.stop()


async def test_an_engine_argument_that_does_not_exist_is_named(model: Path) -> None:
    engine = create_engine("vllm", EngineOptions(model=str(model), extra={"mode": "step", "warp_speed": "9"}))
    with pytest.raises(HeadraceError, match="warp_speed"):
        await engine.start()


@pytest.mark.slow
async def test_a_killed_engine_process_is_a_death_for_all(model: Path) -> None:
    """A2, for the way with a process of its own."""
    before = set(psutil.Process().children(recursive=True))
    engine = create_engine("vllm", VLLM_ASYNC.options(model))
    await engine.start()
    items = [engine.prepare(work(ids(5, 6, i), max_tokens=400, ignore_eos=True)) for i in range(7, 12)]
    pending = [asyncio.create_task(engine.run(item)) for item in items]
    await asyncio.sleep(0.5)
    children = set(psutil.Process().children(recursive=True)) - before
    core = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    assert len(core) == 1
    core[0].kill()
    results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 10)
    assert all(isinstance(r, EngineDied) for r in results)
    with pytest.raises(EngineDied):
        await engine.run(items[0])
    await engine.stop()
    _, left = psutil.wait_procs(children, timeout=15)
    assert not [p for p in left if "VLLM" in " ".join(p.cmdline())]


_WORKER = """
import asyncio, sys
from headrace.inference_worker.engines.registry import EngineOptions, create_engine
async def main():
    extra = {"mode": "async", "kv_cache_memory_bytes": str(16 << 20)}
    engine = create_engine("vllm", EngineOptions(model=sys.argv[1], slots=8, context=128, threads=1, extra=extra))
    await engine.start()
    print("ready", flush=True)
    await asyncio.sleep(600)
if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_killed_worker_leaves_no_engine_behind(model: Path, tmp_path: Path) -> None:
    """What is left over would hold the GPU's memory, and the worker's next start would find none."""
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    parent = subprocess.Popen([sys.executable, str(script), str(model)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    while parent.stdout.readline().strip() != "ready":
        assert parent.poll() is None
    children = psutil.Process(parent.pid).children(recursive=True)
    assert any("VLLM" in " ".join(child.cmdline()) for child in children)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 20
    while any(_alive(child) for child in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert [child for child in children if _alive(child)] == []


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
