"""Plain lines, rows, and what errors of lines say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.formats import LineDecoder
from headrace.client.problems import MAX_SHOWN, shown
from headrace.contracts.errors import InvalidInput
from headrace.contracts.generation import Generation
from headrace.contracts.messages import ChatPrompt, Row, TextPrompt, TokenPrompt
from tests.client.harness import SPEC, batch_line


def refused(line: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidInput) as caught:
        LineDecoder(SPEC).decode(line if isinstance(line, bytes) else json.dumps(line).encode())
    return caught.value.field, str(caught.value)


@pytest.mark.parametrize(
    ("fields", "prompt", "tokens"),
    [
        ({"prompt": "1234567"}, TextPrompt(text="1234567"), 2),
        ({"prompt": "é" * 7}, TextPrompt(text="é" * 7), 4),
        ({"prompt_token_ids": [1, 2, 3]}, TokenPrompt(ids=[1, 2, 3]), 3),
        (
            {"messages": [{"role": "user", "content": "1234567"}]},
            ChatPrompt(messages=[{"role": "user", "content": "1234567"}]),
            8,
        ),
    ],
)
def test_prompts(fields: dict[str, Any], prompt: Any, tokens: int) -> None:
    item = LineDecoder(SPEC).decode(json.dumps(fields | {"custom_id": "c", "model": "m"}).encode())
    assert (item.prompt, item.prompt_tokens, item.custom_id, item.model) == (prompt, tokens, "c", "m")
    assert item.chat is isinstance(prompt, ChatPrompt)


def test_every_field_of_generation_may_stand_in_a_line() -> None:
    values = {
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.5,
        "seed": 4,
        "stop": ["a"],
        "stop_token_ids": [4],
        "bad_words": ["b"],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 4,
        "logit_bias": {"3": 1},
        "allowed_token_ids": [3],
        "structured_outputs": {"regex": "a"},
        "priority": 3,
        "lora": "x",
    }
    assert set(values) == set(Generation.__struct_fields__)
    item = LineDecoder(SPEC).decode(json.dumps({"prompt": "a"} | values).encode())
    for name in values:
        assert getattr(item.params.generation, name) != getattr(Generation(), name), name
    nothing = LineDecoder(SPEC).decode(json.dumps({"prompt": "a"} | dict.fromkeys(values)).encode())
    assert nothing.params.generation == Generation()


@pytest.mark.parametrize(
    ("line", "field", "text"),
    [
        (b'{"prompt": "a"', "", "not JSON"),
        (b"", "", "not JSON"),
        (b'{"prompt": NaN}', "", "not JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "", "out of range"),
        (b'{"prompt": "\xff"}', "", "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "", "not JSON"),
        (b"[1]", "", "a file with one array is no JSONL"),
        (b"7", "", "got 7"),
        (b"[" * 5_000, "", "nested too deeply"),
        (
            b'{"messages":[{"role":"user","content":' + b"[" * 5_000 + b"]" * 5_000 + b"}]}",
            "",
            "nested too deeply",
        ),
        ({}, "prompt", "got none"),
        ({"prompt": "a", "messages": []}, "messages", "got prompt and messages"),
        ({"prompt": ""}, "prompt", "length >= 1"),
        ({"prompt": None}, "prompt", "got none"),
        ({"prompt": ["a"]}, "prompt", "got array"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "length >= 1"),
        ({"prompt_token_ids": [3, -5]}, "prompt_token_ids[1]", "got -5"),
        (
            {"prompt_token_ids": [3, 4, 1_000]},
            "prompt_token_ids[2]",
            "token id 1000 is outside the vocabulary of 1000",
        ),
        ({"prompt_token_ids": [3, 1.5]}, "prompt_token_ids[1]", "got number"),
        ({"prompt": "a", "stop_token_ids": [1_000]}, "stop_token_ids[0]", "1000"),
        ({"prompt": "a", "tempreature": 1}, "tempreature", "unknown field"),
        ({"prompt": "a", "x" * 200: 1}, "x" * MAX_SHOWN + "…", "unknown field"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "got 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "> 0.0, got 0"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 2}, "min_tokens", "greater than max_tokens"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "got boolean"),
        (
            {"prompt": "a", "structured_outputs": {"regex": "a", "grammar": "b"}},
            "structured_outputs",
            "exactly one",
        ),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "expected a role"),
        ({"messages": "hi"}, "messages", "got string"),
    ],
)
def test_errors_name_the_field(line: Any, field: str, text: str) -> None:
    found, said = refused(line)
    assert found == field
    assert text in said


def test_errors_never_quote_the_payload() -> None:
    secret = "secret " * 100
    for line in (
        {"prompt": [secret]},
        {"prompt": "a", secret: secret},
        {"messages": [{"role": {"x": secret}}]},
        batch_line(stop=secret),
        batch_line(response_format={"type": secret}),
    ):
        field, said = refused(line)
        assert len(said) < 300
        assert len(field or "") < 100
        assert said.count("secret") <= MAX_SHOWN // 7 + 1


def test_forms_may_change_in_a_file() -> None:
    decoder = LineDecoder(SPEC)
    plain, batch = b'{"prompt":"a"}', json.dumps(batch_line()).encode()
    for line in (plain, batch, batch, plain, batch, plain):
        assert decoder.decode(line).chat is (line is batch)


def test_defaults_are_checked_at_once() -> None:
    with pytest.raises(InvalidInput, match="<= 10"):
        LineDecoder(SPEC, defaults={"temperature": 99})
    with pytest.raises(InvalidInput, match="unknown field"):
        LineDecoder(SPEC, defaults={"temprature": 1})


def test_rows_are_any_json() -> None:
    decoder = LineDecoder(SPEC, form="rows")
    for text in (b'{"a": [1, null]}', b"[1]", b"null", b' "x" \r'):
        item = decoder.decode(text)
        assert isinstance(item.prompt, Row)
        assert json.loads(bytes(item.prompt.value)) == json.loads(text)
    with pytest.raises(InvalidInput, match="not JSON"):
        decoder.decode(b"{")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "prompt",
        "messages",
        "prompt_token_ids",
        "custom_id",
        "body",
        "url",
        "method",
        "stop",
        "n",
        "logprobs",
        "role",
        "content",
        "tools",
        "tool_choice",
        "response_format",
        "type",
        "logit_bias",
        "structured_outputs",
        "seed",
        "stream",
    ]
)
lines = st.dictionaries(
    names, json_values | st.lists(st.dictionaries(names, json_values, max_size=3), max_size=2), max_size=5
)
bodies = st.builds(
    lambda url, body: {"custom_id": "a", "method": "POST", "url": url, "body": body},
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    lines,
)


@given(
    st.one_of(
        st.binary(max_size=60),
        lines.map(lambda v: json.dumps(v).encode()),
        bodies.map(lambda v: json.dumps(v).encode()),
    )
)
def test_decoding_never_fails_otherwise_than_by_invalid_input(raw: bytes) -> None:
    for form in ("lines", "rows"):
        try:
            item = LineDecoder(SPEC, form=form).decode(raw)
        except InvalidInput:
            continue
        else:
            assert item.prompt_tokens >= 0


@given(json_values)
def test_shown_is_short(value: Any) -> None:
    assert len(shown(value)) <= 4 * MAX_SHOWN + 30
