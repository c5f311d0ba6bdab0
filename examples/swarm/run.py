"""A swarm of agents that reads a document and writes a report, while its agents are killed with SIGKILL.

    python examples/swarm/run.py                              undisturbed
    python examples/swarm/run.py --kills 20 --seed 7          the same report, the same calls
    python examples/swarm/run.py --kills 20 --kill-all        gateway, model's worker and broker are killed, too
    python examples/swarm/run.py --engine llamacpp            with a small real model on the CPU

The agents' diaries, mailboxes, dead letters and the ledger of calls are compared at the end. Exit code 1 if a message
is lost, a call was made twice, or anything else is wrong, each said on standard error; 2 if it cannot run.

In --dir lie the mesh of the run (`mesh`) and the report (`report.md`). A mesh that a former run left there is removed
at the start, and the report written anew; nothing else in the folder is touched. Without --dir all is temporary.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvloop
from killer import draw, kill_all, revive, victims
from msgspec import Raw
from nats.aio.msg import Msg
from places import AGENTS, HERE, OTHERS, Places, places, say
from reckoning import Progress, Reckoning, reckon, waiting
from swarm import ASKED, Document, sections

from headrace.contracts import codec
from headrace.contracts.mail import Mail
from headrace.mesh.connection import Mesh
from headrace.mesh.mail import derived_id, now_us, send_mail
from headrace.mesh.provision import provision
from headrace.mesh.settings import load_settings

ENGINES = ("sim", "echo", "llamacpp", "vllm")
MARKER = "swarm.lock"
MOST_KILLS = 200
QUIET_S = 120.0
"""Without any progress for so long a run is over: something is lost."""


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run.py"
    )
    parser.add_argument("--dir", type=Path, default=None, help="folder of the run; may exist [temporary]")
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs while it works, 0 to 200 [0]")
    parser.add_argument("--seed", type=int, default=None, help="decides who is killed when; printed [random]")
    parser.add_argument(
        "--kill-all", action="store_true", help="kill gateway, model's worker and broker, too"
    )
    parser.add_argument("--engine", choices=ENGINES, default="sim", help="engine of the model's worker [sim]")
    parser.add_argument("--model", default=None, help="GGUF file or model folder, for llamacpp and vllm")
    parser.add_argument("--document", type=Path, default=HERE / "document.md", help="text with `## ` titles")
    parser.add_argument(
        "--crash-at",
        action="append",
        default=[],
        metavar="AGENT=POINT:N",
        help="let a part's first life end at a named crash point, passed for the Nth time; repeat for others",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    given = parser.parse_args(arguments)
    if not 0 <= given.kills <= MOST_KILLS:
        parser.error(f"--kills {given.kills} is outside 0..{MOST_KILLS}")
    given.crashes = dict(text.partition("=")[::2] for text in given.crash_at)
    for name in given.crashes:
        if name not in (*AGENTS, *OTHERS):
            parser.error(f"--crash-at {name}: known are {', '.join((*AGENTS, *OTHERS))}")
    try:
        given.text = given.document.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        parser.error(f"--document {given.document}: {e}")
    if not sections(given.text):
        parser.error(f"--document {given.document}: there is no section in it (a line `## title`)")
    if given.seed is None:
        given.seed = random.randrange(1 << 30)
    return given


@contextlib.contextmanager
def folders(given: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """The folder of the mesh, empty but for its lock, and where the report goes. `SystemExit` if it is not ours."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="headrace-swarm-", ignore_cleanup_errors=True) as name:
            yield Path(name), None
        return
    mesh = given.absolute() / "mesh"
    lock = mesh / MARKER
    if mesh.exists() and not lock.exists():
        say(f"{mesh} is not of a swarm: give another --dir, or remove it")
        raise SystemExit(2)
    mesh.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"another run works in {given}")
            raise SystemExit(2) from None
        for path in mesh.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != lock:
                path.unlink()
        yield mesh, mesh.parent / "report.md"


async def work(given: argparse.Namespace, here: Places) -> tuple[Reckoning, int]:
    """Give the document to the planner, kill as asked, and reckon when all is done."""
    settings = load_settings(here.folder)
    mesh = await Mesh.connect(settings, name="harness")
    try:
        await provision(mesh)
        say("starting the agents, a gateway and the model's worker")
        await asyncio.to_thread(here.start, given.crashes)
        progress = Progress()
        await follow(mesh, progress)
        found = sections(given.text)
        questions = len(found) * len(ASKED)
        # Each question makes four messages at least: itself, a draft, a verdict, a finding.
        plan = draw(
            given.seed,
            given.kills,
            victims(AGENTS, OTHERS, everything=given.kill_all),
            2 + len(found) + 4 * questions,
        )
        root = derived_id("swarm", given.text)
        body = Raw(msgspec.json.encode(Document(given.text)))
        began = time.monotonic()
        supervising = asyncio.create_task(revive(here))
        killing = asyncio.create_task(kill_all(here, plan, progress))
        await send_mail(
            mesh,
            Mail(id=root, to="planner", sender="operator", kind="document", body=body, created_us=now_us()),
        )
        say(f"{len(found)} sections, {questions} questions; {given.kills} kills, seed {given.seed}")
        await over(mesh, progress, killing)
        killing.cancel()
        supervising.cancel()
        done = await asyncio.gather(killing, supervising, return_exceptions=True)
        kills = sum(n for n in done if isinstance(n, int))
        say(f"over after {time.monotonic() - began:.1f} s")
        return await reckon(mesh, root), kills
    finally:
        await mesh.close()


async def follow(mesh: Mesh, progress: Progress) -> None:
    """Let `progress` hear of each state as it is stored."""

    async def heard(message: Msg) -> None:
        progress.take(codec.AGENT_STATE.decode(message.data, message.headers))

    for agent in AGENTS:
        await mesh.nc.subscribe(mesh.subjects.agent_state(agent), cb=heard)


async def over(mesh: Mesh, progress: Progress, killing: asyncio.Task[int]) -> None:
    """Return when the report is there, nothing waits and nobody is to be killed; or when nothing moves any more."""
    while await progress.moves(QUIET_S):
        if progress.reported:
            break
    quiet_until = time.monotonic() + QUIET_S
    while time.monotonic() < quiet_until:
        if killing.done() and await waiting(mesh) == 0:
            return
        await asyncio.sleep(0.1)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say by the exit code whether all is as it should be."""
    given = read_arguments(arguments)
    logging.getLogger("headrace").setLevel(logging.ERROR)  # that the broker is away is said by who kills it
    with folders(given.dir) as (folder, report), places(folder, given.engine, given.model) as here:
        found, kills = uvloop.run(work(given, here))
        if report is not None:
            report.write_text(found.report, "utf-8")
    said = {
        "report_sha256": found.sha256,
        "messages": found.messages,
        "handled": found.handled,
        "calls": found.calls,
        "repeated_calls": found.repeated_calls,
        "lost": found.lost,
        "kills": kills,
    }
    for wrong in found.wrong[:20]:
        say(f"wrong: {wrong}")
    if given.json:
        print(json.dumps(said))
    else:
        for name, value in said.items():
            print(f"{name:15} {value}")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
