"""One supervisor for each folder: a lock that the kernel drops with its holder, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from headrace.contracts.errors import Conflict

LOCK_FILE = "up.lock"


class DirLock:
    """An exclusive `flock` on `<folder>/up.lock`, holding the pid of its owner."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock; raise `Conflict` naming the pid that has it."""
        fd = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = _read_pid(fd)
            os.close(fd)
            raise Conflict(
                f"a mesh already runs in {self._folder} (pid {pid}): stop it with `kill {pid}` or Ctrl-C there, "
                "or give this one its own --dir",
                code="already_running",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the lock up; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_holder(folder: Path) -> int | None:
    """Pid of the supervisor that runs in `folder`, or None."""
    try:
        fd = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _read_pid(fd)
    else:
        return None
    finally:
        os.close(fd)


def _read_pid(fd: int) -> int:
    with contextlib.suppress(ValueError):
        return int(os.pread(fd, 32, 0).decode("ascii", "replace"))
    return 0
