"""The gateway's benchmark runs to its end at a small size, and says something of each part. It asserts no speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.gateway_report import ITSELF, PAID, Line, goals

ROOT = Path(__file__).resolve().parents[2]


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = ("--out", str(folder / "out.txt"), "--json", str(folder / "out.json"))
    return subprocess.run(
        [sys.executable, "-m", "tests.bench.gateway", *files, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_part_is_printed_with_its_number(tmp_path: Path) -> None:
    done = bench(
        tmp_path, "--durability", "relaxed", "--seconds", "0.3", "--repeats", "1", "--intents", "200"
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads((tmp_path / "out.json").read_text("utf-8"))
    lines = found["lines"]
    ways = {(line["way"], line["callers"]) for line in lines}
    assert ways == {
        *((way, callers) for way in (ITSELF, "agent") for callers in (1, 16, 64)),
        (PAID, 16),
        (PAID, 64),
        ("hr.api.call", 16),
        ("agent, 2 gateways", 64),
    }
    for line in lines:
        assert line["rate"] > 0
        assert line["added_p50"] == pytest.approx(line["p50"] - line["direct_p50"])
        assert set(line["cpu"]) >= ({"gateway", "broker"} if line["way"] != ITSELF else set())
    assert "finds 200 open calls is ready after" in " ".join(found["notes"])
    assert len(found["goals"]) == 4
    for name in ("CPU", "load before", "nats-server", "headrace", "LiteLLM"):
        assert found["machine"][name]
    assert done.stdout.splitlines()[-6:] == (tmp_path / "out.txt").read_text("utf-8").splitlines()[-6:]
    assert not list(tmp_path.glob("headrace-bench-*"))


def test_goals_are_judged_by_the_lines_of_agents() -> None:
    def line(way: str, callers: int, p50: float, rate: float) -> Line:
        return Line(
            way=way, durability="relaxed", callers=callers, p50=p50, p99=p50, direct_p50=1.0, direct_p99=1.0, rate=rate
        )  # fmt: skip

    reached = goals(
        [line(ITSELF, 16, 1.0, 9_999), line("agent", 16, 6.0, 1_999), line("LiteLLM", 16, 2.0, 5_000)]
    )
    assert [(g.seen, g.met) for g in reached] == [("5.0 ms", True), ("1,999 calls/s", False)]
    reached = goals([line("agent", 16, 6.1, 1_000), line("agent", 64, 30.0, 2_000), line(PAID, 64, 30.0, 1)])
    assert [g.met for g in reached] == [False, True, False]


@pytest.mark.timeout(60)
def test_an_unknown_part_is_refused_by_name(tmp_path: Path) -> None:
    done = bench(tmp_path, "--only", "latancy")
    assert done.returncode == 2
    assert "latancy" in done.stderr
