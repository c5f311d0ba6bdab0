"""The agent of the comparison: it runs a program for each message, and keeps the answer in its state.

headrace agent run coder:coder
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from msgspec import Struct

from headrace.agent import Agent, Context, RetryLater

WORK = Path(__file__).parent / "work.sh"


class Task(Struct):
    """What is to be done: `content` names it."""

    content: str


class Answers(Struct):
    """The answers, in their order."""

    answers: list[str] = []


coder = Agent("coder", state=Answers, description="Runs a program for each message")


@coder.on("task")
async def run(ctx: Context[Answers], msg: Task) -> None:
    """Run the program with the task in a prompt."""
    prompt = json.dumps({"content": msg.content}, indent=2)
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", str(WORK), os.environ["SWARM_WORK_LOG"], prompt, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RetryLater(f"the program ended with {process.returncode}")
    ctx.state.answers.append(output.decode().strip())
