"""The same messages to one agent under the same kills: Headrace, and beside it agentbus from PyPI.

    python examples/swarm/side_by_side.py                          1,000 messages, 2 kills
    python examples/swarm/side_by_side.py --agentbus PYTHON        with agentbus of an environment that is there

Both have a fresh nats-server of the same version and the same work: a program that notes a message in a file and
answers. The agent's process is killed with SIGKILL a moment after the program has run so often, on both sides equally
often, and is started again. A message is lost if it has no answer in the end: on the one side in the agent's committed
state, on the other in the stream of results. agentbus runs with its own defaults, in the streams that its
documentation makes.

Exit code 1 if Headrace lost or doubled a message or broke their order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from both_sides import Side, agentbus_side, environment, headrace_side
from places import say
from rich.console import Console
from rich.table import Table

AGENTBUS = "0.1.12"
MOST_MESSAGES, MOST_KILLS = 20_000, 100
MOMENT_S = 0.02
"""About as long as one message takes: so kills come at any step of its way."""
ROWS = (
    ("messages", lambda s: f"{s.sent:,}"),
    ("SIGKILLs of the agent", lambda s: f"{s.kills:,}"),
    ("have an answer", lambda s: f"{s.answered:,}"),
    ("LOST", lambda s: f"{len(s.lost):,}"),
    ("ANSWERED TWICE", lambda s: f"{s.doubled:,}"),
    ("OUT OF ORDER", lambda s: f"{s.disordered:,}"),
    ("the program ran once more", lambda s: f"{s.ran_again:,}"),
    ("messages/s, restarts included", lambda s: f"{s.rate:,.0f}"),
)


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="side_by_side.py"
    )
    parser.add_argument("--messages", type=int, default=1_000, help="messages on each side [1000]")
    parser.add_argument("--kills", type=int, default=2, help="kills on each side [2]")
    parser.add_argument("--seed", type=int, default=None, help="decides when is killed; printed [random]")
    parser.add_argument(
        "--agentbus",
        type=Path,
        default=None,
        metavar="PYTHON",
        help="interpreter of an environment with agentbus; `none` leaves that side out [one is made by pip]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    given = parser.parse_args(arguments)
    for name, least, most in (("messages", 10, MOST_MESSAGES), ("kills", 0, MOST_KILLS)):
        if not least <= (value := getattr(given, name)) <= most:
            parser.error(f"--{name} {value} is outside {least}..{most}")
    if given.agentbus not in (None, Path("none")) and not given.agentbus.exists():
        parser.error(f"--agentbus {given.agentbus}: there is no such interpreter")
    if given.seed is None:
        given.seed = random.randrange(1 << 30)
    return given


async def compare(given: argparse.Namespace, folder: Path) -> list[Side]:
    """Run both sides, one after the other."""
    rng = random.Random(given.seed)
    counts = sorted(rng.randint(1, int(0.9 * given.messages)) for _ in range(given.kills))
    marks = [(count, rng.uniform(0.0, MOMENT_S)) for count in counts]
    say(f"{given.messages:,} messages, {given.kills} kills, seed {given.seed}")
    for name in ("headrace", "agentbus"):
        (folder / name).mkdir()
    sides = [await headrace_side(folder / "headrace", given.messages, marks)]
    if given.agentbus != Path("none"):
        python = given.agentbus or await asyncio.to_thread(environment, folder / "environment", AGENTBUS)
        sides.append(await agentbus_side(folder / "agentbus", given.messages, marks, python))
    return sides


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say by the exit code whether it shows what it should."""
    given = read_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="headrace-sides-", ignore_cleanup_errors=True) as name:
        sides = asyncio.run(compare(given, Path(name)))
    if given.json:
        shown = [asdict(side) | {"rate": round(side.rate, 1)} for side in sides]
        print(json.dumps({"seed": given.seed, "sides": shown}))
    else:
        table = Table("", *(side.name for side in sides), title="the same messages, the same kills")
        for column in table.columns[1:]:
            column.justify = "right"
        for title, cell in ROWS:
            table.add_row(title, *(cell(side) for side in sides))
        Console().print(table)
    ours = sides[0]
    bad = bool(ours.lost or ours.doubled or ours.disordered or ours.kills != given.kills)
    if bad:
        say(f"Headrace: lost {ours.lost[:10]}, doubled {ours.doubled}, out of order {ours.disordered}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
