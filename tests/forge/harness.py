"""What the forge's tests share: a run in this process, and one by a mesh, with results in the form that people read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from msgspec import structs

from headrace.client.formats import LineDecoder
from headrace.client.submit import SubmitOptions, submit
from headrace.client.writers import jsonl_line
from headrace.contracts.messages import FunctionSpec, Result
from headrace.forge import Function
from headrace.forge.batching import Order, parse_batching
from headrace.forge.local import FunctionRunner, Numbered, Runner, Tally, run_local
from headrace.forge.plans import Plan, plan_of, spec_of
from headrace.forge.pool import Pool
from headrace.inference_worker.functions import FunctionsService
from headrace.mesh.connection import Mesh
from headrace.mesh.forge_settings import ForgeSettings
from headrace.mesh.provision import register_function
from headrace.mesh.settings import Settings, WorkerSettings
from tests.worker.harness import results, until_stored


def numbered(lines: Iterable[Any], *, form: str = "rows") -> list[Numbered]:
    """Lines as items, as a file's would be."""
    decoder = LineDecoder(FunctionSpec(name="any"), form=form)  # type: ignore[arg-type]
    return [Numbered(i, decoder.decode(msgspec.json.encode(line))) for i, line in enumerate(lines)]


def told(result: Result) -> dict[str, Any]:
    """A result as `headrace results` writes it."""
    return json.loads(msgspec.json.encode(jsonl_line(result)))


async def run_runner(
    runner: Runner, items: Sequence[Numbered], plan: Plan
) -> tuple[list[dict[str, Any]], Tally]:
    found: list[Result] = []
    await runner.start()
    try:
        tally = await run_local(iter(items), runner, plan, found.extend)
    finally:
        await runner.stop()
    return [told(r) for r in found], tally


async def run_here(
    f: Function[..., Any],
    lines: Iterable[Any],
    batching: str = "rows:64",
    *,
    order: Order = "free",
    pool: Pool | None = None,
) -> tuple[list[dict[str, Any]], Tally]:
    """The results of a run in this process."""
    plan = structs.replace(
        plan_of(f, Settings(), serving=False), batching=parse_batching(batching), order=order
    )
    return await run_runner(FunctionRunner(f, plan, pool=pool), numbered(lines), plan)


def serving(settings: Settings, functions: str, **forge: Any) -> Settings:
    """Settings of a worker for functions."""
    forge.setdefault("max_wait_ms", 20)
    return structs.replace(
        settings, worker=WorkerSettings(functions=functions, name="w"), forge=ForgeSettings(**forge)
    )


@asynccontextmanager
async def worker(settings: Settings) -> AsyncIterator[FunctionsService]:
    """A worker of functions in this process (the functions themselves have their own)."""
    service = FunctionsService(settings)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
    assert service.failure is None


async def submit_rows(
    mesh: Mesh, f: Function[..., Any], lines: Sequence[Any], *, job: str | None = None
) -> str:
    """Store rows for a function, as `headrace run --batching submit` does; return the job's name."""
    await register_function(mesh, spec_of(f))
    job = job or f"job-{f.name}"
    receipt = await submit(mesh, list(lines), job=job, options=SubmitOptions(function=f.name, form="rows"))
    assert receipt.submitted == len(lines)
    return job


async def results_of(mesh: Mesh, count: int, *, within_s: float = 60.0) -> dict[str, list[Result]]:
    """All results once there are `count`, by job, in the order of their index."""
    await until_stored(mesh, count, within_s=within_s)
    found: dict[str, list[Result]] = {}
    for result in sorted(await results(mesh), key=lambda r: r.index):
        found.setdefault(result.job, []).append(result)
    return found
