"""The benchmark of agents runs to its end at a small size, and finds what is lost, doubled or out of order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from headrace.contracts.mail import AgentState, Question
from tests.bench.agents import Bench
from tests.bench.agents_crew import Counts, Tally, name, neighbours
from tests.bench.machine import ROOT

AGENTS, BURSTS, CHAIN = 4, 5, 3
WORDS = ["nobody-0", "nobody-1"]


@pytest.mark.timeout(150)
def test_each_lane_is_timed_and_each_message_accounted_for(tmp_path: Path) -> None:
    out, table = tmp_path / "out.json", tmp_path / "docs" / "out.txt"
    command = [sys.executable, "-m", "tests.bench.agents", "--messages", "1000", "--agents", "8"]
    command += ["--stops", "3", "--durability", "relaxed", "--json", str(out), "--out", str(table)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2_000:]
    (run,) = json.loads(out.read_text("utf-8"))["runs"]
    assert [phase["lane"] for phase in run["phases"]] == ["work", "reply", "control"]
    assert abs(run["messages"] - 1_000) < 150
    assert len(run["stop_ms"]) == 3
    assert set(run["memory_mib"]) == {"broker", "host 1", "host 2"}
    assert "each message was delivered once, and in order for each sender" in done.stdout
    assert table.read_text("utf-8").count("8 agents in 2 hosts, relaxed") == 1


def record(**more: Any) -> AgentState:
    """What agent 0 of a sound run has."""
    senders = [name(n) for n in range(AGENTS) if name(0) in neighbours(n, AGENTS)]
    counts = Counts(
        sent=BURSTS, bursts=BURSTS, numbers={sender: Tally(BURSTS, BURSTS) for sender in senders}, asked=CHAIN,
        answered=CHAIN,
    )  # fmt: skip
    for field, value in more.items():
        if field in Counts.__struct_fields__:
            setattr(counts, field, value)
    rest = {field: value for field, value in more.items() if field not in Counts.__struct_fields__}
    fields: dict[str, Any] = {"state": Raw(msgspec.json.encode(counts)), "cancelled": WORDS} | rest
    return AgentState(agent=name(0), version=1, owner="o", **fields)


def differences(tmp_path: Path, found: AgentState) -> list[str]:
    bench = Bench(tmp_path, "relaxed", agents=AGENTS, hosts=1)
    bench.bursts, bench.cancelled = BURSTS, WORDS
    return bench.differences(0, found, CHAIN)


def test_what_is_lost_doubled_or_out_of_order_is_said(tmp_path: Path) -> None:
    tallies = {name(n): Tally(BURSTS, BURSTS) for n in (1, 2, 3)}
    assert differences(tmp_path, record()) == []
    for unsound in (
        {"wrong": 1},
        {"bursts": BURSTS - 1},
        {"answered": CHAIN + 1},
        {"asked": CHAIN - 1},
        {"numbers": tallies | {"a001": Tally(BURSTS + 1, BURSTS)}},
        {"numbers": tallies | {"a001": Tally(BURSTS - 1, BURSTS - 1)}},
        {"numbers": {sender: tally for sender, tally in tallies.items() if sender != "a003"}},
        {"cancelled": WORDS[::-1]},
        {"cancelled": WORDS[:1]},
        {"questions": {"q": Question(to="a001", then="answer")}},
    ):
        assert len(differences(tmp_path, record(**unsound))) == 1, unsound
