"""`headrace chaos` as a user runs it: a mesh that is broken on purpose, and a verdict that can be trusted."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.harness import HEADRACE, Reader, Up, clean_environment, headrace, write_prompts

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
KILLED = ("worker", "completion", "broker")


def chaos(*arguments: str, code: int = 0, timeout: float = 110) -> dict[str, Any]:
    """The object that a run prints."""
    done = headrace("chaos", *arguments, "--json", timeout=timeout)
    assert done.returncode == code, (done.returncode, done.stdout[-3_000:], done.stderr[-3_000:])
    return json.loads(done.stdout)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process whose command line names the folder."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def wait_until_none(folder: Path, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while left := processes_of(folder):
        assert time.monotonic() < deadline, [(p.pid, p.status(), p.cmdline()) for p in left]
        time.sleep(0.1)


# --- the promise ------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_is_broken_each_item_has_one_outcome(seed: int, tmp_path: Path) -> None:
    """The short form: three kills of each component and everything else that the kit can do, in seconds."""
    folder = tmp_path / "mesh"
    found = chaos(
        str(PROMPTS), "--items", "2000", "--seconds", "12", "--kills", "3", "--seed", str(seed),
        "--ack-wait", "1.5", "--engine", "sim", "--dir", str(folder),
    )  # fmt: skip
    print({name: value for name, value in found.items() if name not in {"faults", "unbalanced"}})
    assert (found["seed"], found["items"], found["state"]) == (seed, 2_000, "completed")
    assert (found["lost"], found["doubled"], found["mismatched"], found["problems"]) == (0, 0, 0, [])
    assert (found["ok"], found["failed"], found["dead"], found["cancelled"]) == (2_000, 0, 0, 0)
    assert found["unbalanced_samples"] == 0
    assert found["balanced_samples"] >= 8
    assert all(found["kills"][name] >= 3 for name in KILLED), found["kills"]
    assert all(found["pauses"][name] >= 1 for name in KILLED), found["pauses"]
    faults = found["faults"]
    assert (
        sum(f["fault"] == "kill" and f["victim"].startswith("worker-") for f in faults)
        == found["kills"]["worker"]
    )
    assert all(f["pid"] > 0 for f in faults if f["fault"] in {"kill", "pause"})
    assert any(f["note"] == "longer than a lease" for f in faults)  # and was fenced: nothing is doubled
    assert found["submits"] > found["kills"]["submit"]
    wait_until_none(folder)
    # What restarts the killed is the supervisor of `headrace up`, which says so.
    said = (folder / "logs" / "supervisor.log").read_text()
    assert (
        said.count("completion ended (killed by SIGKILL): starting it again") == found["kills"]["completion"]
    )


def test_a_run_without_faults_is_a_job(tmp_path: Path) -> None:
    """--kills 0, a CSV, the echo engine, a function of another name: answers are compared with their prompts."""
    table = tmp_path / "t.csv"
    table.write_text("id,text\n" + "".join(f"r{i},say {i}\n" for i in range(50)))
    found = chaos(
        str(table), "--column", "text", "--id-column", "id", "--kills", "0", "--seconds", "1", "--engine", "echo",
        "--function", "repeat", "--workers", "1", "--items", "120",
    )  # fmt: skip
    assert (found["items"], found["ok"], found["lost"], found["mismatched"]) == (120, 120, 0, 0)
    assert (found["faults"], found["submits"], found["duplicates"]) == ([], 1, 0)
    assert set(found["kills"].values()) == {0}


@pytest.mark.slow
def test_people_get_a_list_of_what_was_done_and_what_is_there(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 300)
    done = headrace(
        "chaos", str(path), "--kills", "1", "--seconds", "5", "--seed", "7", "--ack-wait", "1", "--workers", "1",
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "What was done (seed 7)" in done.stdout
    assert "nothing lost, nothing doubled" in done.stdout
    assert done.stderr.startswith("seed 7: ")
    assert " kill        completion  pid " in done.stderr
    assert " landed, " in done.stderr


# --- what it refuses --------------------------------------------------------------------------------
def test_a_folder_with_anything_in_it_is_never_broken(tmp_path: Path) -> None:
    (tmp_path / "mesh.json").write_text("{}")
    done = headrace("chaos", str(PROMPTS), "--dir", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty: chaos runs in a folder of its own" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mesh.json"]


def test_a_mesh_in_the_environment_is_not_touched(tmp_path: Path) -> None:
    """Settings that name another broker or data plane do not reach the mesh that is broken."""
    path = write_prompts(tmp_path / "p.jsonl", 20)
    elsewhere = tmp_path / "elsewhere"
    done = headrace(
        "chaos", str(path), "--kills", "0", "--seconds", "1", "--engine", "echo", "--workers", "1", "--json",
        HEADRACE_NATS_URL="nats://127.0.0.1:1", HEADRACE_COMPLETION_DATABASE=str(elsewhere / "mine.duckdb"),
        HEADRACE_DIR=str(elsewhere), HEADRACE_MAX_TRIES="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] == 20
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "gpt"), "engine 'gpt' is unknown"),
        (("--format", "xml"), "format 'xml' is unknown"),
        (("--durability", "wobbly"), "durability 'wobbly' is unknown"),
        (("--function", "a b"), "function"),
        (("--engine-option", "no_such=1"), "no_such"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], said: str) -> None:
    done = headrace("chaos", str(PROMPTS), "--seconds", "1", "--workers", "1", *arguments)
    assert done.returncode in {1, 2}
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_is_named_as_submit_names_it(tmp_path: Path) -> None:
    missing = headrace("chaos", str(tmp_path / "none.jsonl"))
    assert (missing.returncode, "there is no file" in missing.stderr) == (1, True)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    done = headrace("chaos", str(empty))
    assert (done.returncode, "has no line" in done.stderr) == (2, True)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n\n{"prompt": 5}\n')
    done = headrace("chaos", str(bad), "--engine", "echo", "--workers", "1", "--json", timeout=100)
    assert done.returncode == 2
    assert "line 3" in json.loads(done.stdout)["error"]["message"]


# --- what it leaves behind --------------------------------------------------------------------------
class Running:
    """A run in the background, in the middle of its faults."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        path = write_prompts(tmp_path / "p.jsonl", 3_000)
        self.process = subprocess.Popen(
            [
                *HEADRACE,
                "chaos",
                str(path),
                "--dir",
                str(folder),
                "--seconds",
                "30",
                "--kills",
                "12",
                "--seed",
                "5",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        self.err = Reader(self.process.stderr)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running_or_paused(number: int, tmp_path: Path) -> None:
    """In the middle of a pause: what is stopped wakes and ends, whether chaos can still see to it or not."""
    folder = tmp_path / "mesh"
    run = Running(folder, tmp_path)
    try:
        run.err.wait_for(" pause ", " worker-")
        deadline = (
            time.monotonic() + 60
        )  # a pause may be over before this process gets to look: then the next one
        while not any(p.status() == psutil.STATUS_STOPPED for p in processes_of(folder)):
            assert run.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.process.send_signal(number)
        code = run.process.wait(60)
        assert code == (130 if number == signal.SIGTERM else -signal.SIGKILL)
        wait_until_none(folder)
    finally:
        run.end()


def test_each_process_of_up_names_its_service_in_its_command_line(tmp_path: Path) -> None:
    """What a user, or a test of theirs, looks for to kill one of them."""
    mesh = Up(tmp_path / "mesh", "--workers", "2")
    try:
        lines = {
            name: Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            for name, pid in mesh.state["pids"].items()
        }
    finally:
        mesh.kill()
    assert set(lines) == {"nats-server", "completion", "gateway", "worker-1", "worker-2"}
    assert Path(lines["nats-server"][0]).name == "nats-server"
    for name, line in lines.items():
        if name != "nats-server":
            at = next(i for i, part in enumerate(line) if Path(part).name == "headrace")
            assert line[at + 1] == name.partition("-")[0]
