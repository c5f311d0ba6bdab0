"""Functions in processes of their own: what they do to themselves ends at their own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.contracts.errors import InvalidInput, NotFound
from headrace.forge import Function, function
from headrace.forge.children import Died
from headrace.forge.isolation import Isolation
from headrace.forge.locate import find_function, find_functions
from headrace.forge.pool import ProcessPool
from tests.forge import probes

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@asynccontextmanager
async def pool_of(f: Function[..., Any], **options: Any) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(f, **options)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()
    assert not pool.pids


def rows(*texts: Any) -> list[bytes]:
    return [json.dumps({"text": text}).encode() for text in texts]


async def run(f: Function[..., Any], raws: Sequence[bytes], **options: Any) -> list[Any]:
    async with pool_of(f, **options) as pool:
        found = await Isolation(f, pool).run(raws)
    return [o.error.type if o.error else json.loads(o.value or b"") for o in found]


COUNTED = {"upper": "A", "length": 1}


@pytest.mark.parametrize("f", [probes.count, probes.later_one_by_one], ids=lambda f: f.name)
async def test_every_way_to_go_wrong_is_one_row_s(f: Function[..., Any]) -> None:
    words = ["a", "refuse", "raise", "exit", "system-exit", "a"]
    found = await run(f, [*rows(*words), b'{"text": 1}'])
    assert found == [COUNTED, "refused_word", "raised", "crashed", "raised", COUNTED, "invalid_row"]


async def test_a_row_that_never_ends_is_told_so_and_the_others_go_on() -> None:
    assert await run(probes.slow, rows("a", "hang", "a", "a")) == [COUNTED, "timeout", COUNTED, COUNTED]


async def test_what_it_died_of_is_told() -> None:
    async with pool_of(probes.count) as pool:
        found = await Isolation(probes.count, pool).run(rows("exit", "segfault"))
    assert [o.error.message for o in found if o.error] == [
        "the process that ran it ended with exit code 7",
        "the process that ran it died of SIGSEGV",
    ]


async def test_a_process_that_somebody_kills_costs_its_rows_nothing() -> None:
    async with pool_of(probes.logs_runs) as pool:
        log = Path(os.environ.get("TMPDIR", "/tmp")) / f"headrace-kill-{os.getpid()}"
        log.unlink(missing_ok=True)
        raws = [json.dumps({"i": i, "log": str(log), "seconds": 0.05}).encode() for i in range(6)]
        running = asyncio.create_task(Isolation(probes.logs_runs, pool).run(raws))
        deadline = time.monotonic() + 30
        while not log.exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        os.kill(pool.pids[0], signal.SIGKILL)
        found = await running
        log.unlink()
    assert [json.loads(o.value or b"") for o in found] == list(range(6))


async def test_batches_of_several_processes_run_at_once() -> None:
    async with pool_of(probes.who, processes=2) as pool:
        assert pool.width == 2
        assert len(set(pool.pids)) == 2
        f = Isolation(probes.who, pool)
        found = await asyncio.gather(*(f.run([b"1"]) for _ in range(8)))
    assert len({o.value for (o,) in found}) == 2


async def test_an_async_function_has_several_batches_in_one_process_and_a_crash_convicts_one_row() -> None:
    async with pool_of(probes.later, concurrency=4) as pool:
        assert pool.width == 4
        f = Isolation(probes.later, pool)
        batches = [rows("a", "a"), rows("a", "exit"), rows("a", "a"), rows("a", "raise")]
        found = await asyncio.gather(*(f.run(batch) for batch in batches))
    told = [[o.error.type if o.error else "ok" for o in batch] for batch in found]
    assert told == [["ok", "ok"], ["ok", "crashed"], ["ok", "ok"], ["ok", "raised"]]


async def test_a_process_that_grew_is_replaced() -> None:
    async with pool_of(probes.grows) as pool:
        found = [await pool.run([b'{"text": "a"}']) for _ in range(3)]
    assert len({batch[0].value for batch in found}) == 3


async def test_options_and_passing_errors_reach_the_function(tmp_path: Path) -> None:
    assert await run(probes.options, [b"1"], options={"greeting": "hello"}) == ["hello"]
    log = tmp_path / "calls"
    assert await run(probes.unsteady, [json.dumps({"log": str(log)}).encode()] * 3) == ["ok"] * 3
    assert log.read_text() == "xxx"


async def test_the_loop_runs_while_a_function_holds_its_interpreter() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.02)

    ticking = asyncio.create_task(tick())
    assert await run(probes.holds_the_interpreter, [b'{"seconds": 1.0}']) == [1.0]
    ticking.cancel()
    assert ticks > 5


async def test_a_stop_ends_what_runs_at_once() -> None:
    async with pool_of(probes.count) as pool:
        running = asyncio.create_task(pool.run(rows("hang")))
        while not any(p.status() for p in [psutil.Process(pid) for pid in pool.pids]):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        await pool.stop()
        with pytest.raises(Died) as died:
            await running
    assert died.value.stopped


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_whoever_started_them(tmp_path: Path, number: int) -> None:
    import subprocess

    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from headrace.forge.pool import ProcessPool\n"
        "from tests.forge import probes\n"
        "async def main():\n"
        "    pool = ProcessPool(probes.holds_the_interpreter)\n"
        "    await pool.start()\n"
        "    print(pool.pids[0], flush=True)\n"
        "    await pool.run([b'{\"seconds\": 600}'])\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(number)
    parent.wait(20)
    gone, alive = psutil.wait_procs([child], timeout=20)
    assert gone, alive


# --- finding functions -----------------------------------------------------------------------------


def test_functions_are_found_by_module_and_name() -> None:
    assert find_function("tests.forge.probes:count") is probes.count
    names = [f.name for f in find_functions("tests.forge.probes")]
    assert "count" in names
    assert names == sorted(names)
    assert [f.name for f in find_functions("tests.forge.probes:who, embed")] == ["who", "embed"]


@pytest.mark.parametrize(
    ("target", "kind", "said"),
    [
        ("tests.forge.nothing:f", NotFound, "there is no module 'tests.forge.nothing' (looked in "),
        (
            "tests.forge.probes:nothing",
            NotFound,
            "tests.forge.probes:nothing does not exist; tests.forge.probes has the functions ",
        ),
        ("tests.forge.probes:Word", NotFound, "is no @function"),
        (
            "tests.forge.probes",
            InvalidInput,
            "write pkg.mod:function, or a built-in one (embed, classify, generate)",
        ),
        ("..bad:f", InvalidInput, "cannot be imported"),
        ("json:loads", NotFound, "json has no @function at all"),
    ],
)
def test_what_cannot_be_found_is_named(target: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as error:
        find_function(target)
    assert said in str(error.value)


def test_a_module_that_needs_another_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_other.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match="needs 'not_installed_anywhere', which is not installed"):
        find_function("needs_other:f")
    with pytest.raises(InvalidInput, match="ZeroDivisionError"):
        find_function("breaks:f")


async def test_a_function_that_no_process_can_import_is_refused_before_any_row_runs() -> None:
    @function
    def local(rows: list[Any]) -> list[Any]:
        return rows

    with pytest.raises(InvalidInput, match="does not exist"):
        await ProcessPool(local).start()
