"""Durability as a cluster of three real servers shows it: with all of them, without one, without two."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.contracts.errors import HeadraceError
from headrace.mesh import jsapi
from headrace.mesh.checks.durability import check_replicas
from headrace.mesh.checks.reading import Reading
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import provision
from headrace.mesh.server import find_server_binary, free_port
from headrace.mesh.settings import Settings
from tests.completion.world import until
from tests.worker.harness import one_loop

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Cluster:
    """Three servers that replicate; the client knows all of them."""

    def __init__(self, folder: Path) -> None:
        ports, routes = [free_port() for _ in range(3)], [free_port() for _ in range(3)]
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
        self.processes: list[subprocess.Popen[bytes]] = []
        peers = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
        for i in range(3):
            config = folder / f"n{i}.conf"
            config.write_text(
                f"""
listen: "127.0.0.1:{ports[i]}"
server_name: n{i}
jetstream {{ store_dir: "{folder}/js{i}" }}
cluster {{ name: c, listen: "127.0.0.1:{routes[i]}", routes: [{peers}] }}
"""
            )
            command = [find_server_binary(), "-c", str(config), "-l", str(folder / f"n{i}.log")]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()


@asynccontextmanager
async def clustered(folder: Path) -> AsyncIterator[tuple[Cluster, Mesh]]:
    cluster = Cluster(folder)
    try:
        async with await Mesh.connect(Settings(url=cluster.url, replicas=3), name="cluster") as mesh:

            async def ready() -> bool:
                try:
                    await provision(mesh)
                except HeadraceError:
                    return False
                return True

            await until(ready, 30)
            yield cluster, mesh
    finally:
        for number in range(3):
            cluster.kill(number)


@one_loop
async def test_replicas_are_counted_and_those_that_are_away_are_named(tmp_path: Path) -> None:
    async with clustered(tmp_path) as (cluster, mesh):

        async def settled() -> bool:
            return (await check_replicas(Reading(mesh)))[0][0].state == "ok"

        await until(settled, 30)
        found, single = await check_replicas(Reading(mesh))
        assert [f.found for f in found] == ["safe: 3 replicas or more of each stream"]
        assert single == []

        # One replica of a stream, in a mesh that wants three.
        config = (await jsapi.stream_info(mesh, "HR_JOBS"))["config"]
        await jsapi.call(mesh, "STREAM.UPDATE.HR_JOBS", {**config, "num_replicas": 1}, timeout_s=10)
        found, single = await check_replicas(Reading(mesh))
        assert single == ["HR_JOBS"]
        assert found[0].found == "HR_JOBS has 1 replicas, the setting is replicas = 3"

        # A server is lost: said, and no more than that. Two are lost: the majority is gone.
        here = (mesh.nc.connected_url.port, mesh.nc.connected_server_version)
        assert here[0]
        others = [i for i, part in enumerate(cluster.url.split(",")) if not part.endswith(f":{here[0]}")]
        cluster.kill(others[0])

        async def missed() -> bool:
            found, _ = await check_replicas(Reading(mesh))
            return any(f.state == "warn" and f"n{others[0]}" in f.found for f in found)

        await until(missed, 40)
        assert all(f.state != "fail" for f in (await check_replicas(Reading(mesh)))[0])
        cluster.kill(others[1])

        async def lost() -> bool:
            found, _ = await check_replicas(Reading(mesh))
            told = [f for f in found if f.state == "fail" and "has lost its majority" in f.found]
            return bool(told) and all(f"n{others[0]}" in f.found and f"n{others[1]}" in f.found for f in told)

        await until(lost, 40)
