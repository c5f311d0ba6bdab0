"""One agent and the same messages on both sides: Headrace's mailbox, and agentbus as it comes from PyPI."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import nats
from coder import WORK, Answers
from msgspec import Raw
from places import HERE, Part, say

from headrace.contracts import codec
from headrace.contracts.mail import Mail
from headrace.mesh.connection import Mesh
from headrace.mesh.jsapi import last_message, stream_info
from headrace.mesh.mail import derived_id, mail_message, now_us
from headrace.mesh.provision import provision
from headrace.mesh.publisher import publish_all
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import load_settings

SETTINGS = """url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0
"""
Mark = tuple[int, float]
"""How often the program has run when the agent is to be killed, and so many seconds later."""
DAY_S = 24 * 3_600.0
LIMIT_S, SETTLED_S = 600.0, 3.0
PUBLISH = """
import asyncio, sys
from agentbus.publish import publish_task
async def main():
    for n in range(int(sys.argv[2])):
        await publish_task(server_url=sys.argv[1], target_agent="coder", task_type="default",
                           content=f"message-{n}", from_agent="main")
asyncio.run(main())
"""


@dataclass
class Side:
    """What became of the messages of one side."""

    name: str
    sent: int
    kills: int = 0
    answered: int = 0
    """Different messages that have an answer."""
    doubled: int = 0
    """Messages with more than one."""
    ran_again: int = 0
    """Times that the program ran for a message once more."""
    disordered: int = 0
    """Answers that stand behind that of a later message."""
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Messages a second, from the first that was handled to the last, with the restarts."""
        return self.answered / self.seconds if self.seconds else 0.0


class WorkLog:
    """What the program noted: one line each time that it ran."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def count(self) -> int:
        """How often it ran."""
        return self.path.read_bytes().count(b"\n")

    async def kill_at(self, part: Part, marks: Sequence[Mark], side: Side) -> None:
        """Kill and start again after so many runs each, and a moment."""
        for mark, moment_s in marks:
            while self.count() < mark:  # noqa: ASYNC110  (another process writes it)
                await asyncio.sleep(0.001)
            await asyncio.sleep(moment_s)
            await asyncio.to_thread(part.kill, again=True)
            side.kills += 1
            say(f"  {side.name}: SIGKILL with {mark} of {side.sent} begun")

    async def settled(self, busy: Callable[[], Awaitable[int]], killing: asyncio.Task[None]) -> float:
        """Return when nothing waits and nothing runs any more, with the time at which that began."""
        last, moved, until = -1, time.monotonic(), time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            count = self.count()
            if count != last or await busy() or not killing.done():
                last, moved = count, time.monotonic()
            elif time.monotonic() - moved > SETTLED_S:
                break
            await asyncio.sleep(0.05)
        killing.cancel()
        return moved


def judge(side: Side, answers: Sequence[str], runs: WorkLog) -> None:
    """Compare what was sent with what was answered."""
    names = [f"message-{n}" for n in range(side.sent)]
    got = Counter(answer.removeprefix("done ") for answer in answers)
    side.answered = sum(name in got for name in names)
    side.lost = [name for name in names if name not in got]
    side.doubled = sum(n > 1 for n in got.values())
    numbers = [int(answer.rpartition("-")[2]) for answer in answers]
    side.disordered = sum(b < a for a, b in itertools.pairwise(numbers))
    ran = Counter(runs.path.read_text("utf-8").split())
    side.ran_again = sum(n - 1 for n in ran.values())


async def headrace_side(folder: Path, messages: int, marks: Sequence[Mark]) -> Side:
    """By `headrace agent run`, the answers in the agent's committed state."""
    side, runs = Side("Headrace", messages), WorkLog(folder / "work.log")
    server = NatsServer(folder / "nats", durability="relaxed")
    server.start()
    (folder / "headrace.toml").write_text(SETTINGS.format(url=server.url), "utf-8")
    headrace = [sys.executable, str(Path(sys.executable).with_name("headrace"))]
    part = Part("coder", [*headrace, "agent", "run", "coder:coder", "--dir", str(folder)], folder)
    os.environ["SWARM_WORK_LOG"] = str(runs.path)
    try:
        async with await Mesh.connect(load_settings(folder), name="comparison") as mesh:
            await provision(mesh)
            mails = [
                Mail(
                    id=derived_id("task", str(n)), to="coder", sender="main", kind="task", created_us=now_us(),
                    body=Raw(json.dumps({"content": f"message-{n}"}).encode()),
                )
                for n in range(messages)
            ]  # fmt: skip
            for at in range(0, messages, 500):
                some = [mail_message(mesh, mail) for mail in mails[at : at + 500]]
                await publish_all(mesh, mesh.topology.mail, some)
            part.start()
            part.wait_ready()
            began = time.monotonic()
            killing = asyncio.create_task(runs.kill_at(part, marks, side))

            async def busy() -> int:
                return int((await stream_info(mesh, mesh.topology.mail))["state"]["messages"])

            side.seconds = await runs.settled(busy, killing) - began
            stored = await last_message(mesh, mesh.topology.agents, mesh.subjects.agent_state("coder"))
            record = None if stored is None else codec.AGENT_STATE.decode(stored.data, stored.headers)
            state = Answers() if record is None else msgspec.json.decode(record.state, type=Answers)
    finally:
        part.kill()
        server.stop()
    judge(side, state.answers, runs)
    return side


