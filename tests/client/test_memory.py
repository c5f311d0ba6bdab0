"""B10: memory is flat, whatever the number of lines or the size of the file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headrace.mesh.connection import Mesh
from headrace.mesh.settings import Settings
from tests.client.harness import SubmitProcess, count_tasks

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def anyio_backend() -> str:
    """What is measured runs in another process."""
    return "asyncio"


def lines_file(path: Path, count: int, size: int) -> Path:
    with gzip.open(path, "wt", compresslevel=1) as out:
        for i in range(count):
            out.write(json.dumps({"prompt": "x" * size, "custom_id": f"id-{i}"}) + "\n")
    return path


async def test_memory_does_not_grow_with_the_input(ready: Mesh, settings: Settings, tmp_path: Path) -> None:
    peaks: list[int] = []
    for job, count, size in (("small", 5_000, 550), ("many", 150_000, 550), ("big", 10_000, 12_000)):
        path = lines_file(tmp_path / job, count, size)
        code, receipt = await SubmitProcess(settings, path, job).finished(100)
        assert code == 0, receipt
        assert receipt["submitted"] == await count_tasks(ready, job) == count
        peaks.append(receipt["peak_mib"])
    small, many, big = peaks
    assert many < small + 40, peaks
    assert big < small + 60, peaks
    assert max(peaks) < 300
