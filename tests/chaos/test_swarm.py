"""examples/swarm: whoever is killed, the report, the messages and the calls are those of an undisturbed run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.contracts.account import Fold
from headrace.contracts.ledger import CallError, CallOutcome, CallRequest, Completed, InDoubt, Intent
from tests.cli.harness import clean_environment

RUN = Path(__file__).parents[2] / "examples" / "swarm" / "run.py"
SIDES = RUN.with_name("side_by_side.py")
SECTIONS = 6
SAME = ("report_sha256", "messages", "handled", "calls")
POINTS = {
    "planner": "agent-committed:3",
    "worker-1": "agent-handled:4",
    "worker-2": "agent-sent:5",
    "reviewer": "mail-received:6",
    "reporter": "agent-acked:7",
}


def swarm(*flags: str, run: Path = RUN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(run), "--json", *flags],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=clean_environment(),
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first sections of the example's own document: a run of them is short."""
    parts = (RUN.parent / "document.md").read_text("utf-8").split("## ")[: SECTIONS + 1]
    path = tmp_path_factory.mktemp("document") / "short.md"
    path.write_text("## ".join(parts), "utf-8")
    return path


@pytest.fixture(scope="module")
def undisturbed(document: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed") / "not" / "there"
    done = swarm("--document", str(document), "--dir", str(folder))
    assert done.returncode == 0, done.stderr
    report = (folder / "report.md").read_text("utf-8")
    assert report.count("## ") == SECTIONS
    assert report.count("**") == 2 * 3 * SECTIONS, "each question stands in it, and once"
    found = json.loads(done.stdout)
    assert (found["repeated_calls"], found["lost"], found["kills"]) == (0, 0, 0)
    assert found["messages"] == found["handled"]
    # Each question was answered; some answers were sent back, so their questions made a call and two messages more.
    again = found["calls"] - 3 * SECTIONS
    assert again > 0
    assert found["messages"] == 2 + SECTIONS + 4 * 3 * SECTIONS + 2 * again
    return found


def same(done: subprocess.CompletedProcess[str], undisturbed: dict[str, Any], kills: int) -> None:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == [
        "report_sha256", "messages", "handled", "calls", "repeated_calls", "lost", "kills",
    ]  # fmt: skip
    assert (found["repeated_calls"], found["lost"]) == (0, 0)
    assert {name: found[name] for name in SAME} == {name: undisturbed[name] for name in SAME}, done.stderr
    assert found["kills"] == kills


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("seed", "everything"), [(1, False), (2, True)], ids=["agents", "gateway, model and broker, too"]
)
def test_killed_at_any_moment_the_end_is_the_same(
    document: Path, undisturbed: dict[str, Any], seed: int, *, everything: bool
) -> None:
    flags = ["--document", str(document), "--kills", "6", "--seed", str(seed)]
    done = swarm(*flags, *(["--kill-all"] if everything else []))
    same(done, undisturbed, 6)
    assert done.stderr.count("SIGKILL") == 6, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_each_agent_dead_at_a_named_point_the_end_is_the_same(
    document: Path, undisturbed: dict[str, Any]
) -> None:
    flags = [text for agent, point in POINTS.items() for text in ("--crash-at", f"{agent}={point}")]
    done = swarm("--document", str(document), *flags)
    same(done, undisturbed, len(POINTS))
    for agent in POINTS:
        assert f"{agent} died, and is started again" in done.stderr


def test_what_it_is_asked_is_checked(tmp_path: Path) -> None:
    (tmp_path / "mesh").mkdir()
    (tmp_path / "mesh" / "mine").touch()
    for flags, said in (
        (["--kills", "-1"], "--kills -1 is outside 0..200"),
        (["--document", "/nowhere"], "--document /nowhere"),
        (["--crash-at", "nobody=agent-sent:1"], "--crash-at nobody: known are planner"),
        (["--dir", str(tmp_path)], "is not of a swarm"),
    ):
        done = swarm(*flags)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert said in done.stderr
    assert (tmp_path / "mesh" / "mine").exists()


@pytest.fixture
def reckoning(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RUN.parent))
    return importlib.import_module("reckoning")


