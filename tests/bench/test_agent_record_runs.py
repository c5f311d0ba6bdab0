"""The benchmark of recording runs to its end at a small size, and its account holds. It asserts no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_state_of_the_broker_is_printed_and_the_account_is_exact(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.agent_record", "--records", "2000", "--json", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr[-2_000:]
    found = json.loads(out.read_text("utf-8"))
    assert [row["broker"].split()[0] for row in found["rows"][1:]] == ["up", "slow", "down"]
    assert found["account"]["exact"] is True
    assert found["account"]["recorded"] == 6_000
    for row in found["rows"]:
        assert row["broker"] in done.stdout
