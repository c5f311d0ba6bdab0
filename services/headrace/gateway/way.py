"""What the steps of a call hand to one another: where it stands, that it waits, that it is denied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from headrace.contracts.account import CallView
from headrace.contracts.errors import Refused
from headrace.contracts.ledger import CallOutcome
from headrace.gateway.records import Asked


class Later(Struct, frozen=True):
    """Not decided now: the message stays where it is, and is looked at again after `delay_s`."""

    delay_s: float
    awaiting: str = ""
    """`approval` while a person has to answer."""
    call: str = ""
    """Id of the call that waits so."""


class NotYet(Exception):
    """The call goes back to the queue: no intent is written, nothing is taken."""

    def __init__(self, later: Later) -> None:
        super().__init__(f"not before {later.delay_s:g} s")
        self.later = later


class OtherBody(Exception):
    """The key stands for another body, as what was said of it beside the ledger shows."""


class Denied(Refused):
    """A person said no: that stands in the evidence, however often it is asked again."""

    code = "denied"


class Gate(Protocol):
    """Who may call what, and how much at once."""

    async def admit(self, asked: Asked) -> Later | None:
        """Raise `Refused` for what is denied; return `Later` while a person has yet to approve."""
        ...

    async def turn(self, asked: Asked) -> Callable[[], None]:
        """Wait for a place at the callee; call what is returned when it is free again. Raise `NotYet` without one."""
        ...


class Place(Struct, frozen=True):
    """A call and the sequence of its last record. `again`: a further attempt follows, after `pause_s`."""

    view: CallView | None
    seq: int
    again: bool = False
    pause_s: float = 0.0
    live: CallOutcome | None = None
    """What the callee just said, where its record says less."""
