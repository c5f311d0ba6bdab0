"""Checks and forms that engines share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contracts.generation import Generation
from headrace.inference_worker.engines.checks import (
    GENERATION_FIELDS,
    ParameterTable,
    check_ids,
    check_length,
    cut_at_stop,
)
from headrace.inference_worker.engines.logprobs import TokenLogprob, chat_form, completion_form
from headrace.inference_worker.engines.protocol import ItemFailed


@given(st.lists(st.integers(-5, 30), min_size=1, max_size=20), st.integers(1, 25))
def test_ids_are_refused_exactly_if_one_is_outside(ids: list[int], size: int) -> None:
    bad = [i for i, v in enumerate(ids) if not 0 <= v < size]
    if not bad:
        check_ids(ids, size)
        return
    with pytest.raises(ItemFailed) as caught:
        check_ids(ids, size)
    assert caught.value.error.field == f"prompt_token_ids[{bad[0]}]"


def test_without_a_vocabulary_the_sign_is_still_checked() -> None:
    check_ids([0, 2**31 - 1], 0)
    with pytest.raises(ItemFailed):
        check_ids([-1], 0)


@pytest.mark.parametrize(
    ("prompt", "new", "limit", "capacity", "n", "field"),
    [
        (10, 6, 16, 0, 1, None),
        (10, 7, 16, 0, 1, "max_tokens"),
        (16, 1, 16, 0, 1, "prompt"),
        (10, 6, 0, 0, 1, None),
        (10, 6, 0, 15, 1, "max_tokens"),
        (10, 6, 0, 22, 2, None),
        (10, 6, 0, 21, 2, "max_tokens"),
        (30, 6, 0, 21, 1, "prompt"),
    ],
)
def test_length(prompt: int, new: int, limit: int, capacity: int, n: int, field: str | None) -> None:
    if field is None:
        check_length(prompt, new, limit=limit, capacity=capacity, n=n)
        return
    with pytest.raises(ItemFailed) as caught:
        check_length(prompt, new, limit=limit, capacity=capacity, n=n)
    assert (caught.value.error.type, caught.value.error.field) == ("too_long", field)


def test_a_table_lets_honoured_fields_pass() -> None:
    table = ParameterTable("x", {"temperature", "n"})
    table.check(Generation(temperature=0.3, n=2))
    with pytest.raises(ItemFailed, match="top_k"):
        table.check(Generation(temperature=0.3, top_k=4))
    ParameterTable("all", GENERATION_FIELDS).check(Generation(lora="x", top_k=3))
    with pytest.raises(ValueError, match="temprature"):
        ParameterTable("x", {"temprature"})


@pytest.mark.parametrize(
    ("text", "stop", "include", "want"),
    [
        ("abcabc", ["c"], False, ("ab", "c")),
        ("abcabc", ["c"], True, ("abc", "c")),
        ("abcabc", ["ca", "b"], False, ("a", "b")),
        ("abc", ["x"], False, ("abc", None)),
    ],
)
def test_stop_strings(text: str, stop: list[str], include: bool, want: tuple[str, str | None]) -> None:
    assert cut_at_stop(text, stop, include=include) == want


TOKENS = [TokenLogprob("é", -0.5, [("é", -0.5), ("e", -1.0)]), TokenLogprob(" b", -2.0, [])]


def test_logprobs_of_a_chat() -> None:
    assert chat_form(TOKENS)["content"][0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
            {"token": "e", "logprob": -1.0, "bytes": [101]},
        ],
    }


def test_logprobs_of_a_completion() -> None:
    assert completion_form(TOKENS) == {
        "tokens": ["é", " b"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"é": -0.5, "e": -1.0}, None],
        "text_offset": [0, 1],
    }
