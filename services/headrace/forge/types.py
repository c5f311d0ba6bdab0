"""From a row's JSON to what the function takes, and from what it returns to JSON: by its annotations, or as it is."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw

from headrace.contracts.errors import InvalidInput

_UNIONS: Final = (Union, types.UnionType)


class Codec(NamedTuple):
    """`decode(bytes)` gives a row, or raises a msgspec error; `encode(answer)` gives its JSON, or raises.

    `row_type` and `answer_type` are for people; `checks` is whether answers are compared with their annotation.
    """

    decode: Callable[[bytes], Any]
    answer: Any
    row_type: str
    answer_type: str

    def encode(self, answer: Any) -> Raw:
        """The answer's JSON. Raise `ValidationError` for one that is not what the annotation says, else what encoding
        raises.
        """
        expected = self.answer
        if expected is not None and not (isinstance(expected, type) and isinstance(answer, expected)):
            checked = cast("Any", msgspec.convert(_plain(answer), expected))
            return Raw(_encode(checked))
        return Raw(_encode(answer))


def codec_of(call: Callable[..., Any], where: str) -> Codec:
    """The codec of a callable; raise `InvalidInput` for a type that no JSON stands for, or for no parameter."""
    try:
        parameters = [
            p
            for p in inspect.signature(call).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        hints = get_type_hints(call, include_extras=True)
    except (NameError, TypeError, ValueError) as e:
        raise InvalidInput(
            f"{where}: its annotations cannot be read ({e}): define its types at the module's level",
            field="annotations",
        ) from None
    if len(parameters) != 1:
        raise InvalidInput(f"{where}: it takes one parameter, the list of rows", field="rows")
    row = _element(hints.get(parameters[0].name))
    answer = _without_row_error(_element(hints.get("return")))
    try:
        decode: Callable[[bytes], Any] = msgspec.json.Decoder(row).decode
    except (TypeError, NotImplementedError) as e:
        raise InvalidInput(
            f"{where}: rows of type {_shown(row)} cannot be read from JSON: {e}", field="rows"
        ) from None
    return Codec(decode, _checkable(answer), _shown(row), _shown(answer))


def _element(hint: Any) -> Any:
    """The T of `list[T]`, `Sequence[T]`, `Iterator[T]`…; Any where nothing is said."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    arguments = get_args(hint)
    if hint is None or hint is Any or not arguments:
        return Any
    return arguments[0]


def _without_row_error(hint: Any) -> Any:
    """The annotation of an answer without the error that may stand for one."""
    if get_origin(hint) not in _UNIONS:
        return hint
    kept = tuple(a for a in get_args(hint) if getattr(a, "__name__", "") != "RowError")
    return Union[kept] if kept else Any  # noqa: UP007  (made at run time)


def _checkable(hint: Any) -> Any:
    """What answers are compared with; None where msgspec knows no such type (an array) or all is allowed."""
    if hint is Any:
        return None
    try:
        msgspec.json.Decoder(hint)
    except (TypeError, NotImplementedError):
        return None
    return hint


def _plain(answer: Any) -> Any:
    """Arrays and their scalars as lists and numbers."""
    to_list = getattr(answer, "tolist", None)
    return to_list() if callable(to_list) else answer


def _hook(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return cast("Any", to_list())
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


_encode = msgspec.json.Encoder(enc_hook=_hook).encode


def _shown(hint: Any) -> str:
    return "any JSON" if hint is Any else getattr(hint, "__name__", str(hint))
