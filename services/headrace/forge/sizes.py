"""What a row counts against a budget of tokens: an estimate, its length, a tokenizer's count, the function's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from headrace.contracts.errors import InvalidInput

MAX_SIZE: Final = 2**40
_TOKENIZER: Final = "tokenizer:"


class SizeFunction(NamedTuple):
    """`name` is how it is set; `of_row` measures a decoded row, None an undecoded one by its bytes."""

    name: str
    of_row: Callable[[Any], int] | None = None


ESTIMATE: Final = SizeFunction("estimate")
LENGTH: Final = SizeFunction("length")


def named_size(name: str) -> SizeFunction:
    """`estimate` (bytes ÷ 3.5), `length` (bytes of the row), or `tokenizer:PATH`; raise `InvalidInput` for others."""
    if name in ("estimate", "length"):
        return ESTIMATE if name == "estimate" else LENGTH
    if name.startswith(_TOKENIZER):
        return SizeFunction(name, _tokenizer(Path(name.removeprefix(_TOKENIZER))))
    raise InvalidInput(
        f"size {name[:80]!r} is unknown: use estimate, length or tokenizer:PATH",
        field="size",
        code="invalid_size",
    )


def size_of(size: SizeFunction, raw: bytes, decode: Callable[[bytes], Any] | None = None) -> int:
    """Tokens of a row, at least 1. `decode` makes what a given function measures.

    A row that cannot be measured counts by the estimate: what is wrong with it is told where it runs.
    """
    if size.of_row is None:
        return max(1, len(raw) if size.name == "length" else _estimate(raw))
    try:
        value = decode(raw) if decode is not None and size.name == "given" else msgspec.json.decode(raw)
        return min(MAX_SIZE, max(1, int(size.of_row(value))))
    except Exception:  # noqa: BLE001  (it is the function's own code, or a row that is none)
        return max(1, _estimate(raw))


def _estimate(raw: bytes) -> int:
    """3.5 bytes for each token, as the client estimates prompts."""
    return (len(raw) * 2 + 6) // 7


def text_of(value: Any) -> str:
    """All strings in a JSON value, joined: what a model would read of the row."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return " ".join(filter(None, map(text_of, value.values())))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return " ".join(filter(None, map(text_of, value)))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return ""


def _tokenizer(path: Path) -> Callable[[Any], int]:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer
    except ImportError:
        msg = "counting tokens needs a package: pip install 'headrace[tokenizers]'"
        raise InvalidInput(msg, field="size", code="missing_extra") from None
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as e:  # noqa: BLE001  (tokenizers raises bare Exceptions)
        raise InvalidInput(f"the tokenizer {file} cannot be read: {str(e)[:200]}", field="size") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda value: len(tokenizer.encode(text_of(value)).ids)
