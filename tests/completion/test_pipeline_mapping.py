"""What a file may say, and what a row becomes by it: no broker, no data plane."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.client.pipelines import read_pipeline
from headrace.completion.stage_mapping import Child, Mapper, Unfit, Upstream
from headrace.contracts.errors import InvalidInput, NotFound
from headrace.contracts.messages import ChatPrompt, Row, TextPrompt
from headrace.contracts.pipeline import MAX_FAN_OUT
from headrace.contracts.pipeline_checks import check_pipeline
from headrace.contracts.pipeline_paths import ROOTS, parse_path, parse_template
from tests.completion.pipes import DOCUMENTS, pipeline, stage

HEAD = 'name = "p"\ninput = "rows.jsonl"\n[[stage]]\nname = "a"\nfunction = "f"\n'


def row_of(child: Child) -> Any:
    """The value of a child that is a row."""
    assert isinstance(child.prompt, Row), child
    return msgspec.json.decode(child.prompt.value)


def children(value: Any, **fields: Any) -> list[Child]:
    """What a row with this value becomes in a stage that is declared so."""
    return Mapper(stage("s", **fields)).children(Upstream(7, value=msgspec.json.encode(value), custom_id="c"))


# --- rows -------------------------------------------------------------------------------------------
def test_a_value_goes_on_as_it_stands() -> None:
    raw = b'{"n": 12345678901234567890123, "f": 1.0e2,  "u": "\\u00e9"}'
    (child,) = Mapper(stage("s")).children(Upstream(0, value=raw, custom_id="c"))
    assert isinstance(child.prompt, Row)
    assert bytes(child.prompt.value) == raw
    assert (child.custom_id, child.kept, child.unfit) == ("c", None, None)


def test_paths_rows_and_templates() -> None:
    value = {"t": "x", "n": [1, {"deep": None}], "true": True}
    assert row_of(children(value, row="value.n.1")[0]) == {"deep": None}
    assert row_of(children(value, row={"a": "value.t", "i": "index", "id": "id"})[0]) == {
        "a": "x",
        "i": 7,
        "id": "c",
    }
    (asked,) = children(value, prompt="{{{value.t}}}: {value.n} {value.true}")
    assert asked.prompt == TextPrompt(text='{x}: [1,{"deep":null}] true')
    (chat,) = children(value, chat="{value.t}", system="be {index}")
    assert chat.prompt == ChatPrompt(
        messages=[{"role": "system", "content": "be 7"}, {"role": "user", "content": "x"}]
    )


def test_each_element_is_a_row_with_what_it_keeps() -> None:
    value = {"title": "T", "q": [{"t": "a"}, {"t": "b", "skip": True}, {}]}
    found = children(value, each="value.q", row="item.t", keep=["value.title", "item.skip"])
    assert [row_of(c) if c.prompt else c.unfit for c in found][:2] == ["a", "b"]
    assert found[2].unfit is not None
    assert (found[2].unfit.type, found[2].unfit.field) == ("feed_missing", "row")
    assert [msgspec.json.decode(c.kept or b"null") for c in found[:2]] == [
        {"title": "T", "skip": None}, {"title": "T", "skip": True}
    ]  # fmt: skip
    assert {c.custom_id for c in found} == {None}
    named = children(value, each="value.q", row="item.t", keep={"of": "value.title"})
    assert named[0].kept == b'{"of":"T"}'
    assert len(children(value, each="value.q", where="item.skip")) == 1
    assert children({"q": []}, each="value.q") == []


@pytest.mark.parametrize(
    ("value", "fields", "kind", "field"),
    [
        ({"q": 5}, {"each": "value.q"}, "each", "each"),
        ({"q": "text"}, {"each": "value.q"}, "each", "each"),
        ({}, {"each": "value.q"}, "missing", "each"),
        ([0] * (MAX_FAN_OUT + 1), {"each": "value"}, "too_many", "each"),
        ([1], {"row": "value.-1"}, "missing", "row"),
        ([1], {"row": "value.1"}, "missing", "row"),
        ({"a": 1}, {"row": {"x": "value.b"}}, "missing", "row"),
        ({"a": ""}, {"prompt": "{value.a}"}, "empty", "prompt"),
        ({"a": ""}, {"prompt": "{value.b}"}, "missing", "prompt"),
        ({"a": ""}, {"row": "text"}, "missing", "row"),
        ({"a": ""}, {"row": "kept.a"}, "missing", "row"),
    ],
)
def test_what_is_not_there_is_one_unfit_row(
    value: Any, fields: dict[str, Any], kind: str, field: str
) -> None:
    (child,) = children(value, **fields)
    assert child.prompt is None
    assert child.unfit is not None
    assert (child.unfit.type, child.unfit.field) == (f"feed_{kind}", field)
    assert len(child.unfit.message) < 400


def test_text_of_a_model_as_json_and_as_lines() -> None:
    row = Upstream(0, text='["a", "b"]\n')
    assert [row_of(c) for c in Mapper(stage("s", each="json")).children(row)] == ["a", "b"]
    lines = Upstream(0, text="  one \n\n two\r\n")
    assert [row_of(c) for c in Mapper(stage("s", each="lines")).children(lines)] == ["one", "two"]
    (wrong,) = Mapper(stage("s", each="json")).children(Upstream(0, text="no JSON"))
    assert wrong.unfit is not None
    assert wrong.unfit.type == "feed_unreadable"
    assert row_of(Mapper(stage("s", row="text")).children(Upstream(0, text=""))[0]) == ""


def test_collected_rows_are_an_array_or_a_prompt() -> None:
    mapper = Mapper(stage("s", collect=True, row="value.t"))
    members = [mapper.member(Upstream(i, value=msgspec.json.encode({"t": i}))) for i in range(3)]
    assert row_of(mapper.collected(members)) == [0, 1, 2]
    assert row_of(mapper.collected([])) == []
    with pytest.raises(Unfit):
        mapper.member(Upstream(0, value=b"{}"))
    prompt = Mapper(stage("s", collect=True, row="text", prompt="Sum up:\n{rows}"))
    texts = [prompt.member(Upstream(0, text=t)) for t in ("one", "two")]
    assert prompt.collected(texts).prompt == TextPrompt(text="Sum up:\none\n\ntwo")


def test_whatever_a_function_returns_the_same_comes_of_it_twice() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)

    def anything(depth: int = 3) -> Any:
        kinds = [None, True, 3, -1.5, "", "text", "{x}"]
        if depth and rng.random() < 0.6:
            if rng.random() < 0.5:
                return [anything(depth - 1) for _ in range(rng.randrange(4))]
            return {rng.choice("abqt"): anything(depth - 1) for _ in range(rng.randrange(4))}
        return rng.choice(kinds)

    declared = [
        {"each": "value.q", "row": "item.t", "keep": ["value.a", "item.b"]}, {"prompt": "{value.t} {value.a.b}"},
        {"each": "value", "where": "item"}, {"row": {"a": "value.a", "b": "value.b.0"}},
        {"each": "json", "chat": "{item}"},
    ]  # fmt: skip
    for _ in range(300):
        data = msgspec.json.encode(anything())
        row = Upstream(1, value=data, text=data.decode())
        for fields in declared:
            once, twice = (Mapper(stage("s", **fields)).children(row) for _ in range(2))
            assert msgspec.json.encode(once) == msgspec.json.encode(twice)
            assert all((c.prompt is None) != (c.unfit is None) for c in once)


# --- paths and templates ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "value.",
        "value..a",
        "other",
        "text.a",
        "value.{a}",
        "item",
        "value." + ".".join("a" * 16),
        "a b",
    ],
)
def test_what_is_no_path(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_path(text, ROOTS)


@pytest.mark.parametrize("text", ["{value", "value}", "{}", "{{value}", "{other}", "{value.{text}}"])
def test_what_is_no_template(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_template(text, ROOTS)


def test_templates_of_random_text_come_back() -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice(string.ascii_letters + "{} \n") for _ in range(rng.randrange(30)))
        assert (
            "".join(str(p) for p in parse_template(text.replace("{", "{{").replace("}", "}}"), ROOTS)) == text
        )


# --- declarations -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("stages", "field"),
    [
        ([stage("first")], "first.name"),
        ([stage("x", row="value", prompt="{text}")], "x.prompt"),
        ([stage("x", chat="a", prompt="b", collect=True)], "x.chat"),
        ([stage("x", system="only")], "x.system"),
        ([stage("x", after="y"), stage("y")], "x.from"),
        ([stage("x", after="x")], "x.from"),
        ([stage("x", row="item")], "x.row"),
        ([stage("x", prompt="{rows}")], "x.prompt"),
        ([stage("x", collect=True, prompt="{value}")], "x.prompt"),
        ([stage("x", collect=True, each="value")], "x.each"),
        ([stage("x", collect=True, keep=["value"])], "x.keep"),
        ([stage("x", collect="parent")], "x.collect"),
        ([stage("x", each="value"), stage("y", collect=True), stage("z", collect="parent")], "z.collect"),
        ([stage("x", keep=["value.a", "kept.a"])], "x.keep"),
        ([stage("x", job="p-first")], "x.job"),
        ([stage("x", job="y"), stage("z", job="y")], "z.job"),
        ([stage("x", each="value.a}")], "x.each"),
        ([stage("n" * 127)], "n" * 127 + ".job"),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_be(stages: list[Any], field: str) -> None:
    with pytest.raises(InvalidInput) as found:
        check_pipeline(pipeline("p", *stages))
    assert found.value.field == f"stage.{field}"
    assert f"stage {field.rpartition('.')[0]}" in str(found.value)


def test_the_first_stage_takes_the_input() -> None:
    spec = pipeline("p")
    for fields in ({"row": "value"}, {"each": "value"}, {"collect": True}, {"keep": ["id"]}, {"after": "x"}):
        with pytest.raises(InvalidInput, match="takes the lines of the input as they are"):
            check_pipeline(msgspec.structs.replace(spec, stages=[stage("first", **fields)]))
    check_pipeline(DOCUMENTS)


# --- files --------------------------------------------------------------------------------------------
def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "named.toml"
    path.write_text(text, "utf-8")
    return read_pipeline(path)


@pytest.mark.parametrize(
    ("text", "field", "part"),
    [
        (HEAD + "params = { max_tokens = 0 }\n", "stage.a.params.max_tokens", ">= 1"),
        (HEAD + "params = { n = 2, temperature = 0 }\n", "stage.a.params", "equal choices"),
        (HEAD + "params = { unknown = 1 }\n", "stage.a.params", "unknown"),
        (HEAD + "misspelt = 1\n", "stage.a", "misspelt"),
        (HEAD + "max_failed = 2\n", "stage.a.max_failed", "<= 1"),
        (HEAD + "collect = 'all'\n", "stage.a.collect", "'all'"),
        (HEAD + "lane = 'slow'\n", "stage.a.lane", "slow"),
        (HEAD + '[[stage]]\nname = "b c"\nfunction = "f"\n', "stage.b c.name", "regex"),
        (HEAD + '[[stage]]\nfunction = "f"\n', "stage.1", "name"),
        (HEAD.replace('"p"', '"p q"'), "name", "regex"),
        (HEAD.replace("input", "inputs"), None, "inputs"),
        (HEAD.replace('input = "rows.jsonl"\n', ""), "input", "rows of the first stage"),
        ("name = 'p'\ninput = 'x'\n", None, "stage"),
        ("name = 'p'\nstage = []\ninput = 'x'\n", "stage", "length >= 1"),
        ("deadline = 'soon'\n" + HEAD, "deadline", "soon"),
        ("not toml", None, "no TOML"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, field: str | None, part: str) -> None:
    with pytest.raises(InvalidInput) as found:
        read(tmp_path, text)
    assert (found.value.field, part in str(found.value)) == (field, True), str(found.value)


def test_a_file_that_is_right(tmp_path: Path) -> None:
    declared = read(
        tmp_path, HEAD.replace('name = "p"\n', "") + 'params = { max_tokens = 3 }\nlane = "bulk"\n'
    )
    assert (declared.spec.name, declared.input) == ("named", tmp_path / "rows.jsonl")
    assert (declared.options.defaults, declared.options.lane.value) == ({"max_tokens": 3}, "bulk")
    assert (declared.options.pipeline, declared.options.stage, declared.options.form) == (
        "named",
        "a",
        "rows",
    )
    with pytest.raises(NotFound):
        read_pipeline(tmp_path / "none.toml")
