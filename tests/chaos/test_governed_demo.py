"""The demonstration of `examples/governed`: gateways and broker are killed, and no call is done twice or forgotten."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import clean_environment

RUN = Path(__file__).parents[2] / "examples" / "governed" / "run.py"


def demonstrate(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN), *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=clean_environment(),
    )


def test_no_call_is_done_twice_and_each_has_an_end() -> None:
    done = demonstrate("--calls", "60", "--kills", "3", "--seed", "11", "--json")
    assert done.returncode == 0, done.stderr
    (ours,) = json.loads(done.stdout)["sides"]
    assert done.stderr.count("SIGKILL") == sum(ours["kills"].values())
    assert ours["kills"]["gateway"] >= 2
    assert ours["kills"]["broker"] >= 1
    assert (ours["doubled"], ours["unrecorded"], ours["wrong"]) == ([], 0, [])
    assert ours["answered"] + ours["in_doubt"] + ours["failed"] == 60
    # What was done is known: as completed, or as in doubt.
    assert ours["done"] == ours["answered"] + ours["in_doubt_done"]
    assert ours["answered"] > 0
    assert ours["posted_micro"] == 15 * ours["answered"]


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RUN.parent))
    return importlib.import_module("sides")


def test_whatever_is_wrong_is_said_and_fails(sides: Any) -> None:
    def said(**more: Any) -> list[str]:
        code, sentences = sides.verdict(sides.Side("Headrace", 10, **{"answered": 8, "in_doubt": 2} | more))
        assert code == (1 if sentences else 0)
        return sentences

    assert said() == []
    assert said(in_doubt=1) == ["1 of 10 calls have no end"]
    assert said(doubled=["call-3"]) == ["Headrace did 1 calls twice: ['call-3']"]
    assert said(unrecorded=2) == ["2 calls were done and stand nowhere in the ledger"]
    assert said(wrong=["call-1 is failed, and the callee did it"]) == [
        "Headrace: call-1 is failed, and the callee did it"
    ]


def test_the_ledger_is_compared_with_the_callees_log(monkeypatch: pytest.MonkeyPatch, sides: Any) -> None:
    """What the callee did beside the ledger is found: done twice, done before its intent, done and failed."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    side_of = importlib.import_module("headrace_side")
    from headrace.contracts.account import Fold
    from headrace.contracts.ledger import CallError, CallOutcome, CallRequest, Completed, Failed, Intent
    from headrace.gateway.keys import call_id

    fold = Fold()
    request = CallRequest(callee="model", effect="cost_bearing", principal="agent", fingerprint="0" * 64)
    ends = {0: Completed, 1: Completed, 2: Failed, 3: Completed}
    for number, end in ends.items():
        common: dict[str, Any] = {
            "call": call_id("demo", "agent", f"call-{number}"), "tenant": "demo", "attempt": 1, "owner": "g",
            "epoch": 1,
        }  # fmt: skip
        fold.take(Intent(**common, at_us=1_000_000, request=request, lease_until_us=2))
        more = {"outcome": CallOutcome()} if end is Completed else {"error": CallError(type="x")}
        fold.take(end(**common, at_us=2_000_000, **more))

    class Log:
        def entries(self) -> dict[str, list[float]]:
            return {"call-0": [1.5], "call-1": [1.5, 1.6], "call-2": [1.5], "call-3": [0.5], "call-4": [1.5]}

    side = sides.Side("Headrace", 5)
    side_of.compare(side, {}, fold, Log())
    assert side.doubled == ["call-1"]
    assert side.unrecorded == 1
    assert [w.split(" ")[0] for w in side.wrong if w.startswith("call-")] == [
        "call-1",
        "call-2",
        "call-3",
        "call-4",
    ]
    assert (side.answered, side.failed, side.failed_done, side.done) == (3, 1, 1, 6)


def test_what_it_is_asked_is_checked() -> None:
    done = demonstrate("--calls", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--calls 5 is outside 10..100000" in done.stderr
    done = demonstrate("--litellm", "/nowhere/python")
    assert done.returncode == 2
    assert "there is no LiteLLM beside it" in done.stderr
