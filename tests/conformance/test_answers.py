"""What every engine answers: prompts of each form, counts, lengths, stops, choices, seeds."""

from __future__ import annotations

import asyncio

import pytest

from headrace.contracts.generation import StructuredOutput
from headrace.contracts.messages import TextPrompt
from headrace.inference_worker.engines.protocol import Engine
from tests.conformance.conftest import ask, chat, ids, work
from tests.conformance.kinds import Kind

pytestmark = pytest.mark.anyio


def test_info_tells_what_it_holds(kind: Kind, engine: Engine) -> None:
    info = engine.info
    assert info.engine == kind.engine
    assert info.model
    assert info.slots > 0
    assert info.capacity_tokens > 0
    assert info.max_model_len == 512
    assert info.vocab_size > 0


@pytest.mark.parametrize(
    "prompt",
    [TextPrompt(text="The wheel takes"), chat("Say a word."), ids(5, 6, 7, 8)],
    ids=["text", "chat", "tokens"],
)
async def test_each_form_of_prompt_is_answered(engine: Engine, prompt) -> None:
    prepared = engine.prepare(work(prompt, max_tokens=6))
    output = await engine.run(prepared)
    assert len(output.choices) == 1
    assert output.choices[0].finish_reason in ("stop", "length")
    assert output.usage.prompt_tokens == prepared.prompt_tokens
    assert output.usage.completion_tokens <= 6


async def test_tokens_are_counted_exactly(kind: Kind, engine: Engine) -> None:
    assert engine.prepare(work(ids(5, 6, 7))).prompt_tokens == 3
    if kind.name != "echo":
        short, long = engine.prepare(work("one two three")), engine.prepare(work("one two three " * 20))
        assert 0 < short.prompt_tokens < long.prompt_tokens
        assert engine.prepare(work(chat("Hi"))).prompt_tokens > 0


async def test_prepare_keeps_the_item(engine: Engine) -> None:
    item = work("Tell me", max_tokens=5, temperature=0.5)
    prepared = engine.prepare(item)
    assert (prepared.id, prepared.prompt, prepared.params, prepared.max_tokens) == (
        item.id,
        item.prompt,
        item.params,
        item.max_tokens,
    )


async def test_max_tokens_ends_an_item_with_length(engine: Engine) -> None:
    output = await ask(engine, work(ids(*range(5, 35)), max_tokens=5, ignore_eos=True))
    assert output.choices[0].finish_reason == "length"
    assert output.usage.completion_tokens == 5


async def test_a_stop_string_ends_the_text(kind: Kind, engine: Engine) -> None:
    if kind.name == "echo":
        item, want = work("aaabaaa", stop=["b"]), "aaa"
    elif kind.name == "sim":
        item, want = work("water", max_tokens=50, stop=[" "], ignore_eos=True), None
    else:
        forced = StructuredOutput(choice=["aaabaaa"])
        item, want = work("letters", max_tokens=20, stop=["b"], structured_outputs=forced), "aaa"
    choice = (await ask(engine, item)).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == want or (want is None and choice.text and " " not in choice.text)


async def test_n_choices(kind: Kind, engine: Engine) -> None:
    output = await ask(engine, work(ids(*range(5, 15)), max_tokens=4, n=3, temperature=1.0, ignore_eos=True))
    assert len(output.choices) == 3
    assert output.usage.completion_tokens == 12
    assert output.usage.prompt_tokens == 10


async def test_a_seed_repeats_the_answer(kind: Kind, engine: Engine) -> None:
    item = {"max_tokens": 12, "seed": 7, "temperature": 1.0, "ignore_eos": True}
    first = await ask(engine, work("A seed grows into", **item))
    again = await ask(engine, work("A seed grows into", **item))
    assert first.choices[0].text == again.choices[0].text
    if kind.samples:
        other = await ask(engine, work("A seed grows into", **{**item, "seed": 8}))
        assert other.choices[0].text != first.choices[0].text


async def test_tokens_generated_only_grows(engine: Engine) -> None:
    seen = [engine.tokens_generated()]
    running = asyncio.create_task(ask(engine, work(ids(*range(5, 65)), max_tokens=40, ignore_eos=True)))
    while not running.done():
        seen.append(engine.tokens_generated())
        await asyncio.sleep(0.002)
    output = await running
    seen.append(engine.tokens_generated())
    assert seen == sorted(seen)
    assert output.usage.completion_tokens == 40
    assert seen[-1] >= seen[0] + 40 - 1


async def test_logprobs_take_the_form_of_the_endpoint(kind: Kind, engine: Engine) -> None:
    if "logprobs" in kind.refuses:
        pytest.skip("refused by name: see test_refusals")
    plain = (
        (await ask(engine, work("One two", max_tokens=3, logprobs=2, ignore_eos=True))).choices[0].logprobs
    )
    assert len(plain["tokens"]) == len(plain["token_logprobs"]) == len(plain["text_offset"]) == 3
    assert all(value <= 0 for value in plain["token_logprobs"])
    for prompt, flag in ((chat("One two"), False), (ids(5, 6), True)):
        item = work(prompt, max_tokens=3, logprobs=2, ignore_eos=True, chat=flag)
        content = (await ask(engine, item)).choices[0].logprobs["content"]
        assert len(content) == 3
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert {"token", "logprob", "bytes", "top_logprobs"} == set(content[0])
    none = (await ask(engine, work("One two", max_tokens=2, logprobs=0, ignore_eos=True))).choices[0].logprobs
    assert len(none["tokens"]) == 2
    assert none["top_logprobs"] == [None, None]


@pytest.mark.parametrize(
    ("form", "value", "accept"),
    [
        ("choice", ['left "bank"', "right"], {'left "bank"', "right"}),
        ("grammar", 'root ::= "ab" | "cd"', {"ab", "cd"}),
        ("regex", "[01]{3}", {f"{i:03b}" for i in range(8)}),
    ],
)
async def test_structured_output_is_kept_to(
    kind: Kind, engine: Engine, form: str, value, accept: set[str]
) -> None:
    if form not in kind.structured:
        pytest.skip("refused by name: see test_refusals")
    item = work("Choose.", max_tokens=30, structured_outputs=StructuredOutput(**{form: value}))
    assert (await ask(engine, item)).choices[0].text in accept


async def test_a_json_schema_is_kept_to(kind: Kind, engine: Engine) -> None:
    if "json" not in kind.structured:
        pytest.skip("refused by name: see test_refusals")
    schema = {"enum": ["one", "two"]}
    item = work(chat("One or two?"), max_tokens=30, structured_outputs=StructuredOutput(json=schema))
    assert (await ask(engine, item)).choices[0].text.strip() in ('"one"', '"two"')
