"""The first pass: B6, B7, B8, B11, what is bounded, and what a fingerprint stands for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headrace.client.checking import Checker, Stopped
from headrace.client.feed import Feed
from headrace.client.inputs import Input, JsonlInput, open_input
from headrace.client.problems import LineError
from headrace.contracts.codec import TASK
from tests.client.harness import acceptance, batch_line, check, plain, write


def test_repeated_custom_ids_name_both_lines(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "custom_id": "x"}, {"prompt": "b"}, "", {"prompt": "c", "custom_id": "x"}]
    found = check(write(tmp_path / "in", lines))
    assert found.errors == [LineError(4, "custom_id", "the custom_id was used before, on line 1")]
    assert (found.accepted, found.refused, found.duplicates) == (2, 1, frozenset({4}))


def test_an_id_on_a_bad_line_is_not_used_up(tmp_path: Path) -> None:
    lines = [{"prompt": "", "custom_id": "x"}, {"prompt": "a", "custom_id": "x"}]
    found = check(write(tmp_path / "in", lines))
    assert [e.line for e in found.errors] == [1]


def test_cut_json_and_a_missing_field_are_both_named(tmp_path: Path) -> None:
    lines: list = [*plain(2), '{"prompt": "cut', *plain(1, first=3), {"custom_id": "e"}, *plain(1, first=5)]
    found = check(write(tmp_path / "in", lines))
    assert [(e.line, e.field) for e in found.errors] == [(3, ""), (5, "prompt")]
    assert (found.accepted, found.refused) == (4, 2)


def test_too_large_items_are_refused_with_their_size(tmp_path: Path) -> None:
    size = 33_000_000
    lines = [
        {"prompt": "x" * size},
        *plain(1),
        batch_line(messages=[{"role": "user", "content": "y" * size}]),
    ]
    found = check(write(tmp_path / "in", lines))
    assert [e.line for e in found.errors] == [1, 3]
    assert all(f"{size // 1000:,}" in e.error and "32,000,000" in e.error for e in found.errors)


def test_the_bound_of_an_item_is_exact(tmp_path: Path) -> None:
    line = {"prompt": "x" * 20_000, "custom_id": "\u00e9" * 400, "model": "m" * 500}
    accepted = acceptance(max_payload=1 << 20)
    size = accepted.maker.size(accepted.item(json.dumps(line).encode()))
    for limit, refused in ((size, 0), (size - 1, 1)):
        found = check(write(tmp_path / "in", [line]), limit=limit)
        assert found.refused == refused


def test_what_an_item_has_besides_its_prompt_must_fit_a_message(tmp_path: Path) -> None:
    """Only the prompt can lie in the object store: a schema of a megabyte would travel in the message."""
    schema = {"type": "object", "description": "s" * 1_100_000}
    lines = [{"prompt": "p", "structured_outputs": {"json": schema}}, *plain(1, size=1_500_000)]
    found = check(write(tmp_path / "in", lines))
    assert [(e.line, e.field) for e in found.errors] == [(1, "")]
    assert "besides its prompt" in found.errors[0].error
    assert "1,047,552 at most" in found.errors[0].error


def test_a_line_over_the_line_bound_is_named_and_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [{"prompt": "x" * 5_000}, *plain(1)])
    found = check(Input(JsonlInput(path, max_line=1_000), path, "in"))
    assert [(e.line, e.field) for e in found.errors] == [(1, "")]
    assert found.accepted == 1


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":"a"}\n{"prompt":"b"}\n',
        b'{"prompt":"a"}\n{"prompt":"b"}',
        b'\xef\xbb\xbf{"prompt":"a"}\r\n{"prompt":"b"}\r\n',
        b'\n  \t\n{"prompt":"a"}\n\r\n\n{"prompt":"b"}\n\n',
        gzip.compress(b'{"prompt":"a"}\n{"prompt":"b"}\n'),
    ],
)
def test_forms_of_a_file_that_give_the_same_items(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    assert check(path).accepted == 2
    with open_input(path) as opened:
        batch = Feed(opened, acceptance()).next()
        assert batch is not None
        assert [TASK.decode(m.data).prompt.text for m in batch.messages] == ["a", "b"]  # type: ignore[union-attr]


def test_an_empty_input_is_noted(tmp_path: Path) -> None:
    for content in ("", "\n\n", "\ufeff"):
        (tmp_path / "in").write_text(content)
        found = check(tmp_path / "in")
        assert (found.accepted, found.refused) == (0, 0)
        assert "no lines" in found.notes[0]


def test_errors_are_bounded_and_counted(tmp_path: Path) -> None:
    found = check(write(tmp_path / "in", ["{}"] * 1_500))
    assert (len(found.errors), found.refused) == (1_000, 1_500)


def test_what_has_no_effect_is_noted() -> None:
    found = check([{**batch_line(user="u"), "custom_id": str(i)} for i in range(3)])
    assert found.accepted == 3
    assert found.notes[0].startswith("body.user on 3 lines has no effect")


def test_a_prompt_that_is_too_long_for_the_model_is_accepted() -> None:
    assert check([{"prompt_token_ids": [1] * 100_000}]).accepted == 1


def test_fingerprints(tmp_path: Path) -> None:
    first = check(write(tmp_path / "in", plain(5)))
    (tmp_path / "in.gz").write_bytes(gzip.compress((tmp_path / "in").read_bytes()))
    assert check(tmp_path / "in.gz").fingerprint == first.fingerprint
    assert check(plain(5)).fingerprint != check(plain(6)).fingerprint
    assert check(tmp_path / "in", mapping={"lane": "bulk"}).fingerprint != first.fingerprint
    # Another function may refuse other lines: then the same content means other items.
    lines = [{"prompt_token_ids": [5]}, {"prompt_token_ids": [999]}]
    narrow = check(lines, spec=acceptance_spec(vocab_size=100))
    wide = check(lines)
    assert (narrow.refused, wide.refused) == (1, 0)
    assert narrow.fingerprint != wide.fingerprint
    assert check(plain(3), spec=acceptance_spec(vocab_size=100)).fingerprint == check(plain(3)).fingerprint


def acceptance_spec(**fields: int):
    import msgspec

    from tests.client.harness import SPEC

    return msgspec.structs.replace(SPEC, **fields)


def test_a_pass_can_be_stopped(tmp_path: Path) -> None:
    with open_input(write(tmp_path / "in", plain(10))) as opened:
        checker = Checker(opened, acceptance(), lambda _bytes, _items: None)
        checker.stop.set()
        with pytest.raises(Stopped):
            checker.run({})


def test_the_second_pass_gives_what_the_first_accepted(tmp_path: Path) -> None:
    lines: list = [*plain(3), "{", *plain(1), {"prompt": ""}, *plain(2_000, first=3)]
    path = write(tmp_path / "in", lines)
    found = check(path)
    with open_input(path) as opened:
        feed = Feed(opened, acceptance(), skip=found.duplicates)
        batches = []
        while (batch := feed.next()) is not None:
            batches.append(batch)
    assert [len(b.messages) for b in batches] == [999, 999, 5]
    assert found.accepted == batches[-1].end == 2_003
    tasks = [TASK.decode(m.data) for b in batches for m in b.messages]
    assert [(t.index, t.custom_id) for t in tasks] == [(i, f"id-{i}") for i in range(2_003)]
    # From the middle of a batch, as a resumed run does.
    at = batches[0].after(500)
    with open_input(path) as opened:
        resumed = Feed(
            opened, acceptance(), skip=found.duplicates, after_line=at.lines[0] - 1, first_index=500
        )
        again = resumed.next()
        assert again is not None
        assert (again.first, again.lines[0], TASK.decode(again.messages[0].data).custom_id) == (
            500,
            at.lines[0],
            "id-500",
        )


def test_batches_are_bounded_in_bytes(tmp_path: Path) -> None:
    with open_input(write(tmp_path / "in", plain(12, size=900_000))) as opened:
        feed = Feed(opened, acceptance())
        sizes = [len(b.messages) for b in iter(feed.next, None)]
    assert sizes == [5, 5, 2]


def test_large_defaults_count_in_the_size_of_each_item(tmp_path: Path) -> None:
    defaults = {"allowed_token_ids": list(range(1_000))}
    found = check(write(tmp_path / "in", plain(2, size=1_000)), defaults=defaults, max_payload=5_000)
    assert found.refused == 2
    assert check(write(tmp_path / "in", plain(2, size=1_000)), max_payload=5_000).refused == 0
