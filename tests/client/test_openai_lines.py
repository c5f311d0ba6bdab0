"""OpenAI Batch lines: every field of `body` is honoured or refused by name, in both endpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.client.formats import LineDecoder
from headrace.client.items import Item
from headrace.client.openai_fields import HARMLESS, LABELS, REASONS, REFUSED
from headrace.contracts.errors import InvalidInput
from headrace.contracts.generation import DEFAULT_GENERATION, Generation, StructuredOutput
from headrace.contracts.messages import ChatPrompt, TextPrompt, TokenPrompt
from tests.client.harness import SPEC, batch_line, text_line

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

# The request bodies of OpenAI's API reference, and the extra parameters of vLLM's server.
OPENAI_CHAT = [
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "modalities",
    "model",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
]
OPENAI_TEXT = [
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "model",
    "n",
    "presence_penalty",
    "prompt",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
]
VLLM = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_penalty",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
]

# field: (value, what the generation has then). Fields of both endpoints.
HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "allowed_token_ids": ([1, 2], {"allowed_token_ids": [1, 2]}),
    "bad_words": (["x"], {"bad_words": ["x"]}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "guided_choice": (["a", "b"], {"structured_outputs": StructuredOutput(choice=["a", "b"])}),
    "guided_grammar": ("root ::= 'a'", {"structured_outputs": StructuredOutput(grammar="root ::= 'a'")}),
    "guided_json": (SCHEMA, {"structured_outputs": StructuredOutput(json=SCHEMA)}),
    "guided_regex": ("a+", {"structured_outputs": StructuredOutput(regex="a+")}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "include_stop_str_in_output": (True, {"include_stop_str_in_output": True}),
    "logit_bias": ({"7": -100}, {"logit_bias": {7: -100.0}}),
    "max_tokens": (9, {"max_tokens": 9}),
    "min_p": (0.1, {"min_p": 0.1}),
    "min_tokens": (2, {"min_tokens": 2}),
    "n": (3, {"n": 3}),
    "presence_penalty": (-0.5, {"presence_penalty": -0.5}),
    "priority": (-1, {"priority": -1}),
    "prompt_logprobs": (1, {"prompt_logprobs": 1}),
    "repetition_penalty": (1.1, {"repetition_penalty": 1.1}),
    "response_format": ({"type": "json_object"}, {"structured_outputs": StructuredOutput(json_object=True)}),
    "seed": (5, {"seed": 5}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "spaces_between_special_tokens": (False, {"spaces_between_special_tokens": False}),
    "stop": ("end", {"stop": ["end"]}),
    "stop_token_ids": ([3], {"stop_token_ids": [3]}),
    "structured_outputs": ({"regex": "b"}, {"structured_outputs": StructuredOutput(regex="b")}),
    "temperature": (0, {"temperature": 0.0}),
    "top_k": (40, {"top_k": 40}),
    "top_p": (0.9, {"top_p": 0.9}),
    "truncate_prompt_tokens": (100, {"truncate_prompt_tokens": 100}),
}
CHAT_HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    **HONOURED,
    "logprobs": (True, {"logprobs": 0}),
    "max_completion_tokens": (9, {"max_tokens": 9}),
}
TEXT_HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {**HONOURED, "logprobs": (5, {"logprobs": 5})}
ELSEWHERE = {"messages", "prompt", "model", "tools", "tool_choice", "top_logprobs", "chat_template_kwargs"}


def decode(line: Any) -> Item:
    return LineDecoder(SPEC).decode(line if isinstance(line, bytes) else json.dumps(line).encode())


def refused(line: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        decode(line)
    return caught.value


def test_every_known_field_is_in_one_table() -> None:
    decided = {*HONOURED, *CHAT_HONOURED, *HARMLESS, *REFUSED, *LABELS, *ELSEWHERE}
    assert {*OPENAI_CHAT, *OPENAI_TEXT, *VLLM} <= decided
    assert set(HARMLESS) <= set(REASONS)
    # A new field of the contract has to be honoured here too.
    assert set(Generation.__struct_fields__) - {"lora"} <= set(CHAT_HONOURED)


@pytest.mark.parametrize("name", sorted(CHAT_HONOURED))
def test_honoured_in_chat(name: str) -> None:
    value, expected = CHAT_HONOURED[name]
    item = decode(batch_line(**{name: value}))
    for field in Generation.__struct_fields__:
        default = getattr(DEFAULT_GENERATION, field)
        assert getattr(item.params.generation, field) == expected.get(field, default)


def test_a_bias_for_no_token_asks_for_nothing() -> None:
    for line in (batch_line(logit_bias={}), text_line(logit_bias={})):
        assert decode(line).params.generation == DEFAULT_GENERATION


@pytest.mark.parametrize("name", sorted(TEXT_HONOURED))
def test_honoured_in_completions(name: str) -> None:
    value, expected = TEXT_HONOURED[name]
    item = decode(text_line(**{name: value}))
    for field, wanted in expected.items():
        assert getattr(item.params.generation, field) == wanted


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_values_pass_and_others_are_refused_with_the_reason(name: str) -> None:
    line = text_line if name in ("suffix", "best_of") else batch_line
    for value in (*HARMLESS[name], None):
        assert decode(line(**{name: value})).params.generation == DEFAULT_GENERATION
    for value in (True, False, 2, "other", ["audio"]):
        if any(value == ok and type(value) is type(ok) for ok in HARMLESS[name]):
            continue
        error = refused(line(**{name: value}))
        assert error.field == f"body.{name}"
        assert REASONS[name] in str(error)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_any_value_but_null(name: str) -> None:
    assert decode(batch_line(**{name: None})).params.generation == DEFAULT_GENERATION
    for value in (True, 1, "x", {}, []):
        error = refused(batch_line(**{name: value}))
        assert error.field == f"body.{name}"
        assert REASONS[name] in str(error)


@pytest.mark.parametrize("name", sorted(LABELS))
def test_labels_pass_and_are_counted(name: str) -> None:
    decoder = LineDecoder(SPEC)
    decoder.decode(json.dumps(batch_line(**{name: "x"})).encode())
    assert decoder.labels == {f"body.{name}": 1}


def test_unknown_fields_are_refused_by_name() -> None:
    assert refused(batch_line(temprature=1)).field == "body.temprature"
    assert refused(batch_line() | {"extra": 1}).field == "extra"
    assert refused(batch_line(response_format={"type": "text", "x": 1})).field == "body.response_format.x"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"url": "/v1/embeddings"}, "url"),
        ({"url": "/v1/responses"}, "url"),
        ({"method": "GET"}, "method"),
        ({"custom_id": ""}, "custom_id"),
        ({"custom_id": 7}, "custom_id"),
        ({"custom_id": "x" * 513}, "custom_id"),
        ({"body": None}, "body"),
    ],
)
def test_the_envelope(change: dict[str, Any], field: str) -> None:
    assert refused(batch_line() | change).field == field


def test_the_url_comes_before_what_its_body_has_wrong() -> None:
    line = batch_line() | {"url": "/v1/embeddings", "body": {"model": "m", "input": "a"}}
    error = refused(line)
    assert error.field == "url"
    assert "'/v1/embeddings' is not served" in str(error)


@pytest.mark.parametrize("cut", [20, 60, -1])
def test_a_cut_line_is_called_no_json(cut: int) -> None:
    with pytest.raises(InvalidInput, match=r"^not JSON") as caught:
        LineDecoder(SPEC).decode(json.dumps(batch_line()).encode()[:cut])
    assert not caught.value.field


@pytest.mark.parametrize("missing", ["custom_id", "method", "url", "body"])
def test_missing_parts_of_the_envelope(missing: str) -> None:
    line = batch_line()
    del line[missing]
    error = refused(line)
    assert (error.field, str(error)) == (missing, f"missing field {missing!r}")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "body.messages"),
        ({"messages": None}, "body.messages"),
        ({"messages": [{"content": "a"}]}, "body.messages[0].role"),
        ({"messages": [{"role": "user"}]}, "body.messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "body.messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]},
            "body.messages[0].audio",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "body.messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "body.messages[0].content[0].text"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "body.max_tokens"),
        ({"max_completion_tokens": 0}, "body.max_completion_tokens"),
        ({"max_tokens": 1.5}, "body.max_tokens"),
        ({"temperature": "hot"}, "body.temperature"),
        ({"temperature": -1}, "body.temperature"),
        ({"top_logprobs": 3}, "body.top_logprobs"),
        ({"logprobs": True, "top_logprobs": 101}, "body.top_logprobs"),
        ({"logprobs": 3}, "body.logprobs"),
        ({"n": 2, "temperature": 0}, "body.n"),
        ({"n": 65}, "body.n"),
        ({"stop": ["a"] * 17}, "body.stop"),
        ({"stop": [""]}, "body.stop[0]"),
        ({"stop_token_ids": [1, 1_000]}, "body.stop_token_ids[1]"),
        ({"logit_bias": {"1000": 1}}, "body.logit_bias"),
        ({"logit_bias": {"x": 1}}, "body.logit_bias"),
        ({"tools": [{"type": "web_search"}]}, "body.tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "body.tools[0].function.name"),
        ({"tool_choice": "auto"}, "body.tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "body.tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "body.tool_choice",
        ),
        ({"response_format": {"type": "json_schema"}}, "body.response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "body.response_format.type"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "body.guided_regex"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "body.guided_json"),
        ({"guided_regex": ""}, "body.guided_regex"),
        ({"structured_outputs": {}}, "body.structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "body.structured_outputs"),
        ({"prompt": "a"}, "body.prompt"),
    ],
)
def test_wrong_values_in_chat(body: dict[str, Any], field: str) -> None:
    assert refused(batch_line(**body)).field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ""}, "body.prompt"),
        ({"prompt": []}, "body.prompt"),
        ({"prompt": [""]}, "body.prompt[0]"),
        ({"prompt": None}, "body.prompt"),
        ({"prompt": ["a", "b"]}, "body.prompt"),
        ({"prompt": [[1], [2]]}, "body.prompt"),
        ({"prompt": [1, "a"]}, "body.prompt"),
        ({"prompt": [1, 1_000]}, "body.prompt[1]"),
        ({"prompt": [1, -3]}, "body.prompt[1]"),
        ({"prompt": [[5, 10**30]]}, "body.prompt[0][1]"),
        ({"logprobs": True}, "body.logprobs"),
        ({"logprobs": 101}, "body.logprobs"),
        ({"max_completion_tokens": 5}, "body.max_completion_tokens"),
        ({"messages": []}, "body.messages"),
        ({"tools": [TOOL]}, "body.tools"),
        ({"echo": True}, "body.echo"),
    ],
)
def test_wrong_values_in_completions(body: dict[str, Any], field: str) -> None:
    assert refused(text_line(**body)).field == field


def test_values_of_token_ids_are_named() -> None:
    assert "1000" in str(refused(text_line(prompt=[1, 1_000])))
    assert "-3" in str(refused(text_line(prompt=[1, -3])))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", TextPrompt(text="hi")),
        (["hi"], TextPrompt(text="hi")),
        ([1, 2], TokenPrompt(ids=[1, 2])),
        ([[1, 2]], TokenPrompt(ids=[1, 2])),
    ],
)
def test_forms_of_a_prompt(prompt: Any, expected: Any) -> None:
    item = decode(text_line(prompt=prompt))
    assert (item.prompt, item.chat, item.custom_id) == (expected, False, "a")


def test_a_conversation_with_tools_and_parts() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    item = decode(
        batch_line(
            messages=messages, tools=[TOOL], tool_choice="required", model="m", logprobs=True, top_logprobs=4
        )
    )
    assert isinstance(item.prompt, ChatPrompt)
    assert item.prompt.messages[1] == {"role": "user", "content": "a\nb"}
    assert item.prompt.messages[0] == messages[0]
    assert (item.prompt.tools, item.prompt.tool_choice) == ([TOOL], "required")
    assert (item.model, item.chat, item.params.generation.logprobs) == ("m", True, 4)


def test_response_formats() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert decode(
        batch_line(response_format=schema)
    ).params.generation.structured_outputs == StructuredOutput(json=SCHEMA)
    assert decode(batch_line(response_format={"type": "text"})).params.generation.structured_outputs is None


def test_sets_of_parameters_are_told_apart() -> None:
    decoder = LineDecoder(SPEC, defaults={"temperature": 0.3, "max_tokens": 7})
    bodies: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"seed": 1},
        {"seed": 2},
        {"stop": ["a"]},
        {"stop": "a"},
        {"stop": ["b"]},
        {"logprobs": True},
        {"logit_bias": {"1": 1}},
        {"logit_bias": {"1": 2}},
        {"guided_json": {"a": 1}},
        {"ignore_eos": True},
    ]
    for _ in range(2):
        found = [decoder.decode(json.dumps(batch_line(**b)).encode()).params for b in bodies]
        assert len({p.fingerprint for p in found}) == len(bodies) - 1  # one stop, spelled in two ways
        assert all(p.generation.temperature == 0.3 and p.new_tokens == 7 for p in found)
    line = batch_line(temperature=0, max_tokens=None)
    assert decoder.decode(json.dumps(line).encode()).params.generation.temperature == 0.0


def test_many_distinct_sets_do_not_pile_up() -> None:
    decoder = LineDecoder(SPEC)
    for seed in range(5_000):
        decoder.decode(json.dumps(batch_line(seed=seed)).encode())
    assert len(decoder._table._sets) <= 4_096
