"""Replacing what must not be kept: what the policy's patterns match, and secrets, in the texts of a JSON value.

Patterns are for what is kept; a caller's own answer is not theirs to change. Secrets (the API keys of callees) are
replaced everywhere, since a caller has no right to them and a callee may well repeat them in an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import msgspec

from headrace.contracts.errors import InvalidInput

REPLACED: Final = "[redacted]"
MIN_SECRET: Final = 4
"""A shorter one is no secret, and would be found everywhere."""
MAX_DEPTH: Final = 64
"""What lies deeper is replaced whole."""


class Redactor:
    """Replaces in texts, and in every text, key and number of a JSON value.

    `patterns` are Python's regular expressions; they run in this process, so one that backtracks for long holds it up.
    `secrets` names environment variables. Raise `InvalidInput` naming a pattern that is none.
    """

    def __init__(self, patterns: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        self._patterns = [_compiled(pattern) for pattern in patterns]
        self._names = sorted(set(secrets))

    def secrets(self) -> list[str]:
        """The secrets as the environment has them now; longer ones first, since one may begin another."""
        found = {os.environ.get(name, "").strip() for name in self._names}
        return sorted((s for s in found if len(s) >= MIN_SECRET), key=len, reverse=True)

    def text(self, text: str) -> str:
        """`text` as it may be kept."""
        text = self.hidden(text)
        for pattern in self._patterns:
            text = pattern.sub(REPLACED, text)
        return text

    def hidden(self, text: str) -> str:
        """`text` without secrets."""
        for secret in self.secrets():
            text = text.replace(secret, REPLACED)
        return text

    def live(self, value: Any, encoded: bytes) -> Any:
        """A JSON value without secrets; `encoded` are its bytes. The same object if there are none in it."""
        secrets = [s for s in self.secrets() if msgspec.json.encode(s)[1:-1] in encoded]
        return _walk(value, self.hidden, 0) if secrets else value

    def kept(self, value: Any) -> Any:
        """A JSON value as it may be kept; the same object if nothing was replaced."""
        if not self._patterns:
            return value
        walked = _walk(value, self.text, 0)
        return value if walked == value else walked

    def json(self, data: bytes) -> bytes:
        """The JSON in `data` as it may be kept; what is no JSON is replaced whole."""
        if not self._patterns:
            return data
        try:
            return msgspec.json.encode(_walk(msgspec.json.decode(data), self.text, 0))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return msgspec.json.encode(REPLACED)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as e:
        msg = f"policy.redact: {pattern!r} is no regular expression: {e}"
        raise InvalidInput(msg, field="policy.redact", code="invalid_setting") from None


def _walk(value: Any, text: Callable[[str], str], depth: int) -> Any:
    if depth > MAX_DEPTH:
        return REPLACED
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        out: dict[Any, Any] = {}
        for key, inner in cast("dict[Any, Any]", value).items():
            name = shown = text(key) if isinstance(key, str) else key
            number = 1
            while name in out:  # two keys that are the same once redacted: neither value is lost
                number += 1
                name = f"{shown} {number}"
            out[name] = _walk(inner, text, depth + 1)
        return out
    if isinstance(value, list):
        return [_walk(inner, text, depth + 1) for inner in cast("list[Any]", value)]
    if isinstance(value, int | float) and not isinstance(value, bool):  # a card's number is one, too
        shown = str(value)
        return value if text(shown) == shown else REPLACED
    return value
