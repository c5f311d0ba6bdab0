"""Kinds of failure, each with its own end: refused, no memory, raised once, raised always (A3, A10, B3, S3)."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.contracts.messages import TextPrompt
from headrace.contracts.suspects import Suspect
from headrace.inference_worker.engines.protocol import ItemFailed, Output, Work
from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from headrace.mesh.settle import Settler
from tests.worker.harness import (
    lease,
    put,
    results,
    running,
    task,
    until,
    until_empty,
    until_stored,
    with_worker,
)
from tests.worker.test_items import Stub
from tests.worker.test_triage import by_index, prompts, records, show, sim

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("where", ["prepare", "run"])
async def test_b3_one_malformed_grammar_among_63_fails_alone_and_at_once(
    where: str, mesh: Mesh, settings: Settings
) -> None:
    class Engine(Stub):
        def prepare(self, work: Work) -> Work:
            self.check(work, "prepare")
            return work

        async def run(self, work: Work) -> Output:
            self.check(work, "run")
            return Output()

        def check(self, work: Work, here: str) -> None:
            if here == where and work.prompt == TextPrompt(text="bad"):
                raise ItemFailed(
                    "invalid_parameter", "the grammar has no rule root", field="structured_outputs"
                )

    tasks = [task(i, prompt=TextPrompt(text="bad" if i == 40 else "good")) for i in range(64)]
    async with running(with_worker(settings, slots=64), lambda _: Engine()) as worker:
        await put(mesh, tasks)
        await until_empty(mesh)
        assert worker.host.deaths == 0
    found = by_index(await results(mesh))
    bad = found.pop(40)
    assert (bad.status, bad.attempt) == ("failed", 1)
    assert bad.error is not None
    assert (bad.error.type, bad.error.field) == ("invalid_parameter", "structured_outputs")
    assert [(r.status, r.attempt) for r in found.values()] == [("ok", 1)] * 63


async def test_s3_an_item_without_memory_runs_again_alone_in_the_same_try(
    mesh: Mesh, settings: Settings
) -> None:
    large = [task(i, prompt=TextPrompt(text="large " * 200), max_tokens=300) for i in (7, 8)]
    tasks = [*prompts(40, {})[:7], *large, *prompts(40, {})[9:]]
    async with running(sim(settings, engine_options={"oom_tokens": "400"})) as worker:
        await put(mesh, tasks)
        await until_empty(mesh)
        found = by_index(await results(mesh))
        show(found, worker)
        assert worker.host.deaths == 0
    assert [(r.status, r.attempt) for r in found.values()] == [("ok", 1)] * 40


async def test_s3_an_item_that_finds_no_memory_even_alone_is_failed(mesh: Mesh, settings: Settings) -> None:
    options = {"oom_tokens": "400", "oom_always": "true"}
    tasks = [*prompts(20, {}), task(20, prompt=TextPrompt(text="large " * 200), max_tokens=300)]
    async with running(sim(settings, engine_options=options)) as worker:
        await put(mesh, tasks)
        await until_empty(mesh)
        found = by_index(await results(mesh))
        show(found, worker)
        assert worker.host.deaths == 0
    large = found.pop(20)
    assert (large.status, large.attempt) == ("failed", 1)
    assert large.error is not None
    assert large.error.type == "out_of_memory"
    assert "as oom_tokens asked" in large.error.message
    assert {r.status for r in found.values()} == {"ok"}


async def test_a3_what_raises_once_is_tried_again_and_its_neighbours_do_not_wait(
    mesh: Mesh, settings: Settings
) -> None:
    async with running(sim(settings, engine_options={"fail_share": "0.2"})) as worker:
        await put(mesh, prompts(200, {}))
        await until_empty(mesh)
        found = by_index(await results(mesh))
        show(found, worker)
    assert {r.status for r in found.values()} == {"ok"}
    again = [r for r in found.values() if r.attempt == 2]
    assert 20 <= len(again) <= 60
    assert {r.attempt for r in found.values()} == {1, 2}


async def test_an_error_that_utf8_has_no_bytes_for_is_told_all_the_same(
    mesh: Mesh, settings: Settings
) -> None:
    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            if work.prompt == TextPrompt(text="final"):
                raise ItemFailed("refused", "half a character: \udcff")
            raise OSError("no such file: \udcff")

    tasks = [task(0), task(1, prompt=TextPrompt(text="final"))]
    async with running(with_worker(settings, max_tries=2), lambda _: Engine()):
        await put(mesh, tasks)
        await until_empty(mesh)
    found = by_index(await results(mesh))
    assert [found[0].status, found[1].status] == ["dead", "failed"]
    assert all(r.error is not None and r.error.message.endswith(": ?") for r in found.values())


async def test_a10_tries_exhausted_for_some_and_nothing_is_unaccounted(
    mesh: Mesh, settings: Settings
) -> None:
    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            if int(work.id.partition("/")[2].partition("@")[0]) % 10 == 0:
                raise ConnectionError(f"boom at try {work.attempt}")
            return Output()

    async with running(with_worker(settings, max_tries=2), lambda _: Engine()):
        await put(mesh, [task(i) for i in range(200)])
        await until_empty(mesh)
    found = by_index(await results(mesh))
    assert Counter(r.status for r in found.values()) == {"ok": 180, "dead": 20}
    dead = [r.error for r in found.values() if r.status == "dead"]
    assert all(e is not None and e.type == "tries_exhausted" and "boom at try 2" in e.message for e in dead)


async def test_the_last_error_outlives_the_worker_that_saw_it(mesh: Mesh, settings: Settings) -> None:
    class Engine(Stub):
        async def run(self, work: Work) -> Output:
            raise ConnectionError("the tokenizer's server refused")

    limits = with_worker(settings, max_tries=2, model="stub")
    async with running(limits, lambda _: Engine(engine="echo")):
        await put(mesh, [task(0)])
        await until(lambda: noted(mesh, "the tokenizer's server refused"))
    [taken] = await lease(mesh, 1)  # its second try, by a worker that dies without a word
    Settler(mesh).nak(taken, 0.01)
    async with running(limits, lambda _: Engine(engine="echo")):
        await until_stored(mesh, 1)
        await until_empty(mesh)
    [dead] = await results(mesh)
    assert (dead.status, dead.attempt) == ("dead", 3)
    assert dead.error is not None
    assert "the tokenizer's server refused" in dead.error.message


async def noted(mesh: Mesh, text: str) -> bool:
    return any(text in r.error for r in (await records(mesh)).values() if isinstance(r, Suspect))
