"""`headrace up` for real: ready, remembered, guarded, restarted, drained, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import psutil
import pytest

from tests.cli.harness import Up, headrace, write_prompts


@pytest.fixture
def up(tmp_path):
    """A mesh of this test's own."""
    mesh = Up(tmp_path / "D")
    yield mesh
    mesh.kill()


def test_it_says_where_everything_is_and_the_ready_line_is_exact(echo_mesh):
    port = echo_mesh.state["port"]
    assert echo_mesh.out.lines[-1] == f"ready nats://127.0.0.1:{port}"
    assert echo_mesh.url == echo_mesh.state["url"]
    said = "\n".join(echo_mesh.out.lines)
    assert str(echo_mesh.folder / "logs") in said
    assert str(echo_mesh.folder / "data" / "headrace.duckdb") in said


def test_data_lies_in_the_folder_only_and_each_service_shows_its_name(echo_mesh):
    assert {p.name for p in echo_mesh.folder.iterdir()} == {
        "data",
        "logs",
        "mesh.json",
        "nats",
        "run",
        "up.lock",
    }
    state = echo_mesh.state
    assert set(state["pids"]) == {"nats-server", "completion", "gateway", "worker-1"}
    assert (state["engine"], state["function"], state["pid"]) == ("echo", "generate", echo_mesh.process.pid)
    lines = {name: " ".join(psutil.Process(pid).cmdline()) for name, pid in state["pids"].items()}
    assert "headrace worker " in lines["worker-1"]
    assert "headrace completion " in lines["completion"]
    assert "headrace gateway " in lines["gateway"]
    assert lines["nats-server"].split()[0].endswith("nats-server")
    for name in state["pids"]:
        assert (echo_mesh.folder / "logs" / f"{name}.log").is_file()


def test_ctrl_c_of_the_terminal_reaches_the_supervisor_only(echo_mesh):
    groups = {os.getpgid(pid) for pid in echo_mesh.state["pids"].values()}
    assert os.getpgid(echo_mesh.process.pid) not in groups
    assert len(groups) == 4


def test_a_second_up_in_the_folder_is_refused_naming_the_first(echo_mesh):
    second = echo_mesh.run("up", "--engine", "echo")
    assert second.returncode == 1
    assert f"pid {echo_mesh.process.pid}" in second.stderr
    assert second.stderr.startswith("error: a mesh already runs in ")
    assert second.stdout == ""


def test_a_port_in_use_is_a_clear_error(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        done = headrace("up", "--dir", str(tmp_path / "D"), "--engine", "echo", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: port {port} is in use")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--engine", "gpt"), "engine 'gpt' is unknown: use one of llamacpp, vllm, sim, echo"),
        (("--engine", "llamacpp", "--model", "/nowhere/x.gguf"), "model /nowhere/x.gguf does not exist"),
        (("--engine", "echo", "--durability", "wobbly"), "setting is wrong"),
        (("--engine", "echo", "--function", "a b"), "setting is wrong"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(tmp_path, flags, said):
    done = headrace("up", "--dir", str(tmp_path / "D"), *flags)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_that_cannot_start_ends_up_with_its_reason_and_leaves_nothing(tmp_path):
    done = headrace("up", "--dir", str(tmp_path / "D"), "--engine", "echo", "--engine-option", "no_such=1")
    assert done.returncode == 1
    assert "error: worker-1 did not start: " in done.stderr
    assert "no_such" in done.stderr
    assert json.loads((tmp_path / "D" / "mesh.json").read_text())["pids"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_no_process_and_the_port_is_kept(tmp_path, number):
    up = Up(tmp_path / "D", "--workers", "2")
    try:
        up.json("submit", str(write_prompts(tmp_path / "p.jsonl", 50)), "--job", "kept")
        port = up.state["port"]
        assert up.stop(number) == 0
        assert up.leftovers() == []
        assert up.err.lines[-1] == "stopped"
        assert up.state["port"] == port
        assert up.state["pids"] == {}
    finally:
        up.kill()
    again = Up(tmp_path / "D", "--workers", "2")
    try:
        assert again.state["port"] == port
        assert again.json("watch", "kept")["ok"] == 50
    finally:
        again.kill()


def test_a_killed_supervisor_leaves_no_process(up):
    up.process.kill()
    up.process.wait()
    assert up.leftovers(timeout=20) == []


def test_a_second_signal_ends_at_once(tmp_path):
    up = Up(tmp_path / "D", "--engine-option", "delay_ms=60000", "--grace", "60")
    try:
        up.json("submit", str(write_prompts(tmp_path / "p.jsonl", 3)), "--job", "slow")
        up.process.send_signal(signal.SIGTERM)
        up.err.wait_for("stopping")
        began = time.monotonic()
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(20) == 1
        assert time.monotonic() - began < 15
        assert up.leftovers() == []
    finally:
        up.kill()


@pytest.mark.slow
def test_what_is_killed_comes_back_and_the_work_goes_on(up, tmp_path):
    """Worker, completion and broker in turn; each time a job submitted before the kill still ends whole."""
    for i, name in enumerate(("worker-1", "completion", "gateway", "nats-server")):
        job = f"through-{i}"
        up.json("submit", str(write_prompts(tmp_path / f"{job}.jsonl", 200, prefix=name)), "--job", job)
        before = up.pid(name)
        ended, back = up.kill_service(name)
        assert "killed by SIGKILL" in ended
        assert up.pid(name) != before
        assert f"pid {up.pid(name)}" in back
        found = up.json("watch", job, timeout=100)
        assert (found["ok"], found["failed"], found["dead"]) == (200, 0, 0)
        assert up.json("audit", job)["balanced"]


def test_another_engine_in_the_same_folder_takes_over_the_function(tmp_path):
    path = write_prompts(tmp_path / "a.jsonl", 5)
    for engine in ("echo", "sim", "echo"):
        mesh = Up(tmp_path / "D", engine=engine)
        try:
            mesh.json("submit", str(path), "--job", f"by-{engine}-{mesh.process.pid}")
            assert mesh.run("watch", f"by-{engine}-{mesh.process.pid}", "--timeout", "30").returncode == 0
            assert mesh.stop() == 0
        finally:
            mesh.kill()
