"""Fixtures of the cases: a mesh whose worker and completion are processes, with a short lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos.processes import ProcessMesh, process_mesh

MakeMesh = Callable[..., ProcessMesh]


@pytest.fixture
def anyio_backend() -> object:
    """What is tested runs in other processes, on the loop of production."""
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
def settings(nats_server: NatsServer, tmp_path: Path) -> Settings:
    return Settings(url=nats_server.url, dir=str(tmp_path), durability="relaxed", ack_wait_s=1.0)


@pytest.fixture
def make_mesh(nats_server: NatsServer, tmp_path: Path) -> Iterator[MakeMesh]:
    """Make a mesh: settings of the worker and options of its engine by keyword. Nothing is started yet."""
    with_mesh: list[Any] = []

    def make(**worker: Any) -> ProcessMesh:
        options = worker.pop("engine_options", {})
        lines = ["[worker]", *(f"{k} = {_toml(v)}" for k, v in worker.items())]
        lines += ["[worker.engine_options]", *(f'{k} = "{v}"' for k, v in options.items())]
        folder = tmp_path / f"mesh-{len(with_mesh)}"
        context = process_mesh(nats_server, folder, {"ack_wait_s": 1.0}, "\n".join(lines))
        with_mesh.append(context)
        return context.__enter__()

    yield make
    for context in with_mesh:
        context.__exit__(None, None, None)


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