def test_whatever_is_wrong_is_found(reckoning: Any) -> None:
    """The reckoning of a sound run says nothing, and of each kind of unsound one what is wrong."""
    diary = importlib.import_module("diary")

    def entry(id_: str, seq: int, lane: str = "work") -> Any:
        return diary.Entry(id_, "a", lane, seq)

    def said(b: list[Any], *, sent: list[str] | None = None, dead: list[str] | None = None) -> Any:
        diaries = {
            "a": diary.Diary(handled=[diary.Entry("root", "operator", "work", 0)], sent=sent or ["m", "n"]),
            "b": diary.Diary(handled=b),
        }
        return reckoning.compare(diaries, "root", dead or [], Fold())

    m, n = entry("m", 1), entry("n", 2)
    sound = said([m, n])
    assert (sound.messages, sound.handled, sound.lost, sound.wrong) == (3, 3, 0, [])
    lost = said([m])
    assert (lost.lost, lost.handled) == (1, 2)
    assert lost.wrong
    assert said([m], dead=["n"]).lost == 0
    assert said([m], dead=["n"]).wrong == ["1 dead letters"]
    assert said([m, n, n]).handled == 4
    assert "message n took effect 2 times" in said([m, n, n]).wrong
    assert said([n, m]).wrong == ["b handled message 1 of a after 2"]
    assert said([entry("n", 2, "reply"), entry("m", 1, "reply")]).wrong == []
    assert said([m, n, entry("o", 3)]).wrong == ["message o was handled and never sent"]
    assert said([m, n], sent=["m", "n", "n"]).wrong == ["1 messages were sent twice under one id"]


def test_a_call_that_may_have_been_made_twice_is_found(reckoning: Any) -> None:
    diary = importlib.import_module("diary")
    request = CallRequest(
        callee="generate", effect="cost_bearing", principal="worker-1", fingerprint="0" * 64
    )
    common: dict[str, Any] = {"call": "c" * 26, "tenant": "default", "owner": "gateway", "epoch": 1}
    intents = [Intent(**common, attempt=n, at_us=n, request=request, lease_until_us=n + 1) for n in (1, 2)]
    fold = Fold()
    fold.take(intents[0])
    fold.take(InDoubt(**common, attempt=1, at_us=2, error=CallError(type="broken")))
    fold.take(intents[1])
    fold.take(Completed(**common, attempt=2, at_us=3, outcome=CallOutcome()))
    diaries = {"a": diary.Diary(handled=[diary.Entry("root", "operator", "work", 0)])}
    found = reckoning.compare(diaries, "root", [], fold)
    assert (found.calls, found.repeated_calls) == (1, 1)
    assert found.wrong == [f"call {'c' * 26} was made more than once"]


# --- beside agentbus --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_our_side_of_the_comparison_loses_nothing() -> None:
    done = swarm(
        "--agentbus", "none", "--messages", "60", "--kills", "2", "--seed", "5", run=SIDES
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (ours,) = json.loads(done.stdout)["sides"]
    assert (ours["sent"], ours["answered"], ours["kills"]) == (60, 60, 2)
    assert (ours["lost"], ours["doubled"], ours["disordered"]) == ([], 0, 0)
    assert done.stderr.count("SIGKILL") == 2


def test_what_a_side_lost_doubled_and_disordered_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(RUN.parent))
    sides = importlib.import_module("both_sides")
    log = tmp_path / "work.log"
    log.write_text("message-0\nmessage-2\nmessage-1\nmessage-1\n", "utf-8")
    side = sides.Side("any", 4)
    sides.judge(
        side, ["done message-0", "done message-2", "done message-1", "done message-1"], sides.WorkLog(log)
    )
    assert (side.answered, side.doubled, side.disordered, side.ran_again) == (3, 1, 1, 1)
    assert side.lost == ["message-3"]


def test_what_the_comparison_is_asked_is_checked() -> None:
    for flags, said in (
        (["--kills", "101"], "--kills 101 is outside 0..100"),
        (["--agentbus", "/nowhere/python"], "--agentbus /nowhere/python: there is no such interpreter"),
    ):
        done = swarm(*flags, run=SIDES)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert said in done.stderr
