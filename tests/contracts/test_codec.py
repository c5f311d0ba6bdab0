"""Codecs: what is written is read back, and no bytes whatever raise anything but `Undecodable`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.contracts import codec
from headrace.contracts.errors import Undecodable
from headrace.contracts.generation import Generation
from headrace.contracts.messages import (
    Choice,
    DeadLetter,
    ItemError,
    Manifest,
    Result,
    Row,
    Task,
    TextPrompt,
    TokenPrompt,
    Usage,
)

GOLDEN = {path.stem: path.read_bytes() for path in Path(__file__).with_name("golden").glob("*.json")}
BY_GOLDEN = [(schema, data) for schema in codec.SCHEMAS for name, data in GOLDEN.items()
             if name.startswith(schema.name.replace("/", "-"))]  # fmt: skip
SECRET = "a text that no error may quote"
BASE = b'{"job":"a","index":0,"function":"f","prompt":%b}'

tokens = st.from_regex(r"[A-Za-z0-9_-]{1,128}", fullmatch=True)
# JSON carries no lone surrogates.
text = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
prompts = st.one_of(
    st.builds(TextPrompt, text=text.filter(bool)),
    st.builds(TokenPrompt, ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)),
    st.builds(Row, value=json_values.map(lambda value: msgspec.Raw(msgspec.json.encode(value)))),
)
generations = st.builds(
    Generation,
    max_tokens=st.none() | st.integers(1, 1_048_576),
    temperature=st.none() | st.floats(0.1, 10.0),
    top_p=st.none() | st.floats(0.01, 1.0),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none()
    | st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), max_size=4),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100.0, 100.0), max_size=4),
)
tasks = st.builds(
    Task,
    job=tokens,
    index=st.integers(0, 2**53 - 1),
    function=tokens,
    prompt=prompts,
    params=generations,
    generation=st.integers(1, 10_000),
    custom_id=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=512),
    submitted_us=st.integers(0, 2**62),
)
results = st.builds(
    Result,
    job=tokens,
    index=st.integers(0, 2**53 - 1),
    function=tokens,
    status=st.sampled_from(["ok", "failed", "dead", "cancelled"]),
    choices=st.lists(st.builds(Choice, text=text, logprobs=json_values), max_size=3),
    usage=st.builds(
        Usage, prompt_tokens=st.integers(0, 2**53 - 1), completion_tokens=st.integers(0, 2**53 - 1)
    ),
    error=st.none() | st.builds(ItemError, type=st.from_regex(r"[a-z0-9_]{1,64}", fullmatch=True)),
    task=st.none() | tasks,
)
dead_letters = st.builds(
    DeadLetter,
    origin=tokens,
    subject=st.text(st.characters(exclude_categories=["Cs"]), max_size=1024),
    reason=st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    data=st.binary(max_size=2000),
    headers=st.dictionaries(text, text, max_size=3),
)


@given(tasks)
def test_a_task_is_read_back_as_written(task):
    assert codec.TASK.decode(codec.TASK.encode(task), {codec.SCHEMA_HEADER: "task/1"}) == task


@given(results)
def test_a_result_is_read_back_as_written(result):
    assert codec.RESULT.decode(codec.RESULT.encode(result)) == result


@given(dead_letters)
def test_a_dead_letter_keeps_every_byte(letter):
    assert codec.DEAD_LETTER.decode(codec.DEAD_LETTER.encode(letter)) == letter


@given(st.data())
@settings(max_examples=300)
def test_damaged_messages_are_undecodable_or_still_a_message(data):
    schema, golden = data.draw(st.sampled_from(BY_GOLDEN))
    at = data.draw(st.integers(0, len(golden)))
    cut = data.draw(st.integers(0, 8))
    damaged = golden[:at] + data.draw(st.binary(max_size=8)) + golden[at + cut :]
    try:
        message = schema.decode(damaged)
    except Undecodable:
        return
    assert schema.decode(schema.encode(message)) == message


@given(st.binary(max_size=300), st.sampled_from(codec.SCHEMAS))
@example(b"", codec.TASK)
@example(b"null", codec.TASK)
@example(b"[" * 200_000, codec.RESULT)
def test_any_bytes_at_all_are_undecodable_at_worst(data, schema):
    with suppress(Undecodable):
        schema.decode(data)


@given(json_values, st.sampled_from(codec.SCHEMAS))
def test_any_json_at_all_is_undecodable_at_worst(value, schema):
    with suppress(Undecodable):
        schema.decode(msgspec.json.encode(value))


HOSTILE = {
    "a text that is not UTF-8": BASE % b'{"type":"text","text":"\xff\xfe"}',
    "a row that is not UTF-8": BASE % b'{"type":"row","value":"\xff\xfe"}',
    "a lone surrogate": BASE % rb'{"type":"text","text":"\ud800"}',
    "NaN": BASE % b'{"type":"row","value":NaN}',
    "Infinity": BASE % b'{"type":"row","value":-Infinity}',
    "a number out of range": BASE % b'{"type":"chat","messages":[{"a":1e999}]}',
    "an integer out of range": BASE % (b'{"type":"chat","messages":[{"a":' + b"9" * 10_000 + b"}]}"),
    "a huge index": b'{"job":"a","index":'
    + b"9" * 5_000
    + b',"function":"f","prompt":{"type":"text","text":"x"}}',
    "an index over 2^53": b'{"job":"a","index":%d,"function":"f","prompt":{"type":"text","text":"x"}}'
    % (2**53),
    "a negative index": b'{"job":"a","index":-1,"function":"f","prompt":{"type":"text","text":"x"}}',
    "an index that is a float": b'{"job":"a","index":0.5,"function":"f","prompt":{"type":"text","text":"x"}}',
    "an index that is text": b'{"job":"a","index":"0","function":"f","prompt":{"type":"text","text":"x"}}',
    "a job with a dot": b'{"job":"a.b","index":0,"function":"f","prompt":{"type":"text","text":"x"}}',
    "a job that ends in a line feed": BASE.replace(b'"a"', rb'"a\n"') % b'{"type":"text","text":"x"}',
    "deep nesting in a row": BASE % (b'{"type":"row","value":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep nesting in a chat": BASE
    % (b'{"type":"chat","messages":[{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"),
    "deep nesting of an unknown field": b'{"zzz":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "no prompt": b'{"job":"a","index":0,"function":"f"}',
    "an empty prompt": BASE % b'{"type":"text","text":""}',
    "no token ids": BASE % b'{"type":"tokens","ids":[]}',
    "a negative token id": BASE % b'{"type":"tokens","ids":[1,-1]}',
    "an unknown kind of prompt": BASE % b'{"type":"image","text":"x"}',
    "an unknown parameter": BASE[:-1] % b'{"type":"text","text":"x"}' + b',"params":{"tempreature":1}}',
    "a parameter out of bounds": BASE[:-1] % b'{"type":"text","text":"x"}' + b',"params":{"top_p":1.5}}',
    "more bytes after it": BASE % b'{"type":"text","text":"x"}' + b" {}",
    "an array": b"[]",
    "UTF-16": (BASE % b'{"type":"text","text":"x"}').decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + BASE % b'{"type":"text","text":"x"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_undecodable(name):
    with pytest.raises(Undecodable):
        codec.TASK.decode(HOSTILE[name])


@pytest.mark.parametrize(
    "data",
    [
        BASE % (b'{"type":"text","text":5,"x":"' + SECRET.encode() + b'"}'),
        BASE % (b'{"type":"' + SECRET.encode()[:10] + b'\xff"}'),
        (BASE % (b'{"type":"text","text":"' + SECRET.encode() + b'"}'))[:-5],
        BASE[:-1] % (b'{"type":"text","text":"' + SECRET.encode() + b'"}') + b',"tenant":5}',
    ],
)
def test_an_error_never_quotes_the_payload(data):
    with pytest.raises(Undecodable) as caught:
        codec.TASK.decode(data)
    assert SECRET[:10] not in str(caught.value)


def test_another_schema_is_refused_and_none_is_taken_as_the_expected_one():
    data = codec.MANIFEST.encode(Manifest(job="j", input_fingerprint="0" * 16))
    assert codec.MANIFEST.decode(data, {}) == codec.MANIFEST.decode(data, None)
    for wrong in ("task/1", "manifest/2", "", "x" * 10_000):
        with pytest.raises(Undecodable, match="schema") as caught:
            codec.MANIFEST.decode(data, {codec.SCHEMA_HEADER: wrong})
        assert len(str(caught.value)) < 300


def test_unknown_fields_of_a_message_are_passed_over():
    """A newer producer may say more: an older consumer takes what it knows."""
    task = codec.TASK.decode(BASE[:-1] % b'{"type":"text","text":"x"}' + b',"new_field":{"a":[1]}}')
    assert task.prompt == TextPrompt(text="x")


@given(json_values)
def test_a_fingerprint_does_not_depend_on_the_order_of_keys(value):
    turned = _turned(value)
    assert codec.fingerprint(value) == codec.fingerprint(turned)
    assert len(codec.fingerprint(value)) == 16


def _turned(value):
    if isinstance(value, dict):
        return {key: _turned(value[key]) for key in reversed(value)}
    return [_turned(one) for one in value] if isinstance(value, list) else value
