"""Results as files: the three formats, whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec import Raw

from headrace.client.openai_output import openai_line
from headrace.client.writers import jsonl_line, write_results
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import Choice, ItemError, Result, Timings, Usage

pytestmark = pytest.mark.anyio
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def outcome(index: int, **fields: Any) -> Result:
    fields.setdefault("status", "ok")
    return Result(job="j", index=index, function="generate", **fields)


OK = outcome(
    0,
    custom_id="a",
    choices=[Choice(text="é", finish_reason="length")],
    usage=Usage(prompt_tokens=3, completion_tokens=2),
    model="m",
    attempt=2,
    chat=True,
    timings=Timings(finished_us=1_700_000_000_500_000),
)
SEVERAL = outcome(1, choices=[Choice(text="x"), Choice(text="y")])
CALLED = outcome(2, chat=True, choices=[Choice(finish_reason="tool_calls", tool_calls=[CALL])])
FAILED = outcome(
    3, status="failed", error=ItemError(type="too_long", message="9 of 5 tokens", field="prompt")
)
CANCELLED = outcome(4, status="cancelled", custom_id="e")
VALUE = outcome(5, value=Raw(b'{"n": null}'))
ALL = [OK, SEVERAL, CALLED, FAILED, CANCELLED, VALUE]


async def pages(*found: list[Result]) -> AsyncIterator[list[Result]]:
    for page in found:
        yield page


async def test_jsonl(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert await write_results(pages(ALL[:2], ALL[2:]), "jsonl", out) == 6
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0] == {
        "index": 0,
        "custom_id": "a",
        "status": "ok",
        "output": "é",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "error": None,
        "attempt": 2,
        "model": "m",
    }
    assert [c["text"] for c in lines[1]["choices"]] == ["x", "y"]
    assert lines[2]["choices"][0]["tool_calls"] == [CALL]
    assert lines[3]["error"] == {"type": "too_long", "message": "9 of 5 tokens", "field": "prompt"}
    assert (lines[4]["status"], lines[4]["output"]) == ("cancelled", None)
    assert lines[5]["output"] == {"n": None}


async def test_openai(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    await write_results(pages(ALL), "openai", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    body = lines[0]["response"]["body"]
    assert (lines[0]["custom_id"], lines[0]["response"]["status_code"], lines[0]["error"]) == ("a", 200, None)
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1_700_000_000, "m")
    message = {"role": "assistant", "content": "é", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    body = lines[1]["response"]["body"]
    assert (body["object"], [c["text"] for c in body["choices"]], lines[1]["custom_id"]) == (
        "text_completion",
        ["x", "y"],
        "index-1",
    )
    assert lines[2]["response"]["body"]["choices"][0]["message"]["tool_calls"] == [CALL]
    assert lines[2]["response"]["body"]["choices"][0]["message"]["content"] is None
    assert lines[3]["response"] is None
    assert lines[3]["error"] == {"code": "too_long", "message": "9 of 5 tokens", "param": "prompt"}
    assert lines[4]["error"] == {"code": "cancelled", "message": "the item is cancelled"}
    assert lines[5]["response"]["body"] == {"n": None}
    assert len({line["id"] for line in lines}) == 6


async def test_parquet(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    await write_results(pages(ALL, []), "parquet", out)
    rows = pq.read_table(out).to_pylist()
    assert [r["index"] for r in rows] == list(range(6))
    assert (rows[0]["output"], rows[0]["completion_tokens"], rows[0]["choices"], rows[0]["attempt"]) == (
        "é",
        2,
        None,
        2,
    )
    assert [c["text"] for c in json.loads(rows[1]["choices"])] == ["x", "y"]
    assert (rows[3]["error_type"], rows[3]["error_message"]) == ("too_long", "9 of 5 tokens")
    assert json.loads(rows[5]["output"]) == {"n": None}
    await write_results(pages(), "parquet", out)
    assert pq.read_table(out).num_rows == 0


async def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("before")

    async def broken() -> AsyncIterator[list[Result]]:
        yield [OK]
        raise RuntimeError

    for form in ("jsonl", "parquet"):
        with pytest.raises(RuntimeError):
            await write_results(broken(), form, out)
        assert out.read_text() == "before"
        assert list(tmp_path.iterdir()) == [out]
    await write_results(pages([OK]), "jsonl", out)
    assert out.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


async def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(InvalidInput) as caught:
            await write_results(pages([OK]), "jsonl", out)
        assert caught.value.field == "out"
    with pytest.raises(InvalidInput, match="unknown: use jsonl"):
        await write_results(pages([OK]), "xml", tmp_path / "out")  # type: ignore[arg-type]


async def test_a_device_or_a_pipe_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        await write_results(pages([OK]), "jsonl", pipe)
        assert json.loads(os.read(reader, 10_000))["index"] == 0
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


async def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    await write_results(pages([OK]), "jsonl", link)
    assert link.is_symlink()
    assert json.loads(file.read_text())["index"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_what_the_system_refuses_is_told(tmp_path: Path) -> None:
    for out in (Path("/proc/headrace"), tmp_path / ("x" * 300)):
        with pytest.raises(InvalidInput, match="cannot be written") as caught:
            await write_results(pages([OK]), "jsonl", out)
        assert caught.value.field == "out"


def test_an_error_without_a_message_has_one_in_openai_form() -> None:
    line = openai_line(outcome(0, status="cancelled", error=ItemError(type="cancelled")))
    assert line["error"] == {"code": "cancelled", "message": "the item is cancelled"}


async def test_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    await write_results(pages([OK]), "jsonl", "-")
    await write_results(pages([OK]), "parquet", "-")
    line, _, parquet = capfdbinary.readouterr().out.partition(b"\n")
    assert json.loads(line)["output"] == "é"
    assert parquet[:4] == parquet[-4:] == b"PAR1"


def test_log_probabilities_keep_all_choices() -> None:
    result = outcome(0, choices=[Choice(text="a", logprobs={"content": []})])
    assert jsonl_line(result)["choices"] == result.choices
    assert openai_line(result)["response"]["body"]["choices"][0]["logprobs"] == {"content": []}
