"""What the README shows is run as it stands, against a mesh with the echo engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_whole_mesh import nats_request
from tests.cli.harness import Up, clean_environment

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of `language`, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Path]]:
    """A mesh, and a folder to run commands in that has the examples."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", folder / "examples")
    up = Up(folder / ".headrace")
    yield up, folder
    up.kill()


def environment(**more: str) -> dict[str, str]:
    """With the command of this environment first on PATH."""
    scripts = str(Path(sys.executable).parent)
    return clean_environment(PATH=f"{scripts}{os.pathsep}{os.environ['PATH']}", **more)


def run_block(folder: Path, mark: str) -> int:
    """Run the commands of the first shell block that has `mark`; each must exit 0. Return how many there were."""
    block = next(b for b in blocks("sh") if mark in b)
    commands = [line.partition("#")[0].strip() for line in block.splitlines() if line.startswith("headrace ")]
    for command in commands:
        done = shell(folder, command)
        assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
    return len(commands)


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """What a line of the README does, in a folder with the examples."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@contextlib.contextmanager
def serving(folder: Path, command: str) -> Iterator[None]:
    """While a service of the README runs, from the time it says that it is ready."""
    ready = folder / f"ready-{time.time_ns()}"
    log = (folder / "serving.log").open("wb")
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=folder,
        env=environment(HEADRACE_READY_FILE=str(ready)),
        stdout=log,
        stderr=log,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None, (folder / "serving.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()


def test_the_commands_for_when_things_fail(mesh: tuple[Up, Path]) -> None:
    _, folder = mesh
    assert run_block(folder, "headrace retry") == 5


def test_the_tour_and_the_python_example(mesh: tuple[Up, Path]) -> None:
    _, folder = mesh
    assert run_block(folder, "headrace submit") >= 7
    assert len((folder / "first.jsonl").read_text().splitlines()) == 132
    example = next(b for b in blocks("python") if "headrace.client" in b)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 132


def test_governed_calls(mesh: tuple[Up, Path]) -> None:
    _, folder = mesh
    assert run_block(folder, "headrace call ") == 5


def test_a_function_in_its_modes(mesh: tuple[Up, Path]) -> None:
    _, folder = mesh
    module = next(b for b in blocks("python") if "textstats.py" in b)
    (folder / "textstats.py").write_text(module)
    block = next(b for b in blocks("sh") if "headrace run" in b)
    commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert [c.split()[1] for c in commands] == ["run", "run", "run", "worker"]
    for command in commands[:3]:
        done = shell(folder, command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    documents = (folder / "examples" / "probes" / "documents.jsonl").read_text().splitlines()
    assert len((folder / "stats.jsonl").read_text().splitlines()) == len(documents)
    with serving(folder, commands[3]):
        assert shell(folder, "headrace watch stats-1 --timeout 60").returncode == 0


def test_an_agent(mesh: tuple[Up, Path]) -> None:
    _, folder = mesh
    module = next(b for b in blocks("python") if "greeter.py" in b)
    (folder / "greeter.py").write_text(module)
    block = next(b for b in blocks("sh") if "headrace agent run" in b)
    run, *commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    with serving(folder, run):
        answers = [shell(folder, command) for command in commands]
    assert [a.returncode for a in answers] == [0] * len(commands), answers
    assert "Hello Ada, guest number 1" in answers[0].stdout


def test_the_front_door_examples(mesh: tuple[Up, Path]) -> None:
    up, _ = mesh
    block = next(b for b in blocks("sh") if "nats request" in b)
    requests = re.findall(r"^nats request (\S+) '(.*)'$", block, re.MULTILINE)
    assert [subject for subject, _ in requests] == ["hr.api.submit", "hr.api.result"]
    code, receipt = nats_request(up, *requests[0])
    assert code == "200"
    code, result = nats_request(
        up, requests[1][0], requests[1][1].replace("JOB-OF-THE-RECEIPT", receipt["job"])
    )
    assert code == "200"
    assert "The capital of France is" in json.dumps(result)


def test_the_first_two_commands_install_then_demo_and_test() -> None:
    install, test = blocks("sh")[:2]
    assert install.strip().endswith("headrace demo")
    assert test.strip().endswith('not vllm"')
    for line in (install, test):
        assert len(line.strip().splitlines()) == 1
        for path in re.findall(r"-r (\S+)", line):
            assert (ROOT / path).is_file()
