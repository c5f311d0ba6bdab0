"""The soak runs to its end at a small size, and its verdict on flatness is what the numbers say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.chaos_kit.verdict import Verdict
from tests.bench.fleet import ROOT
from tests.bench.soak_report import Flat, knee


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_soak(tmp_path: Path) -> None:
    out = tmp_path / "soak.txt"
    sizes = ("--items", "15000", "--kills", "3", "--flat", "500,1000")
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.soak", *sizes, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    text = out.read_text("utf-8")
    assert text.splitlines()[-5:] == done.stdout.splitlines()[-5:]
    for name in ("worker", "completion", "broker", "submit"):
        assert f"memory of {name}: " in text
        assert f"peak memory of {name}" in text
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert rows["ok"].split()[-1] == "15,000"
    assert (rows["lost"].split()[-1], rows["doubled"].split()[-1]) == ("0", "0")
    assert 1 <= text.count(" kill ") <= 3  # a quick machine may be through before the last one


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((100, 105, 95), "flat from 10 items on (100 MB, then 95 MB)"),
        ((50, 100, 105), "flat from 100 items on (100 MB, then 105 MB)"),
        ((50, 100, 200), "grows up to 1,000 items (50 → 100 → 200 MB)"),
        ((200, 100, 50), "falls up to 1,000 items (200 → 100 → 50 MB)"),
    ],
)
def test_where_the_knee_is(values: tuple[float, ...], said: str) -> None:
    flats = [
        Flat(items=items, wall_s=value, cpu_s={}, peak_mb={}, verdict=Verdict(items=items))
        for items, value in zip((10, 100, 1_000), values, strict=True)
    ]
    assert knee(flats, lambda one: one.wall_s, "MB") == said
