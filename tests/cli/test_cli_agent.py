"""`headrace agent …` against a real mesh, word for word as it is documented."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import HEADRACE, Reader, Up, clean_environment

AGENTS = '''
import asyncio
from msgspec import Struct
from headrace.agent import Agent, Context
from headrace.contracts.agents import Prompt

class Note(Struct):
    text: str

helper = Agent("helper", description="Says things back")
friend = Agent("friend", description="Is told")
sleeper = Agent("sleeper")

@helper.on("prompt")
async def prompt(ctx: Context, msg: Prompt) -> None:
    """Answer a prompt."""
    ctx.record("thought", {"about": msg.prompt})
    if msg.prompt == "fail":
        raise ValueError("no")
    ctx.send("friend", "note", {"text": msg.prompt})
    ctx.reply(f"you said {msg.prompt}")

@friend.on("note")
async def note(ctx: Context, msg: Note) -> None:
    ctx.record("told", msg.text)

@sleeper.on("prompt")
async def think(ctx: Context, msg: Prompt) -> None:
    await asyncio.sleep(float(msg.prompt))
    ctx.reply("awake")

@sleeper.on("note")
async def take(ctx: Context, msg: Note) -> None:
    await asyncio.sleep(3600)
'''


class Agents:
    """`headrace agent run` in a folder that has the module."""

    def __init__(self, up: Up, folder: Path, *names: str, module: str = AGENTS) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "people.py").write_text(module, "utf-8")
        self.ready = folder / "ready"
        self.ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [*HEADRACE, "agent", "run", *names, "--dir", str(up.folder)],
            cwd=folder, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            env=clean_environment(HEADRACE_READY_FILE=str(self.ready)),
        )  # fmt: skip
        self.err = Reader(self.process.stderr)

    def wait(self) -> None:
        until(lambda: self.ready.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.err.lines

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def until(check: Callable[[], Any], timeout_s: float = 40.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("agents") / "D"
    folder.mkdir()
    (folder / "headrace.toml").write_text("mailbox_messages = 2\n", "utf-8")
    up = Up(folder)
    yield up
    up.kill()


@pytest.fixture(scope="module")
def people(mesh: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    running = Agents(
        mesh, tmp_path_factory.mktemp("people"), "people:helper", "people:friend", "people:sleeper"
    )
    running.wait()
    yield running
    code = running.stop()
    assert code == 0, running.err.lines


def answer(mesh: Up, *arguments: str, code: int = 0, timeout: float = 60) -> Any:
    done = mesh.run("agent", *arguments, "--json", timeout=timeout)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_a_message_is_stored_handled_and_in_the_history(mesh: Up, people: Agents) -> None:
    sent = answer(mesh, "send", "friend", "--from", "me", "--kind", "note", "--body", '{"text": "hello"}')
    assert set(sent) == {"id", "stored"}
    assert sent["stored"] is True

    def handled() -> list[dict[str, Any]]:
        return [r for r in answer(mesh, "history", "friend") if r["message"] == sent["id"]]

    found = until(lambda: len(found := handled()) >= 2 and found)
    assert [r["kind"] for r in found] == ["note", "handled"]
    words = (
        "send",
        "friend",
        "--from",
        "me",
        "--kind",
        "note",
        "--body",
        '{"text": "hello"}',
        "--id",
        sent["id"],
    )
    assert answer(mesh, *words) == sent  # the same message again
    until(lambda: answer(mesh, "inbox", "friend")["work"] == 0)
    assert len(handled()) == 2
    assert json.loads(found[0]["data"]) == "hello"
    assert found[1]["peer"] == "me"


def test_a_question_is_answered_and_its_run_is_read_back_over_all_agents(mesh: Up, people: Agents) -> None:
    found = answer(mesh, "ask", "helper", "well", "--wait", "30")
    assert (found["state"], found["answer"], found["agent"]) == ("answered", "you said well", "helper")
    shown = mesh.run("agent", "ask", "helper", '{"prompt": "well"}', "--wait", "30")
    assert (shown.returncode, shown.stdout) == (0, "you said well\n")

    def whole_run() -> list[dict[str, Any]] | None:
        rows = answer(mesh, "history", found["conversation"])
        return rows if any((r["agent"], r["kind"]) == ("friend", "handled") for r in rows) else None

    rows = until(whole_run)
    at = [(r["agent"], r["kind"], r["name"]) for r in rows]
    assert at.index(("helper", "note", "thought")) < at.index(("friend", "note", "told"))
    assert {r["run"] for r in rows} == {found["conversation"]}
    assert [r["recorded_at"] for r in rows] == sorted(r["recorded_at"] for r in rows)
    again = mesh.json(
        "sql", "SELECT agent, kind, outcome FROM messages WHERE run = '" + found["conversation"] + "'"
    )
    assert again["rows"] if isinstance(again, dict) else again


def test_an_answer_that_is_late_is_fetched(mesh: Up, people: Agents) -> None:
    found = answer(mesh, "ask", "sleeper", "2.5", "--wait", "0.2", "--request", "late", code=8)
    assert (found["state"], found["request"]) == ("accepted", "late")
    found = answer(mesh, "answer", "late", "--wait", "30")
    assert (found["state"], found["answer"]) == ("answered", "awake")
    assert answer(mesh, "answer", "late") == found
    assert answer(mesh, "ask", "sleeper", "2.5", "--request", "late") == found
    assert (
        answer(mesh, "ask", "sleeper", "3", "--request", "late", code=7)["error"]["code"] == "request_reused"
    )
    assert answer(mesh, "answer", "unheard-of", code=4)["error"]["code"] == "unknown_request"


def test_who_is_not_there_is_named_with_those_who_are(mesh: Up, people: Agents) -> None:
    for words in (
        ("send", "nobody", "--from", "me", "--kind", "note"),
        ("ask", "nobody", "x"),
        ("inbox", "nobody"),
        ("stop", "nobody"),
    ):
        error = answer(mesh, *words, code=4)["error"]
        assert error["code"] == "unknown_agent"
        assert "nobody" in error["message"]
    sent = answer(mesh, "send", "later", "--from", "me", "--kind", "note", "--body", "1", "--unknown-ok")
    assert sent["stored"]
    assert answer(mesh, "inbox", "later")["work"] == 1
    assert answer(mesh, "send", "a.b", "--kind", "note", code=2)["error"]["code"] == "invalid_name"
    assert (
        answer(mesh, "send", "friend", "--kind", "note", "--body", "{", code=2)["error"]["code"]
        == "invalid_json"
    )


def test_agents_are_listed(mesh: Up, people: Agents) -> None:
    found = {a["name"]: a for a in answer(mesh, "list")}
    assert set(found) >= {"helper", "friend", "sleeper"}
    helper = found["helper"]
    assert (helper["running"], helper["description"], helper["kinds"]) == (
        True,
        "Says things back",
        ["prompt"],
    )
    assert helper["pid"] == people.process.pid
    assert "Says things back" in mesh.run("agent", "list").stdout


@pytest.mark.slow
def test_a_full_mailbox_refuses_and_stop_is_obeyed_at_once(mesh: Up, people: Agents, tmp_path: Path) -> None:
    running = Agents(
        mesh,
        tmp_path,
        "people:lazy",
        module=AGENTS.replace('Agent("sleeper")', 'Agent("lazy")').replace("sleeper", "lazy"),
    )
    try:
        running.wait()
        words = ("send", "lazy", "--from", "me", "--kind", "note", "--body", '{"text": "x"}')
        for _ in range(2):
            assert answer(mesh, *words)["stored"]
        error = answer(mesh, *words, code=5)["error"]
        assert error["code"] == "mailbox_full"
        box = answer(mesh, "inbox", "lazy")
        assert (box["work"], box["control"]) == (2, 0)
        assert box["oldest_s"] > 0
        found = answer(mesh, "stop", "lazy", "--grace", "0", "--wait", "20")
        assert found["stopped"] is True
        assert answer(mesh, "inbox", "lazy")["work"] == 2
        assert running.process.poll() is None
        found = answer(mesh, "resume", "lazy", "--wait", "20")
        assert found["stopped"] is False
    finally:
        running.kill()


def test_what_cannot_start_says_why(mesh: Up, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n", "utf-8")
    (tmp_path / "plain.py").write_text("agent = 5\n", "utf-8")
    for name, said in (
        ("nowhere:agent", "nowhere"), ("broken:agent", "ZeroDivisionError"), ("plain:agent", "no Agent"),
    ):  # fmt: skip
        done = subprocess.run(
            [*HEADRACE, "agent", "run", name, "--dir", str(mesh.folder)], cwd=tmp_path, env=clean_environment(),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2, (name, done.stderr)
        assert said in done.stderr


def test_a_drained_agent_ends_with_zero_and_is_away(mesh: Up, tmp_path: Path) -> None:
    running = Agents(
        mesh,
        tmp_path,
        "people:guest",
        module=AGENTS.replace('helper = Agent("helper"', 'guest = Agent("guest"').replace("helper", "guest"),
    )
    try:
        running.wait()
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.process.wait(40) == 0, running.err.lines
        until(lambda: {a["name"]: a["running"] for a in answer(mesh, "list")}["guest"] is False)
    finally:
        running.kill()
