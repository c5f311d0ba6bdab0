"""The callee of `callee.py` as tests start it, and its log as they read it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class CalleeProcess:
    """A running callee; `url` is its address, `entries()` what it noted on disk."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "callee.log"
        ready = folder / "callee.port"
        ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("callee.py")), str(self.log), str(ready)],
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{ready.read_text()}"

    def entries(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
