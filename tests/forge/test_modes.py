"""The same function and the same rows give the same results, however they are batched, here and by a mesh."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest

from headrace.client.submit import SubmitOptions, submit
from headrace.forge import Function
from headrace.forge.batching import parse_batching
from headrace.forge.builtin.embed import embed
from headrace.forge.plans import Plan
from headrace.forge.pool import InlinePool
from headrace.inference_worker.local import EngineRunner
from headrace.inference_worker.service import WorkerService
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.forge import probes
from tests.forge.harness import numbered, results_of, run_here, run_runner, serving, submit_rows, told, worker
from tests.worker.harness import with_worker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

WORDS: list[Any] = [
    {"text": f"word {i} {'x' * (i * 7 % 90)}", "n": i % 60 + 1, "custom_id": f"id-{i}"} for i in range(50)
]
WORDS[17] = {"text": "raise", "n": 3, "custom_id": "id-17"}
TEXTS: list[Any] = [
    *(f"text number {i}" for i in range(20)),
    {"text": "an object"},
    {"no": "text"},
    "",
    "text number 1",
]

FUNCTIONS: list[tuple[Function[..., Any], list[Any], int]] = [
    # One row of the fifty fails: 49 results and one error.
    (probes.count, WORDS, 1),
    (probes.one_by_one, WORDS, 1),
    (probes.later, WORDS, 1),
    (probes.later_one_by_one, WORDS, 1),
    (probes.plain, [*WORDS[:20], 5, None, [1, {"a": []}], "text"], 0),
    (probes.measured, WORDS, 0),
    *([(embed, TEXTS, 1)] if find_spec("wordllama") else []),
]
HERE = ["rows:1", "rows:7", "rows:64", "tokens:120 ordered", "tokens:120 free", "tokens:1 free"]
BY_WORKER = ["rows:8", "tokens:120"]


async def expected(f: Function[..., Any], rows: list[Any]) -> list[dict[str, Any]]:
    """Each row by itself, in this very process: nothing that batching could change."""
    found, _ = await run_here(f, rows, "rows:1", pool=InlinePool(f))
    return found


@pytest.mark.parametrize("mode", HERE)
@pytest.mark.parametrize(("f", "rows", "failed"), FUNCTIONS, ids=lambda p: getattr(p, "name", ""))
async def test_here(f: Function[..., Any], rows: list[Any], failed: int, mode: str) -> None:
    batching, _, order = mode.partition(" ")
    pool = None if mode in ("rows:7", "tokens:120 free") and f in (probes.count, embed) else InlinePool(f)
    found, tally = await run_here(
        f, rows, batching, order="ordered" if order == "ordered" else "free", pool=pool
    )
    assert found == await expected(f, rows)
    assert [line["index"] for line in found] == list(range(len(rows)))
    assert Counter(line["status"] for line in found)["failed"] == failed == tally.failed
    assert tally.ok == len(rows) - failed


@pytest.mark.parametrize("batching", BY_WORKER)
async def test_by_a_mesh(mesh: Mesh, settings: Settings, batching: str) -> None:
    """All functions at once, in one worker; a job of each was stored before it began."""
    jobs = {await submit_rows(mesh, f, rows): (f, rows, failed) for f, rows, failed in FUNCTIONS}
    names = ",".join(f.reference for f, _, _ in FUNCTIONS)
    async with worker(serving(settings, names, worker_batching=batching)):
        found = await results_of(mesh, sum(len(rows) for _, rows, _ in FUNCTIONS))
    for job, (f, rows, failed) in jobs.items():
        lines = [told(result) for result in found[job]]
        assert lines == await expected(f, rows), f.name
        assert sum(line["status"] == "failed" for line in lines) == failed


PROMPTS = [
    {"prompt": "hello there", "max_tokens": 4, "custom_id": "a"},
    {"messages": [{"role": "user", "content": "how are you"}]},
    {"prompt_token_ids": [1, 2, 3], "max_tokens": 2},
    {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}},
]


@pytest.mark.parametrize("batching", ["rows:2", "tokens:30", "submit"])
async def test_generate(mesh: Mesh, settings: Settings, batching: str) -> None:
    """`generate` by an engine: here, and as any worker does it."""
    reference, tally = await run_runner(
        EngineRunner("generate", settings), numbered(PROMPTS, form="lines"), Plan()
    )
    assert (tally.ok, tally.failed) == (3, 1)
    assert [line["output"] for line in reference] == ["hello there", "how are you", "1 2", None]
    if batching == "submit":
        service = WorkerService(with_worker(settings, function="generate"))
        await service.start()
        await submit(mesh, PROMPTS, job="g", options=SubmitOptions(function="generate"))
        found = [told(r) for r in (await results_of(mesh, 4))["g"]]
        await service.stop()
    else:
        plan = Plan(batching=parse_batching(batching))
        found, _ = await run_runner(EngineRunner("generate", settings), numbered(PROMPTS, form="lines"), plan)
    assert found == reference
