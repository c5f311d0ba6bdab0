"""The demo's weights, fetched with something to look at meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace.inference_worker.engines.weights import fetch_demo_weights


def fetch_with_progress(say: Callable[[str], None]) -> Path:
    """The path of the demo's weights. A first fetch takes as long as 93 MB take; a line now and then says so."""
    done = threading.Event()
    ticker: threading.Thread | None = None

    def progress(line: str) -> None:
        nonlocal ticker
        say(line)
        if ticker is None:
            ticker = threading.Thread(target=_tick, args=(done, say), daemon=True)
            ticker.start()

    try:
        return fetch_demo_weights(progress=progress)
    finally:
        done.set()
        if ticker is not None:
            ticker.join()


def _tick(done: threading.Event, say: Callable[[str], None]) -> None:
    """The seconds that went by: in place on a terminal, else one line every ten."""
    began = time.monotonic()
    in_place = sys.stderr.isatty()
    while not done.wait(0.5 if in_place else 10.0):
        elapsed = f"fetching: {time.monotonic() - began:.0f} s"
        if in_place:
            sys.stderr.write(f"\r{elapsed}")
            sys.stderr.flush()
        else:
            say(elapsed)
    if in_place:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
