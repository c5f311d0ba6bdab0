"""A worker that serves functions: what it holds, what it survives, and what it says of itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from headrace.client.submit import SubmitOptions, submit
from headrace.contracts.errors import Conflict, HeadraceError, InvalidInput
from headrace.forge.plans import spec_of
from headrace.inference_worker.registration import ensure_function
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import get_function, register_function
from headrace.mesh.settings import Settings
from tests.forge import probes
from tests.forge.harness import results_of, serving, submit_rows, worker
from tests.worker.harness import left, stored, until, until_empty

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def module(*functions: Any) -> str:
    return ",".join(f.reference for f in functions)


async def test_leases_are_renewed_while_a_function_holds_its_interpreter(
    mesh: Mesh, settings: Settings
) -> None:
    short = structs.replace(settings, ack_wait_s=2.0)
    async with await Mesh.connect(short, name="producer") as producer:
        job = await submit_rows(producer, probes.holds_the_interpreter, [{"seconds": 1.6}] * 3)
    async with worker(serving(short, module(probes.holds_the_interpreter), worker_batching="rows:3")):
        found = (await results_of(mesh, 3))[job]
        await until_empty(mesh)
    # More than two leases in one call: none lapsed, nothing ran twice.
    assert [(r.status, r.attempt) for r in found] == [("ok", 1)] * 3
    assert await stored(mesh) == 3


async def test_a_crash_costs_one_row_and_the_worker_lives(mesh: Mesh, settings: Settings) -> None:
    words = [{"text": "exit" if i == 13 else f"w{i}"} for i in range(50)]
    job = await submit_rows(mesh, probes.count, words)
    async with worker(serving(settings, module(probes.count), worker_batching="rows:16")) as service:
        found = (await results_of(mesh, 50))[job]
        (only,) = service.workers
        assert only.host.deaths == 0
    assert [r.error.type if r.error else "ok" for r in found] == [
        "crashed" if i == 13 else "ok" for i in range(50)
    ]
    assert {r.attempt for r in found} == {1}


async def test_no_more_is_held_than_two_batches_for_each_process(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    rows = [{"i": i, "log": log, "seconds": 0.3} for i in range(40)]
    await submit_rows(mesh, probes.logs_runs, rows)
    async with worker(serving(settings, module(probes.logs_runs), worker_batching="rows:4")) as service:
        (only,) = service.workers

        async def begun() -> bool:
            return Path(log).exists()

        await until(begun)
        assert only.host.info.slots == 8
        assert only.runner is not None
        assert len(only.runner.held()) <= 8 + len(only.runner.waiting.items())
        # What it has not begun goes back at once when it stops: others run it.
    ran = [int(line) for line in Path(log).read_text().split()]
    assert len(ran) == len(set(ran))
    assert await left(mesh, "job-logs_runs") == 40 - await stored(mesh)


async def test_a_budget_holds_no_more_rows_than_it_has_room_for(mesh: Mesh, settings: Settings) -> None:
    """The size of rows is not known before they come, and a worker must not take all of a job to find it out."""
    await submit_rows(mesh, probes.measured_slowly, [{"text": "x", "n": 10}] * 2_000)
    async with worker(serving(settings, module(probes.measured_slowly))) as service:
        (only,) = service.workers
        runner = only.runner
        assert runner is not None
        most = 0
        deadline = asyncio.get_running_loop().time() + 30
        while await stored(mesh) < 300:
            most = max(most, len(runner.held()))
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
    # Four budgets of 1,000 tokens in rows of 10, and some that were asked for before that was known.
    assert 100 < most < 600


async def test_what_comes_slowly_does_not_wait_for_a_full_batch(mesh: Mesh, settings: Settings) -> None:
    async with worker(serving(settings, module(probes.who), worker_batching="rows:64", max_wait_ms=30)):
        for i in range(3):
            await submit_rows(mesh, probes.who, [1], job=f"slow-{i}")
            await results_of(mesh, i + 1)


async def test_a_prompt_is_no_row(mesh: Mesh, settings: Settings) -> None:
    async with worker(serving(settings, module(probes.count))):
        await submit(mesh, [{"prompt": "hello"}], job="p", options=SubmitOptions(function="count"))
        (found,) = (await results_of(mesh, 1))["p"]
    assert found.error is not None
    assert (found.error.type, found.error.message) == (
        "invalid_prompt",
        "function count takes rows: submit with --rows",
    )


async def test_rows_and_answers_may_be_larger_than_a_message(mesh: Mesh, settings: Settings) -> None:
    text = "x" * 1_500_000
    job = await submit_rows(mesh, probes.plain, [{"text": text}, {"text": "small"}])
    async with worker(serving(settings, module(probes.plain), worker_batching="rows:2")):
        large, small = (await results_of(mesh, 2))[job]
    assert large.blob is not None
    assert large.blob.size > len(text)
    assert json.loads(bytes(small.value)) == {"got": {"text": "small"}}  # type: ignore[arg-type]


async def test_options_come_from_the_settings_of_one_function(mesh: Mesh, settings: Settings) -> None:
    from headrace.mesh.forge_settings import FunctionSettings

    told = structs.replace(
        serving(settings, module(probes.options)),
        functions={"options": FunctionSettings(options={"greeting": "hi"})},
    )
    job = await submit_rows(mesh, probes.options, [1])
    async with worker(told):
        (found,) = (await results_of(mesh, 1))[job]
    assert json.loads(bytes(found.value)) == "hi"  # type: ignore[arg-type]


async def test_killed_processes_are_replaced_and_nothing_runs_twice_by_the_mesh(
    mesh: Mesh, settings: Settings, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    rows = [{"i": i, "log": log, "seconds": 0.02} for i in range(60)]
    job = await submit_rows(mesh, probes.logs_runs, rows)
    async with worker(serving(settings, module(probes.logs_runs), worker_batching="rows:10")) as service:
        (only,) = service.workers
        for kill_at in (5, 25):

            async def ran(n: int = kill_at) -> bool:
                return Path(log).exists() and len(Path(log).read_text().split()) > n

            await until(ran, within_s=60)
            os.kill(only.host.engine.stats()["pids"][0], signal.SIGKILL)
        found = (await results_of(mesh, 60))[job]
    assert [json.loads(bytes(r.value)) for r in found] == list(range(60))  # type: ignore[arg-type]
    assert {r.attempt for r in found} == {1}
    runs = Counter(Path(log).read_text().split())
    assert (
        max(runs.values()) <= 1 + 2 * 2
    )  # a kill costs the rows of its batch a run, and their halves at most one


async def test_a_stopped_worker_leaves_no_process(mesh: Mesh, settings: Settings) -> None:
    async with worker(serving(settings, module(probes.who, probes.count), processes=2)) as service:
        pids = [pid for w in service.workers for pid in w.host.engine.stats()["pids"]]
        assert len(set(pids)) == 4
        assert [w.worker for w in service.workers] == ["w-who", "w-count"]
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=20)
    assert not alive


# --- registration ----------------------------------------------------------------------------------


async def test_a_function_is_registered_with_one_queue_for_each_lane(mesh: Mesh) -> None:
    await register_function(mesh, spec_of(probes.count))
    spec = await get_function(mesh, "count")
    assert (spec.engine, spec.model, spec.version) == ("python", "tests.forge.probes:count@3", "3")
    assert spec.shapes() == [0]
    assert [spec.clamp_shape(k) for k in (0, 6, 24)] == [0, 0, 0]


async def test_another_version_takes_the_place_of_the_registered_one(mesh: Mesh) -> None:
    old = structs.replace(spec_of(probes.count), version="2", model="tests.forge.probes:count@2")
    await register_function(mesh, old)
    assert (await ensure_function(mesh, spec_of(probes.count))).version == "3"
    assert (await get_function(mesh, "count")).model == "tests.forge.probes:count@3"
    # Two workers that start at once: one of the two is what is registered, and both go on.
    versions = [structs.replace(old, version=v, model=f"tests.forge.probes:count@{v}") for v in ("4", "5")]
    await asyncio.gather(*(ensure_function(mesh, spec) for spec in versions))
    assert (await get_function(mesh, "count")).version in {"4", "5"}


async def test_another_function_of_the_same_name_is_refused(mesh: Mesh) -> None:
    await register_function(mesh, structs.replace(spec_of(probes.count), model="other.module:count@3"))
    with pytest.raises(Conflict, match="is registered with model"):
        await ensure_function(mesh, spec_of(probes.count))


def test_two_functions_of_one_name_are_not_served(settings: Settings) -> None:
    from headrace.inference_worker.functions import FunctionsService

    with pytest.raises(InvalidInput, match="two functions are named 'embed'"):
        FunctionsService(serving(settings, "headrace.forge.builtin.embed:embed,tests.forge.same_name:embed"))


async def test_a_function_that_fails_to_load_in_its_process_ends_the_start_with_one_sentence(
    mesh: Mesh, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.inference_worker.functions import FunctionsService

    (tmp_path / "once_only.py").write_text(
        "import os, sys\n"
        "from headrace.forge import function\n"
        "if 'headrace.forge.child' in getattr(sys.modules['__main__'], '__spec__', None).__repr__():\n"
        "    raise RuntimeError('not in a process of its own')\n"
        "@function\n"
        "def f(rows): return rows\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(HeadraceError, match="not in a process of its own"):
        await FunctionsService(serving(settings, "once_only")).start()
