"""One batch in one process: typed rows, answers, errors of rows and of batches."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec import Struct

from headrace.contracts.errors import InvalidInput
from headrace.forge import Function, Retry, RowError, function
from headrace.forge.invoke import BatchFailed, RowOutcome, invoke, invoke_async
from tests.forge import probes


def rows(*texts: Any) -> list[bytes]:
    return [json.dumps({"text": text}).encode() for text in texts]


def run(f: Function[..., Any], raws: list[bytes]) -> list[RowOutcome]:
    return asyncio.run(invoke_async(f, raws)) if f.is_async else invoke(f, raws)


def values(outcomes: list[RowOutcome]) -> list[Any]:
    return [o.error.type if o.error else json.loads(o.value or b"null") for o in outcomes]


KINDS = [probes.count, probes.one_by_one, probes.later, probes.later_one_by_one]


@pytest.mark.parametrize("f", KINDS, ids=lambda f: f.name)
def test_rows_in_answers_out(f: Function[..., Any]) -> None:
    found = run(f, rows("a", "refuse", "bcd"))
    assert values(found) == [{"upper": "A", "length": 1}, "refused_word", {"upper": "BCD", "length": 3}]
    assert found[1].error is not None
    assert found[1].error.message == "this word is not counted"


@pytest.mark.parametrize("f", KINDS, ids=lambda f: f.name)
def test_a_row_that_cannot_be_decoded_never_reaches_the_function(f: Function[..., Any]) -> None:
    found = run(f, [b'{"text": 5}', *rows("a"), b"{", b"[1]", *rows("b")])
    assert values(found) == [
        "invalid_row",
        {"upper": "A", "length": 1},
        "invalid_row",
        "invalid_row",
        {"upper": "B", "length": 1},
    ]
    assert found[0].error is not None
    assert (found[0].error.field, found[0].error.message) == ("text", "text: expected string, got integer")


def test_a_batch_without_a_good_row_is_not_run() -> None:
    called: list[int] = []

    @function
    def f(rows: list[probes.Word]) -> list[int]:
        called.append(len(rows))
        return [1] * len(rows)

    assert values(invoke(f, [b"5", b"6"])) == ["invalid_row", "invalid_row"]
    assert not called


@pytest.mark.parametrize("f", KINDS, ids=lambda f: f.name)
@pytest.mark.parametrize("word", ["raise", "system-exit"])
def test_what_it_raises_is_the_batch_s_failure(f: Function[..., Any], word: str) -> None:
    with pytest.raises(BatchFailed) as failed:
        run(f, rows("a", "b", word, "c"))
    assert failed.value.kind == "raised"
    assert not failed.value.passing
    # A generator's answers before it are kept.
    kept = 2 if "one_by_one" in f.name else 0
    assert len(failed.value.done) == kept


def test_rows_that_are_refused_before_a_failure_are_kept_in_their_place() -> None:
    with pytest.raises(BatchFailed) as failed:
        invoke(probes.one_by_one, [*rows("a"), b"5", *rows("b", "raise"), b"6"])
    assert values(failed.value.done) == [
        {"upper": "A", "length": 1},
        "invalid_row",
        {"upper": "B", "length": 1},
    ]


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (probes.drops_some, "it returned 2 answers for 3 rows"),
        (probes.returns_nothing, "it returned NoneType and not a list of 3 answers"),
        (probes.endless, "it returned 4 answers for 3 rows"),
    ],
    ids=lambda f: getattr(f, "name", ""),
)
def test_a_wrong_number_of_answers_is_the_batch_s_failure(f: Function[..., Any], said: str) -> None:
    with pytest.raises(BatchFailed, match=said) as failed:
        invoke(f, rows("a", "drop", "b"))
    assert failed.value.kind == "wrong_count"


def test_an_answer_that_is_wrong_is_its_row_s_error() -> None:
    found = invoke(probes.wrong_answers, rows("a", "object", "wrong", "b"))
    assert values(found) == [
        {"upper": "A", "length": 1},
        "invalid_answer",
        "invalid_answer",
        {"upper": "B", "length": 1},
    ]
    assert found[2].error is not None
    assert "the answer is no Count" in found[2].error.message


def test_errors_that_pass_are_told_apart() -> None:
    @function(retry=Retry(on=(OSError,)))
    def f(rows: list[Any]) -> list[Any]:
        raise ConnectionError("later")  # a kind of OSError

    with pytest.raises(BatchFailed) as failed:
        invoke(f, [b"1"])
    assert failed.value.passing


def test_arrays_are_lists_of_numbers() -> None:
    np = pytest.importorskip("numpy", reason="numpy comes with the extra embed")

    @function
    def f(rows: list[Any]) -> list[Any]:
        return list(np.arange(4, dtype=np.float32).reshape(2, 2))

    assert values(invoke(f, [b"1", b"2"])) == [[0.0, 1.0], [2.0, 3.0]]


def test_called_directly_it_is_the_plain_function() -> None:
    assert probes.count([probes.Word("x")]) == [probes.Count("X", 1)]
    assert probes.count.__doc__ == "Upper case and length."
    assert probes.count.identity == "tests.forge.probes:count@3"


class Unreadable(Struct):
    of: probes.Word | probes.Count  # nothing in the JSON would tell which


def bad_type(rows: list[Unreadable]) -> list[int]:
    return []


def no_rows() -> list[int]:
    return []


def two_rows(a: list[int], b: list[int]) -> list[int]:
    return []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: function(bad_type), "cannot be read from JSON"),
        (lambda: function(no_rows), "takes one parameter, the list of rows"),
        (lambda: function(two_rows), "takes one parameter, the list of rows"),
        (lambda: function(name="a b")(probes._count), "not a valid name"),
        (lambda: function(version="")(probes._count), "version is 1 to 64 visible characters"),
        (lambda: function(version="1 2")(probes._count), "version is 1 to 64 visible characters"),
        (lambda: function(batching="rows:0")(probes._count), "batching 'rows:0' is unknown"),
        (lambda: function(batching="rows:100000")(probes._count), "N up to 65,536"),
        (lambda: function(size="words")(probes._count), "size 'words' is unknown"),
        (lambda: function(processes=-1)(probes._count), "processes is from 0 to 1024; got -1"),
        (lambda: function(timeout_s=0)(probes._count), "timeout_s is from 0.001"),
        (lambda: function(order="sorted")(probes._count), "order is ordered or free"),
    ],
)
def test_what_cannot_be_declared(make: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()


@pytest.mark.parametrize("type_", ["", "Bad Type", "x" * 65, "a\n"])
def test_a_row_error_has_a_type_for_programs(type_: str) -> None:
    with pytest.raises(ValueError, match="type of a RowError"):
        RowError(type_)


def test_a_function_may_use_up_the_list_that_it_gets() -> None:
    @function
    def f(rows: list[int]) -> list[int]:
        found = []
        while rows:
            found.append(rows.pop(0))
        return found

    assert values(invoke(f, [b"1", b"2"])) == [1, 2]
