"""Fixtures of the worker's tests: settings with a short lease, and worker processes that are always ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.mesh.settings import Settings
from tests.worker.harness import WorkerProcess, with_worker

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def start_worker(settings: Settings, tmp_path: Path) -> Iterator[StartWorker]:
    """Start a worker process; keywords are settings of the worker, or of the mesh where they are named so."""
    started: list[WorkerProcess] = []

    def start(**worker: Any) -> WorkerProcess:
        process = WorkerProcess(with_worker(settings, **worker), tmp_path / f"worker-{len(started)}")
        started.append(process)
        process.start()
        return process

    yield start
    for process in started:
        process.stop()
