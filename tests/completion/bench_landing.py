"""Landing rate without a broker: `python tests/completion/bench_landing.py [rows] [batch]`.

From the bytes of results to committed rows with a primary key: decode, insert, counters, commit. The rate is
given by the wall and by this process's CPU time, since other work on the machine disturbs the first.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from headrace.completion.landing import land
from headrace.completion.store import Store
from headrace.contracts import codec
from headrace.contracts.messages import Choice, Result, Timings, Usage

TEXT = "the quick brown fox jumps over the lazy dog and then some more tokens arrive here quietly"
WORDS = TEXT.split()


def encoded(rng: random.Random, index: int) -> bytes:
    """About 750 bytes, most of it text that differs from row to row."""
    return codec.RESULT.encode(
        Result(
            job="nightly-2026",
            index=index,
            function="generate",
            status="ok",
            custom_id=f"request-{index}",
            choices=[Choice(text=" ".join(rng.choices(WORDS, k=50)), finish_reason="length")],
            usage=Usage(prompt_tokens=100, completion_tokens=50),
            model="HuggingFaceTB/SmolLM2-135M-Instruct",
            engine="echo",
            params_fingerprint="0123456789abcdef",
            worker="worker-1",
            timings=Timings(
                submitted_us=10**15 + index, received_us=10**15, started_us=10**15, finished_us=10**15
            ),
            trace_id="0123456789abcdef0123456789abcdef",
        )
    )


async def main(rows: int, batch: int) -> None:
    """Land `rows` in transactions of `batch`, and print what it took."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "bench.duckdb")
        await store.open()
        wall = cpu = 0.0
        size = 0
        for start in range(0, rows, batch):
            data = [encoded(rng, i) for i in range(start, min(rows, start + batch))]
            size += sum(map(len, data))
            began, began_cpu = time.perf_counter(), time.process_time()
            await store.write(land, [codec.RESULT.decode(d) for d in data])
            wall += time.perf_counter() - began
            cpu += time.process_time() - began_cpu
        await store.close()
        stored = store.path.stat().st_size
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    print(f"{rows:,} rows of {size / rows:.0f} B in transactions of {batch:,}")
    print(f"{rows / wall:,.0f} rows/s by the wall, {rows / cpu:,.0f} rows/s of CPU time")
    print(f"{stored / rows:.0f} B a row on disk, peak RSS {peak_mb:.0f} MB")


if __name__ == "__main__":
    given = [int(a) for a in sys.argv[1:3]]
    asyncio.run(main(*given, *(100_000, 2_000)[len(given) :]))
