"""The benchmark runs to its end at a small size, and says something of each part. It asserts no speed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "tests.bench", "--items", "1000", "--repeats", "1")


def bench(folder: Path, *arguments: str) -> tuple[str, dict]:
    """Standard output and the numbers of a run."""
    files = ("--out", str(folder / "out.txt"), "--json", str(folder / "out.json"))
    done = subprocess.run(
        [*COMMAND, *files, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert not left_in(folder)
    assert not list(folder.glob("headrace-bench-*"))
    return done.stdout, json.loads((folder / "out.json").read_text("utf-8"))


def left_in(folder: Path) -> list[str]:
    """Command lines of processes that name the folder."""
    found: list[str] = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder / "headrace-bench-") in line:
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_part_is_printed_with_its_number(tmp_path: Path) -> None:
    shown, found = bench(tmp_path, "--vllm-python", str(tmp_path / "none"))
    rows = found["rows"]
    assert {row["part"] for row in rows} == {
        "raw",
        *(f"{part} {d}" for part in ("raw", "submit", "pull", "landing", "e2e") for d in ("relaxed", "safe")),
        "feed sim",
        "feed vllm",
    }
    for row in rows:
        assert row["what"][:20] in shown
        assert row["part"] == "feed vllm" or row["median"] > 0
    for part in ("submit", "pull", "landing", "e2e"):
        row = next(r for r in rows if r["part"] == f"{part} relaxed")
        assert row["ratio"] == pytest.approx(row["median"] / row["raw"])
    assert sum(row["what"].startswith("memory of") for row in rows) == 6
    assert "vLLM not installed: skipped" in shown
    for name in ("CPU", "memory", "kernel", "Python", "nats-server", "nats-py", "duckdb", "msgspec", "vllm"):
        assert found["machine"][name]
    assert shown.splitlines()[-20:] == (tmp_path / "out.txt").read_text("utf-8").splitlines()[-20:]


@pytest.mark.timeout(120)
def test_one_part_alone(tmp_path: Path) -> None:
    _, found = bench(tmp_path, "--parts", "submit", "--durability", "relaxed")
    assert {row["part"] for row in found["rows"]} == {"raw relaxed", "submit relaxed"}


@pytest.mark.timeout(60)
def test_an_unknown_part_is_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--parts", "sumbit"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "sumbit" in done.stderr


@pytest.mark.timeout(120)
def test_a_run_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path / "out.txt"), "--parts", "e2e"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not any("worker" in line for line in left_in(tmp_path)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert not left_in(tmp_path)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_feed_part_runs_on_vllm(tmp_path: Path) -> None:
    _, found = bench(tmp_path, "--parts", "feed", "--vllm-python", sys.executable)
    rows = [row for row in found["rows"] if row["part"] == "feed vllm"]
    assert len(rows) == 8
    assert all(row["median"] > 0 for row in rows)
