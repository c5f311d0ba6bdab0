"""A folder for a socket file: only this user may enter it, and what a killed process leaves behind is removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

PREFIX: Final = "headrace-llama-"
YOUNG_S: Final = 60.0
"""A folder this young may not be locked yet."""
_LONGEST_BASE: Final = 60


class SocketFolder:
    """Made at once, removed by `close`. It is locked meanwhile, and the lock goes with the process: the next one that
    makes a folder removes those that nobody holds.
    """

    def __init__(self) -> None:
        # The path of a socket file is bounded at about 100 bytes, which a deep TMPDIR would exceed.
        base = tempfile.gettempdir()
        base = Path(base if len(base) < _LONGEST_BASE else "/tmp")  # noqa: S108
        _remove_orphans(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # A file system without locks has none for those who would remove it either.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_orphans(base: Path) -> None:
    for path in base.glob(f"{PREFIX}*"):
        # Somebody else's, or gone meanwhile.
        with contextlib.suppress(OSError):
            _remove_orphan(path)


def _remove_orphan(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < YOUNG_S:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