async def agentbus_side(folder: Path, messages: int, marks: Sequence[Mark], python: Path) -> Side:
    """By `agentbus worker run` with its own defaults, the answers in its stream of results."""
    side, runs = Side(f"agentbus {version(python)}", messages), WorkLog(folder / "work.log")
    server = NatsServer(folder / "nats", durability="relaxed")
    server.start()
    config = folder / "agentbus.toml"
    command = json.dumps(["/bin/sh", str(WORK), str(runs.path), "{input}"])
    config.write_text(
        f'[agent]\nid = "coder"\nchat_cmd = {command}\n[worker]\nserver_url = "{server.url}"\n'
        f'[log]\ndir = "{folder}"\n',
        "utf-8",
    )
    # It says nothing when it is ready, so it is taken for ready at once: all its messages wait for it already.
    part = Part(
        "coder", [str(python), "-m", "agentbus.cli", "worker", "run", "--config", str(config)], folder
    )
    client: Any = await nats.connect(server.url)
    try:
        js = client.jetstream()
        await js.add_stream(name="AGENTBUS_TASKS", subjects=["agentbus.*.tasks"], max_age=7 * DAY_S)
        await js.add_stream(name="AGENTBUS_RESULTS", subjects=["agentbus.*.results"], max_age=30 * DAY_S)
        publish = [str(python), "-c", PUBLISH, server.url, str(messages)]
        await asyncio.to_thread(subprocess.run, publish, check=True)
        stored = (await js.stream_info("AGENTBUS_TASKS")).state.messages
        if stored != messages:
            say(f"  {side.name}: {stored} of {messages} messages are stored")
        part.start()
        while runs.count() == 0:  # noqa: ASYNC110  (another process writes it)
            await asyncio.sleep(0.005)
        began = time.monotonic()
        killing = asyncio.create_task(runs.kill_at(part, marks, side))

        async def busy() -> int:
            info = await js.consumer_info("AGENTBUS_TASKS", "coder")
            return int(info.num_pending) + int(info.num_ack_pending)

        side.seconds = await runs.settled(busy, killing) - began
        answers: list[str] = []
        last = (await js.stream_info("AGENTBUS_RESULTS")).state.last_seq
        for seq in range(1, last + 1):
            result = json.loads((await js.get_msg("AGENTBUS_RESULTS", seq=seq)).data)
            if result["status"] == "completed":
                answers.append(result["result"])
    finally:
        part.kill()
        await client.close()
        server.stop()
    judge(side, answers, runs)
    return side


def version(python: Path) -> str:
    """The version of agentbus that an environment has."""
    asked = "import importlib.metadata as m; print(m.version('agentbus'))"
    return subprocess.run(
        [str(python), "-c", asked], capture_output=True, text=True, check=True
    ).stdout.strip()


def environment(folder: Path, wanted: str) -> Path:
    """An environment of its own with agentbus in it; return its interpreter."""
    say(f"making an environment with agentbus {wanted}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"agentbus=={wanted}"]
    subprocess.run(pip, check=True, stdout=sys.stderr, cwd=HERE)
    return python
