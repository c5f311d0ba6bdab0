"""No process outlives its supervisor, even one that is killed with SIGKILL.

A service of ours inherits the reading end of a pipe that only the supervisor can write to (`LIFELINE` names
the descriptor). When the supervisor is gone the kernel closes the pipe; the service then drains, and its
whole process group, engine included, ends a few seconds later whatever happens. A foreign program
(nats-server) is started through this file instead: it asks the kernel for a signal at the death of its
parent (Linux), then becomes that program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

LIFELINE: Final = "HEADRACE_LIFELINE"
LAST_SECONDS: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


def attach_lifeline() -> None:
    """Watch the supervisor that started this process, if one did. Called once, before anything else."""
    given = os.environ.pop(LIFELINE, "")
    if not given.isdigit():
        return
    fd = int(given)
    try:
        # What we start must not keep it.
        os.set_inheritable(fd, False)  # noqa: FBT003  (it takes no keyword)
    except OSError:
        return
    threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True).start()


def _watch(fd: int) -> None:
    try:
        while os.read(fd, 64):
            pass
    except OSError:
        return
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_SECONDS)
    if os.getpgrp() == os.getpid():  # a group of our own: nobody else is in it
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def become(parent: int, command: list[str]) -> None:
    """Replace this process by `command`, to be terminated when `parent` dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  (no shell is wanted)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
