"""The demo's weights, fetched or made with something to look at meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from headrace.inference_worker.engines.vllm_weights import demo_model_folder
from headrace.inference_worker.engines.weights import fetch_demo_weights


class _Get(Protocol):
    def __call__(self, *, progress: Callable[[str], None]) -> Path: ...


def fetch_with_progress(say: Callable[[str], None]) -> Path:
    """The path of the demo's weights for llamacpp. A first fetch takes as long as 93 MB take; a line now and then
    says so.
    """
    return _with_ticks(fetch_demo_weights, say)


def make_with_progress(say: Callable[[str], None]) -> Path:
    """The folder of the demo's model for vllm: fetched, then made, once; half a minute, and a line now and then."""
    return _with_ticks(demo_model_folder, say)


def _with_ticks(get: _Get, say: Callable[[str], None]) -> Path:
    done = threading.Event()
    ticker: threading.Thread | None = None

    def progress(line: str) -> None:
        nonlocal ticker
        say(line)
        if ticker is None:
            ticker = threading.Thread(target=_tick, args=(done, say), daemon=True)
            ticker.start()

    try:
        return get(progress=progress)
    finally:
        done.set()
        if ticker is not None:
            ticker.join()


def _tick(done: threading.Event, say: Callable[[str], None]) -> None:
    """The seconds that went by: in place on a terminal, else one line every ten."""
    began = time.monotonic()
    in_place = sys.stderr.isatty()
    while not done.wait(0.5 if in_place else 10.0):
        elapsed = f"working: {time.monotonic() - began:.0f} s"
        if in_place:
            sys.stderr.write(f"\r{elapsed}")
            sys.stderr.flush()
        else:
            say(elapsed)
    if in_place:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
