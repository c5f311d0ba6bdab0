"""`headrace dead list|show|redrive` against a real mesh: its JSON, its words, its exit codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.cli.harness import Up, headrace
from tests.completion.again import ended_job, finish
from tests.completion.test_dead import letter
from tests.completion.world import Producer, register, sql, until

LETTER_SUBJECT = "hr.tasks.echo.normal.t6.dead-cli"


def on_mesh(up: Up, work: Callable[[Mesh], Awaitable[Any]]) -> Any:
    """Run `work` with a connection to the mesh."""

    async def run() -> Any:
        async with await Mesh.connect(Settings(url=up.url), name="test") as mesh:
            return await work(mesh)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def dead_mesh(echo_mesh: Up) -> Up:
    """A job with three dead items of a function that no worker runs, and one letter."""

    async def make(mesh: Mesh) -> None:
        await register(mesh)
        await letter(mesh, LETTER_SUBJECT, b"no t\xc3\xa4sk")
        await ended_job(mesh, 1, failed=1, dead=3, job="dead-cli")

        async def landed() -> bool:
            return await sql(mesh, "SELECT count(*) FROM dead") == [[1]]

        await until(landed)

    on_mesh(echo_mesh, make)
    return echo_mesh


def test_the_list_is_a_json_list(dead_mesh: Up) -> None:
    found = dead_mesh.json("dead", "list", "--job", "dead-cli")
    assert sorted(e["id"] for e in found) == ["1", "dead-cli/2@1", "dead-cli/3@1", "dead-cli/4@1"]
    assert found[0].keys() >= {
        "id",
        "kind",
        "reason",
        "tries",
        "at_us",
        "job",
        "index",
        "generation",
        "redriven",
    }
    assert {e["kind"] for e in dead_mesh.json("dead", "list")} == {"item", "letter"}
    assert dead_mesh.json("dead", "list", "--job", "none") == []
    one = dead_mesh.run("dead", "list", "--job", "dead-cli", "--limit", "1", "--json")
    assert len(json.loads(one.stdout)) == 1
    assert one.stderr == "only the newest 1 are shown; there are more (--limit)\n"
    table = dead_mesh.run("dead", "list")
    assert table.returncode == 0
    assert "dead-cli/2@1" in table.stdout
    assert "given up" in table.stdout


def test_one_is_shown(dead_mesh: Up) -> None:
    item = dead_mesh.json("dead", "show", "dead-cli/2@1")
    assert (item["kind"], item["job"], item["index"], item["error_type"]) == (
        "item", "dead-cli", 2, "tries_exhausted",
    )  # fmt: skip
    assert item["task"]["prompt"] == {"type": "text", "text": "item 2"}
    assert item["task"]["index"] == 2
    shown = dead_mesh.json("dead", "show", "1")
    assert (shown["kind"], shown["data"], shown["encoding"], shown["subject"]) == (
        "letter", "no täsk", "utf-8", LETTER_SUBJECT,
    )  # fmt: skip
    assert "no täsk" in dead_mesh.run("dead", "show", "1").stdout
    missing = dead_mesh.run("dead", "show", "dead-cli/0@1", "--json")
    assert missing.returncode == 1
    assert json.loads(missing.stdout)["error"]["code"] == "not_dead"
    assert dead_mesh.run("dead", "show", "what").returncode == 2


def test_redrive(dead_mesh: Up) -> None:
    """In the order in which somebody would: one item, the rest of the job, the letter."""
    assert dead_mesh.json("dead", "redrive", "dead-cli/3@1") == {
        "redriven": 1, "job": "dead-cli", "generation": 2, "left": 0, "note": None,
    }  # fmt: skip
    waits = dead_mesh.run("dead", "redrive", "dead-cli/2@1", "--json")
    assert waits.returncode == 1
    assert json.loads(waits.stdout)["error"]["code"] == "still_running"
    assert "1 items left: wait for its end" in waits.stderr

    async def run_it(mesh: Mesh) -> None:
        await finish(Producer(mesh, "dead-cli"), 2)

    on_mesh(dead_mesh, run_it)
    letter_first = dead_mesh.run("dead", "redrive", "1")
    assert (letter_first.returncode, letter_first.stdout, letter_first.stderr) == (0, "redriven: 1\n", "")
    twice = dead_mesh.run("dead", "redrive", "1")
    assert twice.returncode == 1
    assert "letter 1 was redriven before, at " in twice.stderr
    assert dead_mesh.json("dead", "redrive", "1", "--again")["redriven"] == 1
    rest = dead_mesh.run("dead", "redrive", "--job", "dead-cli")
    assert rest.stdout == "redriven: 2 of dead-cli, items as generation 3\n"
    assert [e["id"] for e in dead_mesh.json("dead", "list", "--job", "dead-cli")] == ["1"]


def test_wrong_usage_is_two(echo_mesh: Up) -> None:
    assert echo_mesh.run("dead", "redrive").returncode == 2
    assert echo_mesh.run("dead", "redrive", "1", "--job", "j").returncode == 2
    assert echo_mesh.run("dead", "redrive", "--job", "a b").returncode == 2
    assert echo_mesh.run("dead", "show", "").returncode == 2
    assert echo_mesh.run("dead", "list", "--limit", "0").returncode == 2
    assert headrace("dead", "none").returncode == 2
    nothing = echo_mesh.run("dead", "redrive", "--job", "never-was")
    assert nothing.returncode == 1
    for command in ("list", "show", "redrive"):
        done = headrace("dead", command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: headrace dead ")
