"""The demonstration of `examples/loss`: the same kill loses items of a consumer that acks on read, and none of ours."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import clean_environment

RUN = Path(__file__).parents[2] / "examples" / "loss" / "run.py"


def demonstrate(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN), *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=clean_environment(),
    )


def sides(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    assert done.stdout, done.stderr
    naive, ours = json.loads(done.stdout)["sides"]
    assert (naive["name"], ours["name"]) == ("ack on read", "headrace")
    return naive, ours


@pytest.mark.parametrize("kills", [1, 2])
def test_the_same_kill_loses_items_there_and_none_here(kills: int) -> None:
    done = demonstrate(
        "--items", "400", "--kills", str(kills), "--prefetch", "32", "--work-ms", "60", "--json"
    )
    naive, ours = sides(done)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SIGKILL") == 2 * kills
    # Its queue says that all is done. Of what was read ahead and at work at a kill there is no result.
    assert naive["queue_says_consumed"] == naive["submitted"] == 400
    assert naive["done"] + naive["lost"] == 400
    assert 0 < naive["lost"] <= kills * (32 + 16)
    assert naive["lost"] == len(naive["lost_indices"])
    assert (ours["done"], ours["lost"], ours["lost_indices"]) == (400, 0, [])
    assert ours["queue_says_consumed"] == 400
    # The price: what was leased at a kill is started again.
    assert ours["ran_again"] > 0


def test_a_run_that_shows_nothing_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RUN.parent))
    run = importlib.import_module("run")

    def side(lost: int) -> Any:
        return run.Side(name="", submitted=10, lost=lost, lost_indices=tuple(range(lost)))

    assert run.verdict(side(3), side(0)) == (0, [])
    code, (said,) = run.verdict(side(3), side(2))
    assert (code, said) == (1, "Headrace lost 2 items: [0, 1]")
    code, (said,) = run.verdict(side(0), side(0))
    assert code == 1
    assert "shows nothing" in said


def test_what_it_is_asked_is_checked() -> None:
    done = demonstrate("--items", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--items 5 is outside 10..10000" in done.stderr
    helped = demonstrate("--help")
    assert helped.returncode == 0
    assert "Exit code 1 if Headrace lost an item" in helped.stdout
