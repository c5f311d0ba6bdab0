"""The user's cache of weights: where it is, and how one of several processes makes what all of them use."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Where weights are kept: `HEADRACE_CACHE`, else `headrace` in `XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


@contextmanager
def making(target: Path) -> Generator[tuple[Path, int]]:
    """Be the only one to make `target`: gives a scratch folder beside it, and the lock's descriptor.

    The lock goes with the process (and with whoever inherits the descriptor), so a killed maker leaves none behind;
    its scratch folder is removed by the next maker.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prefix = f".make-{target.name}-"
        for orphan in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(orphan, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=prefix, ignore_cleanup_errors=True
        ) as scratch:
            yield Path(scratch), lock.fileno()
