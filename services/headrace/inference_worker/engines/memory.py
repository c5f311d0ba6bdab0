"""Recognising that an engine had no memory for an item, from what it raises or says."""

from __future__ import annotations

from typing import Final

_TYPES: Final = frozenset({"MemoryError", "OutOfMemoryError"})
_WORDS: Final = ("out of memory", "failed to allocate", "cannot allocate memory", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or one that caused it, is of memory: by its type (also torch's, which need not be imported
    for it) or by its text.
    """
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return False
        if any(cls.__name__ in _TYPES for cls in type(seen).__mro__) or says_out_of_memory(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def says_out_of_memory(text: str) -> bool:
    """Whether a text tells of memory that could not be had."""
    lower = text.lower()
    return any(words in lower for words in _WORDS)
