"""The producer of the forge's benchmark, a process of its own: makes rows, each at a cost, and gets them run.

`python -m tests.bench.forge_producer MODE ROWS COST_MS SEED URL JOBS`: MODE `rows:64` or `tokens:8192` runs them here,
`submit` stores them as JOBS jobs and exits. It prints one JSON line: when it began and ended, when its last row was
made, and for runs here what ran when.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice

import msgspec
import uvloop
from msgspec import Raw, structs

from headrace.client import Client
from headrace.client.formats import LineDecoder
from headrace.contracts.messages import FunctionSpec, Result
from headrace.forge.batching import parse_batching
from headrace.forge.local import FunctionRunner, Numbered, run_local
from headrace.forge.plans import plan_of
from headrace.mesh.settings import Settings
from tests.bench.forge_functions import padded

LONGEST = 4_000
made = {"last": 0.0}
"""When the last row was made."""


def lengths(rows: int, seed: int) -> list[int]:
    """Skewed, as texts are: half have fewer than 90 tokens, one in a hundred more than 900."""
    rng = random.Random(seed)
    return [min(LONGEST, 1 + int(rng.lognormvariate(4.5, 1.0))) for _ in range(rows)]


def produced(rows: int, cost_ms: float, seed: int) -> Iterator[dict[str, int]]:
    """The rows, made one after the other at a cost."""
    for i, n in enumerate(lengths(rows, seed)):
        time.sleep(cost_ms / 1_000)
        made["last"] = time.time()
        yield {"i": i, "n": n}


def here(mode: str, rows: int, cost_ms: float, seed: int) -> list[dict[str, object]]:
    """Run them here; what ran when, for each row."""
    decoder = LineDecoder(FunctionSpec(name="any"), form="rows")
    plan = structs.replace(plan_of(padded, Settings(), serving=False), batching=parse_batching(mode))
    found: list[Result] = []

    def items() -> Iterator[Numbered]:
        for i, row in enumerate(produced(rows, cost_ms, seed)):
            yield Numbered(i, decoder.decode(msgspec.json.encode(row)))

    async def run() -> None:
        runner = FunctionRunner(padded, plan)
        await runner.start()
        await run_local(items(), runner, plan, found.extend)
        await runner.stop()

    uvloop.run(run())
    return [json.loads(bytes(r.value)) for r in found if isinstance(r.value, Raw)]


def submit(rows: int, cost_ms: float, seed: int, url: str, jobs: int) -> None:
    """Store them, in so many jobs of the same size, each as soon as its rows are made."""
    source = produced(rows, cost_ms, seed)
    with Client(url) as client:
        for job in range(jobs):
            some = list(islice(source, rows // jobs))
            client.submit(some, job=f"bench-{jobs}-{job}", function="padded", form="rows")


def main() -> None:
    """Run as the command line says."""
    mode, rows, cost, seed, url, jobs = sys.argv[1:7]
    began = time.time()
    ran: list[dict[str, object]] = []
    if mode == "submit":
        submit(int(rows), float(cost), int(seed), url, int(jobs))
    else:
        ran = here(mode, int(rows), float(cost), int(seed))
    print(json.dumps({"began": began, "made": made["last"], "ended": time.time(), "ran": ran}))


if __name__ == "__main__":
    main()
