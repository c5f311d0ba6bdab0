"""What every engine refuses: for that item alone, with a type and the field's name, before it runs if it can."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import Raw

from headrace.contracts.generation import StructuredOutput
from headrace.contracts.messages import ChatPrompt, Row, TextPrompt, TokenPrompt
from headrace.inference_worker.engines.protocol import Engine, ItemFailed, Work
from tests.conformance.conftest import ask, chat, ids, work
from tests.conformance.kinds import Kind

pytestmark = pytest.mark.anyio


def refused(engine: Engine, item: Work) -> ItemFailed:
    with pytest.raises(ItemFailed) as caught:
        engine.prepare(item)
    return caught.value


async def test_too_long_is_refused(engine: Engine) -> None:
    limit = engine.info.max_model_len
    alone = refused(engine, work(ids(*[5] * (limit + 1)), max_tokens=1)).error
    assert (alone.type, alone.field) == ("too_long", "prompt")
    assert str(limit) in alone.message
    together = refused(engine, work(ids(*[5] * 100), max_tokens=limit - 99)).error
    assert (together.type, together.field) == ("too_long", "max_tokens")
    fits = engine.prepare(work(ids(*[5] * 100), max_tokens=limit - 100))
    assert fits.prompt_tokens == 100


async def test_a_long_text_is_refused(kind: Kind, engine: Engine) -> None:
    if kind.name == "echo":
        pytest.skip("echo cannot count the tokens of a text")
    assert refused(engine, work("word " * 3000)).error.type == "too_long"
    assert refused(engine, work(chat("word " * 3000))).error.type == "too_long"


@pytest.mark.parametrize("bad", ["above", "far above", "negative"])
async def test_ids_outside_the_vocabulary_are_refused(engine: Engine, bad: str) -> None:
    size = engine.info.vocab_size
    value = {"above": size, "far above": 2**31 - 1, "negative": -1}[bad]
    error = refused(engine, work(ids(5, 6, value, 7))).error
    assert (error.type, error.field) == ("invalid_token", "prompt_token_ids[2]")
    assert str(value) in error.message
    assert engine.prepare(work(ids(0, size - 1))).prompt_tokens == 2


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "hi"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
        ),
    ],
)
async def test_an_invalid_chat_is_refused(engine: Engine, messages, field: str) -> None:
    error = refused(engine, work(ChatPrompt(messages=messages))).error
    assert (error.type, error.field) == ("invalid_prompt", field)


async def test_text_parts_are_a_valid_chat(engine: Engine) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]
    output = await ask(engine, work(ChatPrompt(messages=[{"role": "user", "content": parts}]), max_tokens=3))
    assert output.choices


@pytest.mark.parametrize("prompt", [TextPrompt(text=""), TokenPrompt(ids=[])], ids=["text", "tokens"])
async def test_an_empty_prompt_is_refused(engine: Engine, prompt) -> None:
    assert refused(engine, work(prompt)).error.type == "invalid_prompt"


async def test_a_row_is_for_a_function(kind: Kind, engine: Engine) -> None:
    item = work(Row(value=Raw(b'{"a":1}')))
    if kind.samples:
        assert refused(engine, item).error.type == "invalid_prompt"
    else:
        assert (await ask(engine, item)).value == Raw(b'{"a":1}')


async def test_what_cannot_be_honoured_is_refused_by_name(kind: Kind, engine: Engine) -> None:
    for name, value in kind.refuses.items():
        error = refused(engine, work("Hi", **{name: value})).error
        assert (error.type, error.field) == ("unsupported_parameter", name)
        assert name in error.message


async def test_tools_that_nothing_would_read_are_refused(engine: Engine) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    error = refused(engine, work(chat("Weather?", tools=tools))).error
    assert (error.type, error.field) == ("unsupported_parameter", "tools")


@pytest.mark.parametrize(
    ("form", "value"),
    [("json", {"type": "integer"}), ("regex", "[0-9]+"), ("choice", ["a"]), ("grammar", 'root ::= "a"')],
)
async def test_a_form_of_output_that_it_has_not_is_refused(
    kind: Kind, engine: Engine, form: str, value
) -> None:
    if form in kind.structured:
        pytest.skip("honoured: see test_answers")
    error = refused(engine, work(chat("Hi"), structured_outputs=StructuredOutput(**{form: value}))).error
    assert error.type == "unsupported_parameter"
    assert error.field is not None
    assert error.field.startswith("structured_outputs")


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("grammar", "root ::= ((("),
        ("grammar", "root ::= nowhere"),
        ("regex", "(("),
        ("json", {"type": "no such type"}),
        ("json", {"$ref": "#/nowhere"}),
        ("json", '{"type":'),
    ],
)
async def test_a_malformed_constraint_fails_its_item_only(
    kind: Kind, engine: Engine, form: str, value
) -> None:
    """B3: 63 good items and one malformed."""
    bad = work(chat("Hi"), max_tokens=4, structured_outputs=StructuredOutput(**{form: value}))
    few = 63 if kind.name.startswith("vllm") else 15
    good = [work(f"neighbour {i}", max_tokens=2, ignore_eos=True) for i in range(few)]
    items = [*good[: few // 2], bad, *good[few // 2 :]]

    async def run(item: Work):
        return await ask(engine, item)

    results = await asyncio.gather(*(run(item) for item in items), return_exceptions=True)
    failed = [r for r in results if isinstance(r, BaseException)]
    assert len(failed) == 1
    assert isinstance(failed[0], ItemFailed)
    assert failed[0].error.type == (
        "invalid_parameter" if form in kind.structured else "unsupported_parameter"
    )
    assert (failed[0].error.field or "").startswith("structured_outputs")
