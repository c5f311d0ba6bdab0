"""Child processes that must not outlive us, whatever ends us.

vLLM's engine process does not notice that its parent was killed (SIGKILL, out of memory): it stays, and holds the
GPU's memory, so that the worker that is started next finds none. Asking the kernel for it (PR_SET_PDEATHSIG) would
have to be done inside that process, and exists on Linux only. So a shell waits for the end of a pipe that we hold.
"""

from __future__ import annotations

import contextlib
import subprocess

# Reads process ids until the pipe ends, which is when its only writer is gone; then kills them.
_SCRIPT = 'while read -r pid; do pids="$pids $pid"; done; [ -z "$pids" ] || kill -9 $pids 2>/dev/null'


class Reaper:
    """Kills the processes that were added to it when this process ends without `close`."""

    def __init__(self) -> None:
        # In a session of its own: what is sent to our process group must not end it before us.
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._added: set[int] = set()

    def add(self, pid: int | None) -> None:
        """Have `pid` killed with us; a repeated one does nothing."""
        if pid is None or pid in self._added or self._shell.stdin is None:
            return
        self._added.add(pid)
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(f"{pid}\n")
            self._shell.stdin.flush()

    def close(self) -> None:
        """Let the processes be: they are ended, or about to be, in an orderly way. Idempotent."""
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._shell.stdin.close()
