"""What must be true of a job on the task path, in plain Python and without a line of the code under test.

The model knows what was stored, what workers published, what was confirmed, and who asked for a cancellation or a
retry. From that alone follow bounds for each source of the account, and which outcome an index may have in the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Key = tuple[int, int]
"""Index and attempt generation."""


@dataclass
class JobModel:
    """One job. `published` has, for each key, the status of every result that was ever stored for it."""

    stored: int = 0
    """Indices 0..stored-1 were accepted by the broker."""
    opened: bool = False
    sealed: bool = False
    """Every item is stored."""
    intake_closed: bool = False
    """Nothing may be stored any more: it is sealed, or a cancellation got that far."""
    cancel_asked: bool = False
    """A cancellation was noted: whether it was answered or its server died, it has to be carried out."""
    generation: int = 1
    current: dict[int, int] = field(default_factory=dict)
    """The generation in which an index ran last, where that is not the first."""
    retry_stored: bool = True
    """The tasks of the last retry are known to be stored."""
    kept: set[Key] = field(default_factory=set)
    """What was finished when a cancellation was noted: it keeps what it was."""
    published: dict[Key, list[str]] = field(default_factory=dict)
    acked: set[Key] = field(default_factory=set)
    """Tasks whose ack the broker confirmed: they never run again."""
    landed: dict[Key, str] = field(default_factory=dict)
    """Outcomes that were seen in the data plane: none ever changes."""

    # --- what happens ------------------------------------------------------------------------------
    def publish(self, index: int, generation: int, status: str) -> None:
        """A worker stored a result."""
        self.published.setdefault((index, generation), []).append(status)

    def ask_to_cancel(self) -> None:
        """The intent is noted, for ever."""
        if not self.cancel_asked:
            self.cancel_asked = True
            self.kept = set(self.published)

    def may_be_retried(self) -> set[int]:
        """Indices that a retry runs again."""
        return {i for i in range(self.stored) if self.landed.get(self.key(i)) in ("failed", "dead")}

    def retry(self) -> None:
        """A retry is noted: what failed runs again, as one generation."""
        again = self.may_be_retried()
        self.generation += 1
        self.current |= dict.fromkeys(again, self.generation)
        self.retry_stored = False

    def see_rows(self, rows: list[tuple[int, int, str]]) -> None:
        """Compare the outcomes (index, generation, status) that the data plane has now; remember them."""
        found = {(index, generation): status for index, generation, status in rows}
        assert len(found) == len(rows), f"an outcome is there twice: {Counter(r[:2] for r in rows)}"
        assert set(found) <= self.keys, f"an outcome of no item: {found}"
        for key, status in self.landed.items():
            assert found.get(key) == status, f"outcome of {key} was {status}, is {found.get(key)}"
        for key, status in found.items():
            allowed = list(self.published.get(key, []))
            if self.cancel_asked and key not in self.kept:
                allowed.append("cancelled")
            assert status in allowed, f"{key} is {status}, and may be {allowed}"
        self.landed = found

    # --- what follows ------------------------------------------------------------------------------
    def key(self, index: int) -> Key:
        """The key whose outcome is the index's."""
        return index, self.current.get(index, 1)

    @property
    def keys(self) -> set[Key]:
        """Everything that ever was to run."""
        return {(i, 1) for i in range(self.stored)} | set(self.current.items()) | set(self.landed)

    def count(self, status: str) -> int:
        """How many indices have that outcome now."""
        return sum(1 for i in range(self.stored) if self.landed.get(self.key(i)) == status)

    @property
    def landing(self) -> set[Key]:
        """Keys with a stored result and without an outcome."""
        return set(self.published) - set(self.landed)

    @property
    def finished(self) -> bool:
        """Whether every item that there will ever be has its outcome."""
        return (self.sealed or self.cancel_asked) and all(
            self.key(i) in self.landed for i in range(self.stored)
        )

    def tasks_at_least(self) -> int:
        """Tasks that must stand in the queue: of items that nobody finished, unless they were purged."""
        if self.cancel_asked:
            return 0
        waiting = {self.key(i) for i in range(self.stored)} - set(self.published) - set(self.landed)
        return len([g for _, g in waiting if self.retry_stored or g != self.generation])

    def tasks_at_most(self) -> int:
        """Tasks that may stand in the queue: those whose ack was never confirmed."""
        return len(self.keys) - len(self.acked)
