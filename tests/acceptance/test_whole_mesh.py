"""The whole mesh as a user has it: `headrace up` in its own processes, and commands against it.

The cases are failures that users of such systems reported; each test says which right answer it holds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.harness import HEADRACE, Up, clean_environment, write_prompts

MIB = 1 << 20
TERMINAL = ("completed", "completed_with_errors", "cancelled")


@pytest.fixture
def up(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Up]:
    """A mesh with the flags of the test's `up` mark; none of its processes is left afterwards."""
    mark = request.node.get_closest_marker("up")
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "headrace.toml").write_text(
        "ack_wait_s = 5.0\n"
    )  # a killed worker's items wait this long
    mesh = Up(tmp_path / "D", *(mark.args if mark else ()), **(mark.kwargs if mark else {}))
    yield mesh
    mesh.kill()


def law_holds(status: dict[str, Any]) -> bool:
    """The accounting law, as the printed numbers have it."""
    parts = ("ok", "failed", "dead", "cancelled", "queued", "landing")
    return status["submitted"] == sum(status[p] for p in parts)


def wait_until_ended(
    up: Up, job: str, samples: list[dict[str, Any]], timeout_s: float = 90
) -> dict[str, Any]:
    """Sample the audit of `job` until it ends; every sample goes to `samples`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done = up.run("audit", job, "--json")
        if done.returncode in (0, 1) and done.stdout.startswith(
            '{"job"'
        ):  # a service may be down for a moment
            samples.append(json.loads(done.stdout))
            if samples[-1]["state"] in TERMINAL:
                return samples[-1]
    raise AssertionError(f"{job} did not end within {timeout_s} s: {samples[-1:]}")


class Peak(threading.Thread):
    """Highest resident size of some processes, sampled twenty times a second."""

    def __init__(self, **pids: int) -> None:
        super().__init__(daemon=True)
        self.processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.bytes = dict.fromkeys(pids, 0)
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.05):
            for name, process in self.processes.items():
                try:
                    self.bytes[name] = max(self.bytes[name], process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue


@pytest.mark.timeout(300)
def test_a_hundred_thousand_items_land_once_in_bounded_memory_and_leave_nothing_behind(
    up: Up, tmp_path: Path
) -> None:
    path = write_prompts(tmp_path / "many.jsonl", 100_000)
    command = [*HEADRACE, "submit", str(path), "--job", "many", "--dir", str(up.folder), "--json"]
    submit = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
    peak = Peak(submit=submit.pid, worker=up.pid("worker-1"), completion=up.pid("completion"))
    receipt = json.loads(submit.communicate(timeout=120)[0])
    assert receipt == {"job": "many", "submitted": 100_000, "refused": 0, "resumed_from": 0}
    assert up.run("watch", "many", "--timeout", "200", timeout=220).returncode == 0
    peak.over.set()
    audit = up.json("audit", "many")
    assert (audit["ok"], audit["balanced"], audit["missing"], audit["duplicates"]) == (100_000, True, [], 0)
    assert {name: size < 300 * MIB for name, size in peak.bytes.items()} == dict.fromkeys(peak.bytes, True), (
        peak.bytes
    )
    rows = up.json("sql", "SELECT count(*) AS n, count(DISTINCT index) AS d FROM outcomes WHERE job = 'many'")
    assert rows == [{"n": 100_000, "d": 100_000}]
    doctor = {c["check"]: c["found"] for c in up.json("doctor")}
    assert doctor["stream HR_TASKS"] == doctor["stream HR_RESULTS"] == "0 messages"


@pytest.mark.timeout(240)
@pytest.mark.up("--workers", "2", "--engine-option", "delay_ms=60", "--slots", "8")
def test_workers_killed_three_times_lose_nothing_and_the_account_always_balances(
    up: Up, tmp_path: Path
) -> None:
    seed = int(os.environ.get("HEADRACE_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"seed {seed}")
    choice = random.Random(seed)
    path = write_prompts(tmp_path / "items.jsonl", 1_000)
    assert up.json("submit", str(path), "--job", "killed")["submitted"] == 1_000
    samples: list[dict[str, Any]] = []
    for share in (0.1, 0.3, 0.5):
        while not samples or samples[-1]["ok"] < share * 1_000:
            samples.append(up.json("audit", "killed"))
        up.kill_service(choice.choice(["worker-1", "worker-2"]))
    end = wait_until_ended(up, "killed", samples, 150)
    assert (end["ok"], end["state"], end["missing"]) == (1_000, "completed", [])
    assert [s for s in samples if not (s["balanced"] and law_holds(s))] == []
    again = up.json("sql", "SELECT count(*) AS n FROM outcomes WHERE job = 'killed' AND attempt > 1")
    assert again[0]["n"] > 0, "no item was redelivered: the kills hit nothing"


@pytest.mark.timeout(240)
@pytest.mark.up("--slots", "64")
def test_every_part_killed_in_turn_and_the_broker_too(up: Up, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "items.jsonl", 20_000)
    command = [*HEADRACE, "submit", str(path), "--job", "storm", "--dir", str(up.folder), "--json"]
    submit = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
    for name in ("nats-server", "completion", "worker-1", "gateway", "nats-server"):
        up.kill_service(name)
    out, _ = submit.communicate(timeout=120)
    # Killed in mid-burst it either got through, or says so and the same command finishes the rest.
    if submit.returncode != 0:
        out = up.run("submit", str(path), "--job", "storm", "--json", timeout=120).stdout
    assert json.loads(out)["submitted"] == 20_000
    samples: list[dict[str, Any]] = []
    end = wait_until_ended(up, "storm", samples, 180)
    assert (end["ok"], end["balanced"], end["missing"]) == (20_000, True, [])
    assert max(s["ok"] for s in samples) <= 20_000


@pytest.mark.up("--context", "64", engine="sim")
def test_one_item_longer_than_the_model_fails_alone(up: Up, tmp_path: Path) -> None:
    lines = [{"prompt": f"short {i}", "max_tokens": 4} for i in range(100)]
    lines.insert(50, {"prompt": "long " * 500, "max_tokens": 4})
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert up.json("submit", str(path), "--job", "mixed")["submitted"] == 101
    assert up.run("watch", "mixed", "--timeout", "60").returncode == 3
    status = up.json("status", "mixed")
    assert (status["state"], status["ok"], status["failed"]) == ("completed_with_errors", 100, 1)
    failed = up.json(
        "sql", "SELECT index, error_type FROM outcomes WHERE job = 'mixed' AND status = 'failed'"
    )
    assert failed == [{"index": 50, "error_type": "too_long"}]


@pytest.mark.up("--context", "16", engine="sim")
def test_nine_of_nine_failing_is_said_out_loud(up: Up, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "nine.jsonl", 9, prefix="long " * 200)
    assert up.json("submit", str(path), "--job", "nine")["submitted"] == 9
    assert up.run("watch", "nine", "--timeout", "60").returncode == 3
    status = up.json("status", "nine")
    assert (status["state"], status["ok"], status["failed"]) == ("completed_with_errors", 0, 9)
    out = tmp_path / "nine.out"
    assert up.run("results", "nine", "--format", "jsonl", "--out", str(out)).returncode == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["error"]["type"] for r in results] == ["too_long"] * 9


@pytest.mark.up("--slots", "5", "--engine-option", "delay_ms=400")
def test_cancelling_midway_keeps_what_is_finished_and_aborts_what_runs(up: Up, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "slow.jsonl", 25)
    assert up.json("submit", str(path), "--job", "slow")["submitted"] == 25
    while up.json("status", "slow")["ok"] < 5:
        pass
    begun = time.monotonic()
    up.json("cancel", "slow")
    assert up.run("watch", "slow", "--timeout", "20").returncode == 4
    assert time.monotonic() - begun < 10
    status = up.json("status", "slow")
    assert status["state"] == "cancelled"
    assert status["ok"] >= 5
    assert status["cancelled"] > 0
    assert status["ok"] + status["cancelled"] == 25
    assert law_holds(status)
    assert up.json("audit", "slow")["balanced"]


def test_completed_never_exceeds_what_is_landed(up: Up, tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "items.jsonl", 20_000)
    assert up.json("submit", str(path), "--job", "landing")["submitted"] == 20_000
    os.kill(up.pid("completion"), signal.SIGSTOP)
    os.kill(up.pid("completion"), signal.SIGCONT)
    while True:
        before = up.json("status", "landing")
        rows = up.json("sql", "SELECT count(*) AS n FROM outcomes WHERE job = 'landing' AND status = 'ok'")
        assert before["ok"] <= rows[0]["n"]
        assert law_holds(before)
        if before["state"] in TERMINAL:
            break
    assert before["ok"] == 20_000


NATS_REQUEST = """
import asyncio, sys, nats
async def main():
    nc = await nats.connect(sys.argv[1])
    reply = await nc.request(sys.argv[2], sys.argv[3].encode(), timeout=5)
    print((reply.headers or {}).get("Nats-Service-Error-Code", "200"), reply.data.decode())
    await nc.close()
