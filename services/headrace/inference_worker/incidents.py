"""The rules of crash triage, without the machinery: who is a suspect, who is cleared, who is convicted.

An item is convicted when it was in two engines that died, the second time with nothing beside it. So one poison item
costs two engines, and never a neighbour its outcome:

- at the first crash all that were inside become suspects, and each runs apart at its next delivery;
- the culprit's trial ends its engine, which convicts it; those that were suspects by that one crash are cleared, and
  run as any other item;
- who is in a second crash (there were two culprits) is not cleared again, and neither is who has no try left but
  this one: they run apart, where nobody else can end them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from headrace.contracts.names import check_token
from headrace.contracts.suspects import Suspect
from headrace.inference_worker.intake import now_us

if TYPE_CHECKING:
    from headrace.inference_worker.intake import Item

CONVICTING: Final = 2
"""Crashes of which one convicts, if it is alone in the last."""


class Incident:
    """One death of an engine: who was inside, and who came out of it without an outcome."""

    def __init__(self, error: str, inside: Iterable[Item]) -> None:
        self.id = new_id()
        self.error = error
        self.inside = set(inside)
        self.suspects: list[Item] = []
        self.alone = len(self.inside) == 1

    def left(self, item: Item, *, suspect: bool) -> bool:
        """Note that `item` came out, without an outcome if it is a suspect; return whether it was the last."""
        self.inside.discard(item)
        if suspect:
            self.suspects.append(item)
        return not self.inside


def new_id() -> str:
    """A name for an incident."""
    return secrets.token_hex(8)


def after_crash(
    known: Suspect | None,
    *,
    stored_us: int,
    incident: str,
    alone: bool,
    error: str,
    worker: str,
    started_us: int,
) -> Suspect:
    """The record of a task after one more crash; the same crash counts once, however often it is told."""
    crashes, before = (known.crashes, known.incident) if known else (0, "none")
    if known is not None and known.incident == incident:
        return known
    return Suspect(
        stored_us=stored_us,
        crashes=crashes + 1,
        alone=alone,
        incident=check_token("incident", incident),
        before=before,
        error=storable(error),
        worker=worker,
        started_us=started_us,
        at_us=now_us(),
    )


def storable(text: str) -> str:
    """A text of anybody's making as a message may hold it: bounded, and without halves of characters, which UTF-8 has
    no bytes for.
    """
    return text[:2_048].encode("utf-8", "replace").decode()


def is_suspect(record: Suspect | None) -> bool:
    """Whether the task must run apart (unless it is cleared)."""
    return record is not None and record.crashes > 0


def is_convicted(record: Suspect | None) -> bool:
    """Whether the task must not run again."""
    return record is not None and record.crashes >= CONVICTING and record.alone


def may_be_cleared(record: Suspect, delivered: int, max_tries: int) -> bool:
    """Whether another's conviction lets the task run among others again."""
    return record.crashes == 1 and delivered < max_tries


def sentence(record: Suspect) -> str:
    """What the outcome of a convicted item says."""
    return (
        f"{record.crashes} engines died with this item inside, the last one with nothing beside it; "
        f"the last error: {record.error}"
    )
