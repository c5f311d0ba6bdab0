"""Provisioning: idempotent, from several processes at once, and drift is refused and printed."""

from __future__ import annotations

import asyncio

import pytest

from headrace.contracts.errors import Conflict, NotFound
from headrace.contracts.messages import FunctionSpec
from headrace.mesh import jsapi
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import (
    get_function,
    list_functions,
    provision,
    register_function,
    unregister_function,
)
from headrace.mesh.publisher import publish
from headrace.mesh.settings import Settings

pytestmark = pytest.mark.anyio


async def test_idempotent_and_concurrent(settings: Settings) -> None:
    async with await Mesh.connect(settings, name="a") as a, await Mesh.connect(settings, name="b") as b:
        assert await provision(a, dry_run=True)
        with pytest.raises(NotFound):
            await jsapi.stream_info(a, a.topology.tasks)
        await asyncio.gather(provision(a), provision(b))
        assert await provision(a) == []


async def test_drift_is_refused_and_named(mesh: Mesh) -> None:
    config = (await jsapi.stream_info(mesh, mesh.topology.tasks))["config"]
    changed = {**config, "discard": "old", "max_age": 600_000_000_000}
    await jsapi.call(mesh, f"STREAM.UPDATE.{mesh.topology.tasks}", changed)
    with pytest.raises(Conflict, match="discard is 'old', should be 'new'") as drift:
        await provision(mesh)
    assert "max_age is 600000000000, should be 0" in str(drift.value)
    after = (await jsapi.stream_info(mesh, mesh.topology.tasks))["config"]
    assert after["discard"] == "old"


async def test_functions(mesh: Mesh) -> None:
    spec = FunctionSpec(name="generate", engine="echo", min_shape=6, max_shape=9)
    with pytest.raises(NotFound, match="none yet"):
        await get_function(mesh, "generate")
    await asyncio.gather(*(register_function(mesh, spec) for _ in range(4)))
    assert await get_function(mesh, "generate") == spec
    with pytest.raises(NotFound, match="known: generate"):
        await get_function(mesh, "other")
    with pytest.raises(Conflict, match="engine is 'echo', this one has 'sim'"):
        await register_function(mesh, FunctionSpec(name="generate", engine="sim", min_shape=6, max_shape=9))
    assert await list_functions(mesh) == [spec]
    info = await jsapi.stream_info(mesh, mesh.topology.tasks)
    assert info["state"]["consumer_count"] == 3 * 5


async def test_a_name_is_free_again_once_nothing_waits_for_it(mesh: Mesh) -> None:
    old = FunctionSpec(name="generate", engine="echo", min_shape=6, max_shape=9)
    await register_function(mesh, old)
    subject = mesh.subjects.task("generate", "normal", 6, "j")
    await publish(mesh, mesh.topology.tasks, subject, b"{}")
    with pytest.raises(Conflict, match="1 tasks wait for function 'generate'"):
        await unregister_function(mesh, "generate")
    assert await get_function(mesh, "generate") == old
    await jsapi.purge(mesh, mesh.topology.tasks, filter_=subject)
    await unregister_function(mesh, "generate")
    with pytest.raises(NotFound):
        await get_function(mesh, "generate")
    info = await jsapi.stream_info(mesh, mesh.topology.tasks)
    assert info["state"]["consumer_count"] == 0
    new = FunctionSpec(name="generate", engine="sim", min_shape=6, max_shape=13)
    await register_function(mesh, new)
    assert await get_function(mesh, "generate") == new
