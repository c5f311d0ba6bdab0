"""What docs/functions.md shows is run as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.mesh.settings import load_settings
from tests.cli.harness import Reader, Up, clean_environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "functions.md").read_text("utf-8")

pytestmark = pytest.mark.timeout(120)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the page's module and its mesh."""
    path = tmp_path_factory.mktemp("functions")
    (path / "textstats.py").write_text(blocks("python")[0])
    up = Up(path / ".headrace")
    yield path
    up.kill()


def environment() -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    return clean_environment(PATH=f"{scripts}{os.pathsep}{os.environ['PATH']}")


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_page_from_top_to_bottom(folder: Path) -> None:
    first, second = blocks("sh")
    done = shell(folder, first)
    assert done.returncode == 3, done.stderr
    here = (folder / "stats.jsonl").read_text()
    # The text block shows what came of it, shortened.
    for shown, line in zip(blocks("text")[0].splitlines(), here.splitlines(), strict=True):
        parts = shown.split("…")
        assert line.startswith(parts[0])
        at = 0
        for part in filter(None, parts):
            at = line.index(part.strip(","), at)
    submit, serve, *rest = second.splitlines()
    assert shell(folder, submit).returncode == 0
    process = subprocess.Popen(
        ["bash", "-c", f"exec {serve}"], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        Reader(process.stderr).wait_for('"ready"')
        assert [shell(folder, command).returncode for command in rest] == [3, 0]
    finally:
        process.terminate()
        process.wait(30)
    assert [json.loads(x) for x in (folder / "stats.jsonl").read_text().splitlines()] == [
        json.loads(x) for x in here.splitlines()
    ]


def test_the_settings_are_settings(folder: Path) -> None:
    (only,) = blocks("toml")
    place = folder / "settings"
    place.mkdir()
    (place / "headrace.toml").write_text(only)
    settings = load_settings(place, need_url=False, environ={})
    assert settings.functions["stats"].options == {"lexicon": "en.txt"}
    assert settings.forge.batching == "tokens:8192"


def test_the_python_of_the_page(folder: Path) -> None:
    (folder / "from_python.py").write_text(blocks("python")[1])
    done = subprocess.run(
        [sys.executable, "from_python.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["2", "1", "1"]), done.stderr


def test_each_error_type_that_the_page_names_exists() -> None:
    source = "".join(
        p.read_text()
        for p in (ROOT / "services/headrace").rglob("*.py")
        if "forge" in str(p) or "engines" in str(p)
    )
    for word in (
        "raised",
        "wrong_count",
        "invalid_answer",
        "crashed",
        "timeout",
        "invalid_row",
        "unsupported_parameter",
    ):
        assert f"`{word}`" in PAGE
        assert f'"{word}"' in source
