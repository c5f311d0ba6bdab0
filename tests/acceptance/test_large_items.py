"""Items that are too large for a message, through a whole mesh in its own processes: CASES B8 and A7."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.harness import Up

MIB = 1 << 20
SIZES = (1_200_000, 20_000_000, 10, 5_000_000)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    mesh = Up(tmp_path / "D")
    yield mesh
    mesh.kill()


def text(i: int, size: int) -> str:
    """A text of `size` characters that no other item has, with what JSON has to escape."""
    return (f'item {i} "quoted"\\ \n' * (size // 16 + 1))[:size]


def write(path: Path, sizes: tuple[int, ...]) -> Path:
    with path.open("w") as out:
        for i, size in enumerate(sizes):
            out.write(json.dumps({"prompt": text(i, size), "custom_id": f"c{i}", "max_tokens": 8}) + "\n")
    return path


def objects(up: Up) -> str:
    """What `doctor` says of the object store."""
    (found,) = [c["found"] for c in up.json("doctor") if "OBJ_HR_blobs" in c["check"]]
    return str(found)


@pytest.mark.timeout(240)
def test_large_prompts_and_results_go_round_whole_and_leave_nothing(up: Up, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", SIZES)
    assert up.json("submit", str(path), "--job", "large")["submitted"] == len(SIZES)
    assert up.run("watch", "large", "--timeout", "100", timeout=120).returncode == 0
    audit = up.json("audit", "large")
    assert (audit["ok"], audit["balanced"], audit["duplicates"]) == (len(SIZES), True, 0)

    done = up.run("results", "large")
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["index"], r["custom_id"], r["status"]) for r in lines] == [
        (i, f"c{i}", "ok") for i in range(len(SIZES))
    ]
    assert all(r["output"] == text(i, size) for i, (r, size) in enumerate(zip(lines, SIZES, strict=True)))

    done = up.run("results", "large", "--format", "openai")
    bodies = [json.loads(line)["response"]["body"] for line in done.stdout.splitlines()]
    assert [b["choices"][0]["text"] for b in bodies] == [text(i, size) for i, size in enumerate(SIZES)]

    out = tmp_path / "out.parquet"
    assert up.run("results", "large", "--format", "parquet", "--out", str(out)).returncode == 0
    rows = pq.read_table(out).to_pylist()
    assert [r["output"] for r in rows] == [text(i, size) for i, size in enumerate(SIZES)]

    found = up.json("sql", "SELECT sum(strlen(data)) AS size, count(*) AS parts FROM large_parts")
    assert found[0]["size"] > 26_000_000
    assert found[0]["parts"] > 800
    assert objects(up) == "0 messages"


@pytest.mark.timeout(120)
def test_what_is_beyond_the_limit_is_refused_with_its_size_and_its_neighbours_go_on(
    up: Up, tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", (1_200_000, 33_000_000, 10))
    done = up.run("submit", str(path), "--job", "j", "--json")
    assert done.returncode != 0
    (error,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (error["line"], error["field"]) == (2, "")
    assert error["error"].startswith("too_large: the item has ")
    assert "max_item_bytes allows 32,000,000" in error["error"]
    receipt = up.run("submit", str(path), "--job", "j", "--skip-bad", "--json")
    assert json.loads(receipt.stdout)["submitted"] == 2, receipt
    assert up.run("watch", "j", "--timeout", "60").returncode == 0
    assert [len(json.loads(line)["output"]) for line in up.run("results", "j").stdout.splitlines()] == [
        1_200_000,
        10,
    ]
