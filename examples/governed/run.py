"""The same calls to the same callee by way of Headrace's gateways and, beside them, of LiteLLM's proxy.

Each call costs money and must not be done twice; the callee notes on its own disk what it did. Gateways, the broker
and proxies are killed with SIGKILL on the way and started again. Then the callee's log is compared with what each side
says.

    python examples/governed/run.py
    python3 -m venv /tmp/litellm && /tmp/litellm/bin/pip install 'litellm[proxy]'
    python examples/governed/run.py --litellm /tmp/litellm/bin/python

Exit code 1 if Headrace did a call twice, left one without an end, or if ledger and callee's log disagree anywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import headrace_side
import litellm_side
import uvloop
from parts import Plan, say
from rich.console import Console
from sides import Side, table, verdict

MOST_CALLS, MOST_KILLS = 100_000, 200


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run.py"
    )
    parser.add_argument("--calls", type=int, default=1_000, help="calls on each side [1000]")
    parser.add_argument(
        "--kills",
        type=int,
        default=10,
        help="kills of gateways, and of proxies; half as many of the broker [10]",
    )
    parser.add_argument("--callers", type=int, default=16, help="callers at once [16]")
    parser.add_argument("--seed", type=int, default=None, help="decides when is killed; printed [random]")
    parser.add_argument(
        "--litellm",
        type=Path,
        default=None,
        metavar="PYTHON",
        help="interpreter of an environment with litellm[proxy]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    given = parser.parse_args(arguments)
    for name, least, most in (("calls", 10, MOST_CALLS), ("kills", 1, MOST_KILLS), ("callers", 1, 1_000)):
        if not least <= (value := getattr(given, name)) <= most:
            parser.error(f"--{name} {value} is outside {least}..{most}")
    if given.litellm is not None and not given.litellm.with_name("litellm").exists():
        parser.error(
            f"--litellm {given.litellm}: there is no LiteLLM beside it: pip install 'litellm[proxy]'"
        )
    if given.seed is None:
        given.seed = random.randrange(1 << 30)
    return given


async def demonstrate(given: argparse.Namespace) -> list[Side]:
    """Run both sides, one after the other."""
    plan = Plan(given.calls, given.kills, given.callers, given.seed)
    say(f"{plan.calls:,} calls, {plan.callers} callers, {plan.kills} kills, seed {plan.seed}")
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(prefix="headrace-governed-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for part in ("headrace", "litellm"):
            (folder / part).mkdir()
        sides.append(await headrace_side.run(folder / "headrace", plan))
        if given.litellm is not None:
            sides.append(await litellm_side.run(folder / "litellm", plan, given.litellm))
    return sides


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say by the exit code whether it shows what it should."""
    given = read_arguments(arguments)
    sides = uvloop.run(demonstrate(given))
    if given.json:
        print(json.dumps({"seed": given.seed, "kills": given.kills, "sides": [asdict(s) for s in sides]}))
    else:
        Console().print(table(sides))
    code, sentences = verdict(sides[0])
    for sentence in sentences:
        say(sentence)
    return code


if __name__ == "__main__":
    sys.exit(main())
