"""What llama.cpp is asked and what it answers, without loading it."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from headrace.contracts.errors import InvalidInput
from headrace.contracts.generation import Generation, StructuredOutput
from headrace.contracts.messages import ChatPrompt, TextPrompt, TokenPrompt
from headrace.inference_worker.engines.checks import GENERATION_FIELDS
from headrace.inference_worker.engines.llamacpp_answer import Answer, decode_chunk
from headrace.inference_worker.engines.llamacpp_errors import failure
from headrace.inference_worker.engines.llamacpp_request import (
    DIRECT,
    SPECIAL,
    TABLE,
    build_request,
    check_parameters,
)
from headrace.inference_worker.engines.llamacpp_server import LlamaServer, LlamaSettings, restore_signals
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed, Work

REFUSED = {
    "min_tokens": 1,
    "stop_token_ids": [1],
    "bad_words": ["x"],
    "include_stop_str_in_output": True,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 3,
    "allowed_token_ids": [1],
    "priority": 1,
    "lora": "x",
}


def work(prompt: Any = None, *, name: str = "w", **fields: Any) -> Work:
    return Work(id=name, prompt=prompt or TextPrompt(text="x"), params=Generation(**fields), max_tokens=9)


def request(item: Work) -> dict[str, Any]:
    return build_request(item, seed=0, cache_prompt=True)


def test_every_field_is_honoured_or_refused() -> None:
    """A field that is added to Generation is refused until someone decides."""
    assert set(DIRECT) | set(SPECIAL) | set(REFUSED) == set(GENERATION_FIELDS)
    for name, value in REFUSED.items():
        with pytest.raises(ItemFailed) as caught:
            TABLE.check(Generation(**{name: value}))
        assert (caught.value.error.type, caught.value.error.field) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
        ({"repetition_penalty": 1.2}, {"repeat_penalty": 1.2, "repeat_last_n": -1}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5, "repeat_last_n": -1}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"seed": 12}, {"seed": 12}),
        ({"seed": 2**40 + 3}, {"seed": (2**40 + 3) % 0xFFFFFFFF}),
        ({"logit_bias": {5: -1.0}}, {"logit_bias": [[5, -1.0]]}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": 0}, {"logprobs": 1}),
        ({"structured_outputs": StructuredOutput(grammar='root ::= "a"')}, {"grammar": 'root ::= "a"'}),
        (
            {"structured_outputs": StructuredOutput(choice=['a"b', "c"])},
            {"grammar": 'root ::= "a\\"b" | "c"'},
        ),
    ],
)
def test_fields_become_the_servers(fields: dict[str, Any], want: dict[str, Any]) -> None:
    made = request(work(**fields))
    assert want.items() <= made.items()
    assert made["max_tokens"] == 9
    assert made["stream"] is True


def test_what_is_left_open_is_left_to_the_server() -> None:
    assert not {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repeat_penalty",
        "stop",
        "logprobs",
        "grammar",
    } & set(request(work()))


def test_an_item_without_a_seed_draws_its_own() -> None:
    seeds = [request(work(name=name))["seed"] for name in ("a", "b", "a")]
    assert seeds[0] == seeds[2] != seeds[1]
    assert request(work(seed=0))["seed"] == 0


def test_each_form_of_prompt() -> None:
    assert request(work(TokenPrompt(ids=[1, 2])))["prompt"] == [1, 2]
    assert request(work(TextPrompt(text="hi")))["prompt"] == "hi"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = request(work(ChatPrompt(messages=[{"role": "user", "content": parts}], tools=tools), logprobs=2))
    assert made["messages"] == [{"role": "user", "content": "ab"}]
    assert made["tools"] == tools
    assert (made["logprobs"], made["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize(
    ("item", "type_", "field"),
    [
        (work(n=3, temperature=1.0), "invalid_parameter", "n"),
        (
            work(structured_outputs=StructuredOutput(regex="a")),
            "unsupported_parameter",
            "structured_outputs.regex",
        ),
        (
            work(structured_outputs=StructuredOutput(json={})),
            "unsupported_parameter",
            "structured_outputs.json",
        ),
        (
            work(structured_outputs=StructuredOutput(grammar="%llguidance {}")),
            "unsupported_parameter",
            "structured_outputs.grammar",
        ),
    ],
)
def test_what_it_would_do_wrong_is_refused(item: Work, type_: str, field: str) -> None:
    with pytest.raises(ItemFailed) as caught:
        check_parameters(item, slots=2)
    assert (caught.value.error.type, caught.value.error.field) == (type_, field)


@pytest.mark.parametrize("schema", ['{"a', "[1]", "false"])
def test_a_schema_is_an_object(schema: str) -> None:
    chat = ChatPrompt(messages=[{"role": "user", "content": "x"}])
    with pytest.raises(ItemFailed) as caught:
        request(work(chat, structured_outputs=StructuredOutput(json=schema)))
    assert caught.value.error.field == "structured_outputs.json"


# --- the answer -------------------------------------------------------------------------------------
def gather(item: Work, *events: dict[str, Any]) -> Answer:
    answer = Answer(item)
    for event in events:
        answer.add(decode_chunk(json.dumps(event).encode()))
    return answer


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


def test_text_is_joined_and_usage_taken() -> None:
    output = gather(
        work(),
        {"choices": [{"index": 0, "text": "he", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "llo", "finish_reason": None}]},
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage(4, 2, 1)},
    ).output()
    assert output.choices[0].text == "hello"
    assert output.choices[0].finish_reason == "length"
    assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.usage.cached_tokens) == (
        4,
        2,
        1,
    )


def test_choices_are_kept_apart() -> None:
    output = gather(
        work(n=2),
        {"choices": [{"index": 1, "text": "b"}]},
        {"choices": [{"index": 0, "text": "a"}]},
        {"choices": [{"index": 1, "finish_reason": "stop"}], "usage": usage(3, 1)},
        {"choices": [{"index": 0, "finish_reason": "stop"}], "usage": usage(3, 1)},
    ).output()
    assert [c.text for c in output.choices] == ["a", "b"]
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (3, 2)


def test_tool_calls_are_put_together() -> None:
    piece = {"index": 0, "id": "call1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ":1}"}}
    choice = (
        gather(
            work(ChatPrompt(messages=[{"role": "user", "content": "x"}])),
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]},
            {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]},
            {"choices": [{"index": 0, "delta": {"tool_calls": [rest]}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        )
        .output()
        .choices[0]
    )
    assert choice.finish_reason == "tool_calls"
    assert choice.tool_calls == [
        {"id": "call1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    ]


def test_an_answer_without_an_end_is_a_death() -> None:
    with pytest.raises(EngineDied):
        gather(work(), {"choices": [{"index": 0, "text": "he"}]}).output()


def test_an_error_is_the_items() -> None:
    error = {"code": 400, "message": "failed to parse grammar", "type": "invalid_request_error"}
    with pytest.raises(ItemFailed) as caught:
        gather(work(), {"error": error}).output()
    assert (caught.value.error.type, caught.value.error.field) == ("invalid_parameter", "structured_outputs")


@pytest.mark.parametrize(
    ("message", "kind", "code", "want"),
    [
        ("request (600 tokens) exceeds", "exceed_context_size_error", 400, "too_long"),
        ("Prompt contains invalid tokens", "invalid_request_error", 400, "invalid_token"),
        ("JSON schema error at #: wat", "invalid_request_error", 400, "invalid_parameter"),
        ("top_k must be a number", "invalid_request_error", 400, "invalid_parameter"),
        ("decode failed", "server_error", 500, "engine_error"),
    ],
)
def test_errors_have_types(message: str, kind: str, code: int, want: str) -> None:
    error = failure(message, kind, code)
    assert isinstance(error, ItemFailed)
    assert error.error.type == want


def test_unavailable_is_a_death() -> None:
    assert isinstance(failure("Loading model", "unavailable_error", 503), EngineDied)


# --- loading ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 a zip"])
def test_a_path_that_is_no_model_is_named(tmp_path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    settings = LlamaSettings(path=path, slots=1, context=64, threads=1, batch=32, gpu_layers=0, verbosity=0)
    with pytest.raises(InvalidInput, match=r"model\.gguf") as caught:
        LlamaServer(settings)
    assert caught.value.field == "model"


def test_signal_handlers_are_set_again() -> None:
    def handler(*_: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        restore_signals()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
