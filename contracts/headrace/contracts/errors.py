"""The errors that cross a service's edge.

Three kinds: what the caller did wrong (`InvalidInput`, `Refused`), what to retry (`Unavailable`), and
what is final (`Conflict`, `NotFound`). Each says what happened, to which thing, and what to do. `code`
is the stable word that scripts and `{"error": {...}}` bodies carry.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose; `code` is stable, the text is for people."""

    code = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidInput(HeadraceError):
    """The caller's data or arguments are wrong; trying again unchanged fails again."""

    code = "invalid"

    def __init__(
        self, message: str, *, field: str | None = None, line: int | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.field = field
        self.line = line


class Refused(HeadraceError):
    """The thing is well formed but not admitted (unknown function, stream full, too large)."""

    code = "refused"


class Conflict(HeadraceError):
    """Durable state says otherwise (another fingerprint under the same job, a job already cancelled)."""

    code = "conflict"


class NotFound(HeadraceError):
    """No such job, function, stream or row."""

    code = "not_found"


class Unavailable(HeadraceError):
    """The broker or a service did not answer in time; the operation may be tried again."""

    code = "unavailable"


class Undecodable(HeadraceError):
    """Bytes that are no message of the expected schema. They go to the dead letters, never away."""

    code = "undecodable"
