"""How a function runs is configuration: what comes before what, and what cannot be said."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.contracts.errors import InvalidInput
from headrace.forge import function
from headrace.forge.ahead import ReadAhead
from headrace.forge.plans import flags_first, plan_of
from headrace.mesh.settings import load_settings


@function(batching="rows:5", max_wait_ms=7, order="ordered", processes=2)
def declared(rows: list[Any]) -> list[Any]:
    return rows


@function
def bare(rows: list[Any]) -> list[Any]:
    return rows


def settings_of(folder: Path, text: str = "", flags: dict[str, object] | None = None, **environment: str):
    (folder / "headrace.toml").write_text(text)
    return flags_first(load_settings(folder, flags, environ=environment, need_url=False), flags or {})


def batchings(f: Any, settings: Any, flag: str | None = None) -> tuple[str, str]:
    """For a run, and for a worker."""
    worker = None if flag == "submit" else flag
    return (
        str(plan_of(f, settings, serving=False, flag=flag).batching),
        str(plan_of(f, settings, serving=True, flag=worker).batching),
    )


OWN = '[functions.declared]\nbatching = "rows:3"\nworker_batching = "rows:4"\n'


def test_what_comes_before_what(tmp_path: Path) -> None:
    assert batchings(bare, settings_of(tmp_path)) == ("rows:64", "rows:64")
    assert batchings(declared, settings_of(tmp_path)) == ("rows:5", "rows:5")
    common = '[forge]\nbatching = "tokens:100"\n'
    assert batchings(declared, settings_of(tmp_path, common)) == ("tokens:100", "tokens:100")
    environment = {"HEADRACE_FORGE_BATCHING": "rows:8"}
    assert batchings(declared, settings_of(tmp_path, common, **environment)) == ("rows:8", "rows:8")
    assert batchings(declared, settings_of(tmp_path, OWN + common, **environment)) == ("rows:3", "rows:4")
    assert batchings(declared, settings_of(tmp_path, OWN + common), "tokens:9") == ("tokens:9", "tokens:9")
    assert batchings(bare, settings_of(tmp_path, OWN + common)) == ("tokens:100", "tokens:100")


def test_submit_is_for_runs_and_a_worker_batches_as_the_function_says(tmp_path: Path) -> None:
    everything = '[forge]\nbatching = "submit"\n'
    assert batchings(declared, settings_of(tmp_path, everything)) == ("submit", "rows:5")
    assert batchings(bare, settings_of(tmp_path, everything)) == ("submit", "rows:64")
    assert batchings(bare, settings_of(tmp_path, everything + 'worker_batching = "rows:2"\n')) == (
        "submit",
        "rows:2",
    )
    with pytest.raises(InvalidInput, match="rows:N or tokens:BUDGET"):
        plan_of(bare, settings_of(tmp_path), serving=True, flag="submit")


def test_a_worker_s_flags_come_before_the_settings_of_one_function(tmp_path: Path) -> None:
    flags: dict[str, object] = {
        "forge.worker_batching": "rows:9",
        "forge.max_wait_ms": 1,
        "forge.processes": None,
    }
    plan = plan_of(declared, settings_of(tmp_path, OWN, flags), serving=True)
    assert (str(plan.batching), plan.max_wait_s, plan.processes) == ("rows:9", 0.001, 2)


def test_the_rest_of_a_plan(tmp_path: Path) -> None:
    plan = plan_of(declared, settings_of(tmp_path), serving=True)
    assert (plan.order, plan.max_wait_s, plan.processes, plan.concurrency) == ("ordered", 0.007, 2, 1)
    text = '[forge]\norder = "free"\nmax_wait_ms = 0\nprocesses = 0\nsize = "length"\n'
    text += '[functions.declared]\nprocesses = 3\noptions = { a = "b" }\n'
    plan = plan_of(declared, settings_of(tmp_path, text), serving=True)
    assert (plan.order, plan.max_wait_s, plan.processes, plan.size.name) == ("free", 0.0, 3, "length")
    assert plan.options == {"a": "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[forge]\nbatching = "rows:x"\n', "forge.batching"),
        ('[forge]\nworker_batching = "submit"\n', "forge.worker_batching"),
        ('[forge]\nbatch = "rows:1"\n', "unknown setting 'forge.batch'|unknown setting forge.batch"),
        ("[functions.f]\nprocesses = -1\n", "functions"),
        ('[functions."a b"]\nprocesses = 1\n', "functions"),
        ("[functions.f]\nfoo = 1\n", "foo"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        settings_of(tmp_path, text)


def test_functions_have_no_environment_variables(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="HEADRACE_FUNCTIONS"):
        settings_of(tmp_path, HEADRACE_FUNCTIONS="x")


# --- reading ahead ---------------------------------------------------------------------------------


def test_reading_ahead_gives_all_in_order_and_raises_in_its_place() -> None:
    assert list(ReadAhead(range(10_000), lambda _: 1)) == list(range(10_000))

    def breaks() -> Iterator[int]:
        yield 1
        raise ValueError("the file ended in the middle")

    ahead = ReadAhead(breaks(), lambda _: 1)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="in the middle"):
        next(ahead)


@pytest.mark.parametrize(("nbytes", "most"), [(1, 4_097), (16 << 20, 5)])
def test_it_reads_so_far_and_no_further(nbytes: int, most: int) -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100_000):
            taken.append(i)
            yield i

    ahead = ReadAhead(source(), lambda _: nbytes)
    deadline = time.monotonic() + 30
    while len(taken) < most:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert next(ahead) == 0
    assert len(taken) <= most + 2
    ahead.stop()
    while any(t.name == "read-ahead" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(taken) <= most + 2
