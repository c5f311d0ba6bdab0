"""Whether an outcome belongs to its line: by its custom id, and by its text where an engine always answers alike."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.cli.chaos_kit.load import Load
from headrace.client.formats import LineDecoder
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import ChatPrompt, FunctionSpec, Row, TextPrompt

DETERMINISTIC: Final = frozenset({"echo", "sim"})
"""Engines whose answer is a function of prompt and parameters."""
LONGEST: Final = 128 << 10
"""Longer lines are known by their id only: their answers lie elsewhere."""


class _Id(Struct):
    custom_id: str | None = None


_id_of = msgspec.json.Decoder(_Id).decode


class Answers:
    """Compares outcomes with lines. A line that is repeated must get the same answer each time."""

    def __init__(self, engine: str, load: Load) -> None:
        self._decode = LineDecoder(FunctionSpec(name="chaos"), form="rows" if load.rows else "lines").decode
        self._rows = load.rows
        self._echo = engine == "echo"
        repeated = engine in DETERMINISTIC and load.items > load.distinct
        self._first: dict[int, str | None] | None = {} if repeated else None
        self._distinct = load.distinct

    def wrong(self, index: int, line: bytes, row: list[Any]) -> str:
        """What is wrong with the outcome of this line, empty if nothing is."""
        _, _, status, custom_id, text, value = row
        if not self._rows and (wanted := _id_of(line).custom_id) != custom_id:
            return f"custom id {custom_id!r} instead of {wanted!r}"
        if status != "ok" or len(line) > LONGEST:
            return ""
        answer = _canonical(value) if self._rows else text
        if self._echo and (said := self._echoed(line)) is not None and said != answer:
            return "the answer is not its own prompt"
        if self._first is None:
            return ""
        at = index % self._distinct
        same = self._first.setdefault(at, answer) == answer
        return "" if same else f"another answer than that of the same line at index {at}"

    def _echoed(self, line: bytes) -> str | None:
        """What `echo` makes of the line: the digest of its text, or the value of its row; None if not that simply."""
        try:
            item = self._decode(line)
        except InvalidInput:
            return None
        prompt = item.prompt
        if isinstance(prompt, Row):
            return _canonical(bytes(prompt.value))
        if item.params.generation.stop:
            return None
        if isinstance(prompt, TextPrompt):
            return digest(prompt.text)
        if isinstance(prompt, ChatPrompt):
            said = [m.get("content") for m in prompt.messages if m.get("role") == "user"]
            return digest(said[-1]) if said and isinstance(said[-1], str) else None
        return None


def _canonical(value: str | bytes | None) -> str:
    """A JSON value as one text, whatever its spaces and the order of its keys were."""
    decoded = None if value is None else msgspec.json.decode(value)
    return msgspec.json.encode(decoded, order="deterministic").decode()


def digest(text: str) -> str:
    """What SQL's `md5` gives: for equality, not for security."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
