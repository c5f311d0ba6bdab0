"""A real OTLP receiver for each test that asks for one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


class Receiver:
    """The spans that arrived, as dicts (see `receiver.py`)."""

    def __init__(self, port: int, file: Path) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._file = file

    def environ(self, **more: str) -> dict[str, str]:
        """What a process needs to send its spans here, soon."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100", **more}

    def spans(self, name: str = "") -> list[dict]:
        """Spans whose name begins with `name`, oldest start first."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        found = [json.loads(line) for line in lines]
        return sorted((s for s in found if s["name"].startswith(name)), key=lambda s: s["start_ns"])

    def points(self, name: str = "") -> list[dict]:
        """Points of metrics whose name begins with `name`, in the order in which they came."""
        file = self._file.with_suffix(".metrics")
        lines = file.read_text().splitlines() if file.exists() else []
        return [p for p in map(json.loads, lines) if p["name"].startswith(name)]

    def wait(self, name: str, count: int, timeout_s: float = 20.0) -> list[dict]:
        """The spans of that name once there are `count`."""
        end = time.monotonic() + timeout_s
        while len(self.spans(name)) < count:
            if time.monotonic() > end:
                seen = [(s["name"], s["attributes"]) for s in self.spans()]
                pytest.fail(f"{count} spans {name!r} did not arrive in {timeout_s} s; seen: {seen}")
            time.sleep(0.05)
        return self.spans(name)


@pytest.fixture
def receiver(tmp_path):
    file = tmp_path / "spans.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("receiver.py")), str(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Receiver(int(process.stdout.readline()), file)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
