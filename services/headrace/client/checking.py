"""The first pass over an input: every line is checked, and the job's input gets its fingerprint.

Nothing is stored before this has ended. Memory is flat: errors are bounded, custom ids go to buckets on disk.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from headrace.client.acceptance import Acceptance
from headrace.client.duplicates import DuplicateFinder
from headrace.client.inputs import Input
from headrace.client.openai_fields import LABELS
from headrace.client.problems import MAX_REPORTED, LineError
from headrace.contracts.errors import InvalidInput

CheckProgress = Callable[[int, int], None]
"""Called with the bytes read and the items accepted so far."""


class Checked(Struct, frozen=True, kw_only=True):
    """What the first pass found. `duplicates` are the refused lines that only the end of the pass could tell."""

    accepted: int
    refused: int
    errors: list[LineError]
    fingerprint: str
    duplicates: frozenset[int]
    notes: list[str]


class Stopped(Exception):
    """The pass was asked to stop."""


class Checker:
    """One first pass; `run` blocks, so it belongs in a thread, and `stop` ends it early."""

    def __init__(self, source: Input, acceptance: Acceptance, progress: CheckProgress) -> None:
        self._source = source
        self._acceptance = acceptance
        self._progress = progress
        self._errors: list[LineError] = []
        self._refused = 0
        self._refused_lines = hashlib.sha256()
        self.stop = threading.Event()

    def run(self, mapping: Mapping[str, Any]) -> Checked:
        """Check every line. `mapping` is what else decides what the lines become; it is part of the fingerprint.

        Which lines were refused is part of it too, so one fingerprint means one assignment of indices to lines.
        """
        content = hashlib.sha256()
        accepted = 0
        accept, lines = self._acceptance.item, self._source.lines
        with DuplicateFinder() as ids:
            for block in lines.blocks(content):
                for number, raw in zip(block.numbers, block.lines, strict=True):
                    if raw is None:
                        self._refuse(
                            number, "", "too_large: the line is longer than any item may be: it was skipped"
                        )
                        continue
                    if not raw or raw.isspace():
                        continue
                    try:
                        item = accept(raw)
                    except InvalidInput as e:
                        self._refuse(number, e.field or "", str(e))
                        continue
                    accepted += 1
                    if item.custom_id is not None:
                        ids.add(item.custom_id, number)
                self._progress(lines.position(), accepted)
                if self.stop.is_set():
                    raise Stopped
            repeated = ids.find()
        for line, first in repeated:
            self._refuse(line, "custom_id", f"the custom_id was used before, on line {first}")
        return Checked(
            accepted=accepted - len(repeated),
            refused=self._refused,
            errors=sorted(self._errors, key=lambda e: e.line),
            fingerprint=self._fingerprint(content.hexdigest(), mapping),
            duplicates=frozenset(line for line, _ in repeated),
            notes=self._notes(accepted),
        )

    def _refuse(self, line: int, field: str, error: str) -> None:
        self._refused += 1
        self._refused_lines.update(b"%d\n" % line)
        if len(self._errors) < MAX_REPORTED:
            self._errors.append(LineError(line, field, error))

    def _fingerprint(self, content: str, mapping: Mapping[str, Any]) -> str:
        parts = {"content": content, "refused": self._refused_lines.hexdigest(), "mapping": dict(mapping)}
        return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:32]

    def _notes(self, accepted: int) -> list[str]:
        notes = [
            f"{field} on {count:,} lines has no effect: {LABELS[field.removeprefix('body.')]}"
            for field, count in sorted(self._acceptance.labels.items())
        ]
        if not accepted and not self._refused:
            notes.append("the input has no lines: the job is empty, and complete at once")
        return notes
