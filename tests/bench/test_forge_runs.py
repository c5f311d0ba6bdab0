"""The forge's benchmark runs to its end at a small size, and says something of each mode. It asserts no speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import clean_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_it_measures_every_mode(tmp_path: Path) -> None:
    out = tmp_path / "forge.txt"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.forge", "--rows", "160", "--cost-ms", "0.5", "--out", str(out)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr[-3_000:]  # 1: a goal of speed is not met
    text = out.read_text()
    for part in (
        "rows:64, here",
        "tokens:8192, here",
        "submit, one job",
        "submit, 8 jobs",
        "tokens:8192 free",
    ):
        assert part in text
    assert "nats-server" in text
    assert "160 rows of skewed length" in text
