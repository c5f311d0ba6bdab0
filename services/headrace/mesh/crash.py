"""Named crash points: a chaos test kills the process exactly there; in production they cost nothing.

`HEADRACE_CRASH_AT=results-published:3` ends the process with SIGKILL on the third pass of that point. With
`results-published:3:hold` the first two stay at the point, so that three are there when the process dies.
"""

from __future__ import annotations

import os
import signal

_spec = os.environ.get("HEADRACE_CRASH_AT", "")
_name, _, _rest = _spec.partition(":")
_nth, _, _hold = _rest.partition(":")
_left = int(_nth) if _nth.isdigit() else 1


class Held(BaseException):
    """Nobody catches it: who passed a point stays there for as long as the process lives."""


def armed() -> bool:
    """Whether this process is to die at some point: what stands before a point is then really done, at some cost."""
    return bool(_name)


def crash_point(name: str) -> None:
    """Kill this process, without any clean-up, if the environment asks for it at `name`."""
    if _name and name == _name:
        global _left  # noqa: PLW0603  (a countdown for one process; there is nowhere else to keep it)
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if _hold:
            raise Held(name)
