"""The envelope of a submit request: what is taken off, what is left for the line, what is refused by name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contracts.errors import HeadraceError, InvalidInput
from headrace.contracts.names import Lane
from headrace.gateway.requests import MAX_ITEMS, read_request


def read(**fields):
    return read_request(msgspec.json.encode(fields), "default")


def test_one_item_is_the_request_without_its_envelope():
    got = read(function="f", job="j", lane="urgent", tenant="acme", prompt="hi", max_tokens=5, custom_id="c")
    assert (got.function, got.job, got.lane, got.tenant, got.single, got.rows) == (
        "f",
        "j",
        Lane.URGENT,
        "acme",
        True,
        False,
    )
    assert [msgspec.json.decode(line) for line in got.lines] == [
        {"prompt": "hi", "max_tokens": 5, "custom_id": "c"}
    ]


def test_what_the_envelope_does_not_say_has_defaults():
    got = read(prompt="hi")
    assert (got.function, got.lane, got.tenant) == ("generate", Lane.NORMAL, "default")
    assert got.job != read(prompt="hi").job
    assert got.job[14] == "7"


def test_items_are_lines_in_their_order():
    got = read(items=[{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}])
    assert not got.single
    assert got.lines == [b'{"prompt":"a"}', b'{"messages":[{"role":"user","content":"b"}]}']


def test_a_row_is_any_json_value_as_it_is():
    assert read(row={"a": [1, None]}).lines == [b'{"a":[1,null]}']
    assert read(row=None).lines == [b"null"]
    got = read(items=[{"row": 1}, {"row": "x"}])
    assert (got.rows, got.lines) == (True, [b"1", b'"x"'])


def test_numbers_and_escapes_of_an_item_stay_as_they_were_written():
    got = read_request(rb'{"prompt":"\u00e9\n","temperature":0.70,"logit_bias":{"5":1e1}}', "default")
    assert got.lines == [rb'{"logit_bias":{"5":1e1},"prompt":"\u00e9\n","temperature":0.70}']


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"job": "j"}, "prompt"),
        ({"prompt": "x", "job": "a.b"}, "job"),
        ({"prompt": "x", "job": "a\n"}, "job"),
        ({"prompt": "x", "job": ""}, "job"),
        ({"prompt": "x", "job": 5}, "job"),
        ({"prompt": "x", "function": "*"}, "function"),
        ({"prompt": "x", "tenant": "a b"}, "tenant"),
        ({"prompt": "x", "lane": "fast"}, "lane"),
        ({"items": []}, "items"),
        ({"items": [{"prompt": "x"}] * (MAX_ITEMS + 1)}, "items"),
        ({"items": {"prompt": "x"}}, "items"),
        ({"items": ["x"]}, "items[0]"),
        ({"items": [{"prompt": "x"}, 5]}, "items[1]"),
        ({"items": [{"prompt": "x"}], "max_tokens": 5}, "max_tokens"),
        ({"items": [{"prompt": "x"}, {"row": 1}]}, "items"),
        ({"items": [{"row": 1, "max_tokens": 1}]}, "items[0].max_tokens"),
        ({"row": 1, "prompt": "x"}, "prompt"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields, field):
    with pytest.raises(InvalidInput) as caught:
        read(**fields)
    assert caught.value.field == field
    assert caught.value.code != "invalid"


def test_a_name_that_is_none_is_told_as_the_command_tells_it():
    with pytest.raises(InvalidInput, match=r"job 'a b' is not a valid name: use 1 to 128 of the characters"):
        read(prompt="x", job="a b")


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b'"x"', b"{", b'{"prompt":"\xff"}', b"[" * 100_000, b'{"prompt":NaN}']
)
def test_what_is_no_request_is_refused(data):
    with pytest.raises(InvalidInput):
        read_request(data, "default")


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.integers(0, 5) | st.text(), lambda i: st.lists(i) | st.dictionaries(
        st.sampled_from(["items", "job", "lane", "row", "prompt", "x"]), i), max_leaves=8
).map(msgspec.json.encode))  # fmt: skip
def test_any_bytes_are_a_request_or_refused(data):
    try:
        got = read_request(data, "default")
    except HeadraceError:
        return
    assert got.lines