asyncio.run(main())
"""


def nats_request(up: Up, subject: str, body: str) -> tuple[str, Any]:
    """What `nats request` does with its defaults: one request, one reply within five seconds."""
    done = subprocess.run(
        [sys.executable, "-c", NATS_REQUEST, up.url, subject, body],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    code, _, data = done.stdout.partition(" ")
    return code, json.loads(data)


def test_the_front_door_by_plain_nats_requests(up: Up) -> None:
    code, receipt = nats_request(up, "hr.api.submit", '{"function":"generate","prompt":"hello there"}')
    assert (code, receipt["submitted"], receipt["index"]) == ("200", 1, 0)
    ask = json.dumps({"job": receipt["job"], "index": 0, "wait_s": 4})
    code, result = nats_request(up, "hr.api.result", ask)
    assert code == "200"
    assert "hello there" in json.dumps(result)
    code, status = nats_request(up, "hr.api.status", json.dumps({"job": receipt["job"]}))
    assert (code, status["state"], status["ok"]) == ("200", "completed", 1)
    code, audit = nats_request(up, "hr.api.audit", json.dumps({"job": receipt["job"]}))
    assert audit["balanced"] is True
    code, rows = nats_request(up, "hr.api.query", '{"sql": "SELECT count(*) FROM outcomes"}')
    assert rows["rows"] == [[1]]
    code, error = nats_request(up, "hr.api.submit", '{"function":"none","prompt":"x"}')
    assert code == "404"
    assert "generate" in error["error"]["message"]
    code, error = nats_request(up, "hr.api.submit", '{"prompt":"x","max_tokens":0}')
    assert (code, error["error"]["field"]) == ("400", "max_tokens")
    for service in ("headrace-gateway", "headrace-completion"):
        code, info = nats_request(up, f"$SRV.INFO.{service}", "")
        assert info["name"] == service
