"""What docs/agents.md shows is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.harness import HEADRACE, Up, clean_environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of `language`, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page."""
    made = tmp_path_factory.mktemp("page")
    for block in blocks("python"):
        name = block.splitlines()[0].removeprefix("# ")
        assert name.endswith(".py"), block
        (made / name).write_text(block, "utf-8")
    return made


@pytest.fixture(scope="module")
def mesh(folder: Path) -> Iterator[Up]:
    up = Up(folder / ".headrace")
    yield up
    up.kill()


def test_the_handlers_test_passes(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_greeter.py"],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_commands_do_what_the_page_says(folder: Path, mesh: Up) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("headrace ")]
    run = next(line for line in lines if line.startswith("headrace agent run")).partition("#")[0].split()
    ready = folder / "ready"
    with (folder / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            [*HEADRACE, *run[1:]], cwd=folder, stdout=log, stderr=log,
            env=clean_environment(HEADRACE_READY_FILE=str(ready)),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 40
        while not ready.exists():
            assert agent.poll() is None, (folder / "agent.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asked = 0
        for line in lines:
            command, _, expected = line.partition("#")
            if command.startswith(("headrace up", "headrace agent run")):
                continue
            done = subprocess.run(
                ["bash", "-c", command.replace("headrace ", f"{sys.executable} {HEADRACE[1]} ", 1)],
                cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            if expected.strip():
                asked += 1
                assert done.stdout.strip() == expected.strip()
        assert asked == 1
    finally:
        agent.kill()
        agent.wait()


def test_what_the_page_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
