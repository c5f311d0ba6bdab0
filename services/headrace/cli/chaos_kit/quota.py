"""A full disk, by a limit on the size of files: the same refused write, without a disk to fill."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final

SUPPORTED: Final = hasattr(resource, "prlimit")
"""Whether another process can be limited at all: Linux only."""


@contextlib.contextmanager
def full(pid: int, files: Sequence[Path]) -> Generator[int]:
    """While the block lasts, no file of the process may grow beyond the largest of `files`; the bound in bytes."""
    bound = max((path.stat().st_size for path in files if path.exists()), default=0)
    _limit(pid, bound)
    try:
        yield bound
    finally:
        _limit(pid, resource.RLIM_INFINITY)


def _limit(pid: int, soft: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        bound = hard if hard != resource.RLIM_INFINITY and soft == resource.RLIM_INFINITY else soft
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (bound, hard))
