"""One engine in one process, fed in three ways: preloaded, by the queue, by a producer that waits for its batch.

    python -m tests.bench.feed_engine CONFIG.json

All three use the same engine object, so that nothing but the feeding differs. It runs in the interpreter that has
vLLM, and prints one JSON line.

*Preloaded*: every item is handed over at once. *Queue-fed*: the items are submitted, then a whole `WorkerService`
(leases, ledger, pulls, results, acks) takes them; the time is from the first item's start to the last one's finish,
as their results say. *Coupled*: a producer inside this process hands over a batch, waits for all of it, and hands
over the next; it pays for no network and no queue, so its figure is the best that such a producer can have.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from headrace.client import AsyncClient
from headrace.contracts.generation import Generation
from headrace.contracts.messages import TokenPrompt
from headrace.inference_worker.engines.protocol import Engine, EngineInfo, Output, Work
from headrace.inference_worker.engines.registry import EngineOptions, create_engine
from headrace.inference_worker.registration import ensure_function, spec_of
from headrace.inference_worker.service import WorkerService
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings, WorkerSettings

PATIENCE_S = 120.0


class Config(Struct, forbid_unknown_fields=True):
    """What the benchmark asks for. `virtual`: the engine keeps a clock of its own and need not sleep."""

    engine: str
    url: str
    folder: str
    durability: str
    items: list[dict[str, Any]]
    batches: list[int]
    rounds: int
    options: dict[str, Any]
    deadline_s: float
    virtual: bool = False


class Span(Struct):
    """One run: its tokens, how long they took, in how many engine steps, and the CPU time of this process."""

    tokens: int
    seconds: float
    steps: int
    cpu_s: float


class Shared:
    """The engine as a worker gets it: neither started nor stopped by that, since the next run needs it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.prepare = engine.prepare
        self.tokens_generated = engine.tokens_generated
        self.stats = engine.stats

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def start(self) -> None:
        """It runs."""

    async def stop(self) -> None:
        """It goes on."""

    async def run(self, work: Work) -> Output:
        return await self._engine.run(work)


def works(engine: Engine, items: list[dict[str, Any]], run: str) -> list[Work]:
    """The items as an engine takes them, prepared."""
    made: list[Work] = []
    for i, item in enumerate(items):
        ids, rest = item["prompt_token_ids"], {k: v for k, v in item.items() if k != "prompt_token_ids"}
        params = Generation(**rest)
        work = Work(
            id=f"{run}/{i}",
            prompt=TokenPrompt(ids=ids),
            params=params,
            max_tokens=item["max_tokens"],
            prompt_tokens=len(ids),
        )
        made.append(engine.prepare(work))
    return made


async def in_batches(engine: Engine, items: list[dict[str, Any]], batch: int, *, virtual: bool) -> Span:
    """Hand over `batch` items, wait for all of them, hand over the next."""
    prepared = works(engine, items, f"b{batch}-{time.monotonic_ns()}")
    before, started, cpu = engine.stats(), time.perf_counter(), time.process_time()
    tokens = 0
    for first in range(0, len(prepared), batch):
        outputs = await asyncio.gather(*(engine.run(work) for work in prepared[first : first + batch]))
        tokens += sum(output.usage.completion_tokens for output in outputs)
    seconds, after = time.perf_counter() - started, engine.stats()
    if virtual:
        seconds = after["virtual_s"] - before["virtual_s"]
    return Span(tokens, seconds, after["steps"] - before["steps"], time.process_time() - cpu)


async def by_queue(engine: Engine, config: Config, settings: Settings, job: str) -> Span:
    """Submit everything, then let a worker take it."""
    async with AsyncClient(settings=settings) as client:
        await client.submit(config.items, job=job)
        before, cpu = engine.stats()["steps"], time.process_time()
        service = WorkerService(settings, lambda _: Shared(engine))
        await service.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while service.runner is None or service.runner.finisher.done < len(config.items):
                    if service.failure:
                        raise service.failure
                    await asyncio.sleep(0.02)
        finally:
            await service.stop()
        steps, cpu = engine.stats()["steps"] - before, time.process_time() - cpu
        await client.wait(job, timeout_s=PATIENCE_S)
        reply = await client.query(
            "SELECT sum(completion_tokens)::BIGINT, epoch_us(min(started_at)), epoch_us(max(finished_at)), "
            f"count(*) FILTER (status = 'ok') FROM outcomes WHERE job = '{job}'"
        )
        [[tokens, first_us, last_us, ok]] = reply.rows
        if ok != len(config.items):
            raise RuntimeError(f"{ok} of {len(config.items)} items of {job} are ok")
        return Span(tokens, (last_us - first_us) / 1e6, steps, cpu)


async def measure(config: Config) -> dict[str, Any]:
    """All rounds, preloaded and queue-fed in turn, then the coupled producer."""
    settings = Settings(
        url=config.url,
        dir=config.folder,
        durability="safe" if config.durability == "safe" else "relaxed",
        log_level="error",
        worker=WorkerSettings(engine="vllm" if config.engine == "vllm" else "sim"),
    )
    engine = create_engine(config.engine, EngineOptions(**config.options))
    await engine.start()
    try:
        async with await Mesh.connect(settings, name="bench-feed") as mesh:
            await ensure_function(mesh, spec_of(settings.worker.function, engine.info))
        await in_batches(engine, config.items[:64], 64, virtual=False)  # warm
        began = time.monotonic()
        preloaded: list[Span] = []
        fed: list[Span] = []
        for i in range(config.rounds):
            if i and time.monotonic() - began > config.deadline_s:
                break
            preloaded.append(await in_batches(engine, config.items, len(config.items), virtual=False))
            fed.append(await by_queue(engine, config, settings, f"feed-{config.engine}-{i}"))
        coupled = {} if config.virtual else await _coupled(engine, config)
    finally:
        await engine.stop()
    if config.virtual:
        # Nobody from outside feeds it, so its own clock tells the same without waiting for it.
        options = EngineOptions(**config.options)
        hasty = EngineOptions(
            slots=options.slots,
            context=options.context,
            seed=options.seed,
            extra={**options.extra, "time_scale": "0"},
        )
        engine = create_engine(config.engine, hasty)
        await engine.start()
        coupled = await _coupled(engine, config)
        await engine.stop()
    return {"preloaded": preloaded, "fed": fed, "coupled": coupled}


async def _coupled(engine: Engine, config: Config) -> dict[int, Span]:
    return {
        batch: await in_batches(engine, config.items, batch, virtual=config.virtual)
        for batch in config.batches
    }


def _make_model(config: Config) -> None:
    from headrace.inference_worker.engines.vllm_args import read_setup, set_environment

    folder = Path(config.folder) / "tiny-llama"
    config.options["model"] = str(folder)
    # Making the model imports torch, which reads its number of threads from the environment once.
    set_environment(read_setup(EngineOptions(**config.options)))
    from tests.models.tiny_llama import make_tiny_llama

    make_tiny_llama(folder)


def main() -> None:
    """Run what the configuration says."""
    import msgspec

    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    if config.engine == "vllm":
        _make_model(config)
    found = uvloop.run(measure(config))
    print(json.dumps(msgspec.to_builtins(found, str_keys=True)), flush=True)


if __name__ == "__main__":
    main()
