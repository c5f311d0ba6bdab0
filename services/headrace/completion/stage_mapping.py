"""What a landed row becomes in the next stage: plain data in, prompts out; nothing is read or stored here.

The same row gives the same children whenever it is asked, which is what feeding again after a crash stands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeGuard

import msgspec
from msgspec import Raw, Struct

from headrace.contracts.messages import ChatPrompt, ItemError, Prompt, Row, TextPrompt
from headrace.contracts.pipeline import MAX_FAN_OUT, StageSpec
from headrace.contracts.pipeline_paths import ITEM, ROOTS, ROWS, Path, named, parse_path, parse_template

UNFIT: Final = "feed_"
"""How the error type of a row begins that could not be made from the one before it."""

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_BAD: Final = (msgspec.MsgspecError, ValueError, RecursionError)


class Upstream(Struct, frozen=True):
    """An ok outcome of the stage before. `value` and `kept` are JSON."""

    index: int
    generation: int = 1
    custom_id: str | None = None
    text: str | None = None
    value: bytes | None = None
    kept: bytes | None = None


class Child(Struct, frozen=True):
    """One row of the stage: its prompt, or why there can be none."""

    prompt: Prompt | None
    kept: bytes | None = None
    custom_id: str | None = None
    unfit: ItemError | None = None


class Unfit(Exception):
    """The row before does not have what the stage takes."""

    def __init__(self, kind: str, message: str, field: str) -> None:
        super().__init__(message)
        self.error = ItemError(type=UNFIT + kind, message=message[:2_048], field=field)


class Mapper:
    """Makes the rows of one stage, as its declaration says."""

    def __init__(self, stage: StageSpec) -> None:
        roots = (ITEM, *ROOTS) if stage.each is not None else ROOTS
        self._each = None if stage.each is None else parse_path(stage.each, ROOTS)
        self._where = None if stage.where is None else parse_path(stage.where, roots)
        self._keep = [(name, parse_path(text, roots)) for name, text in named(stage.keep)]
        self._row: Path | dict[str, Path] = (
            {name: parse_path(text, roots) for name, text in stage.row.items()}
            if isinstance(stage.row, dict)
            else parse_path(stage.row or ("value" if stage.each is None else ITEM), roots)
        )
        inside = (ROWS,) if stage.collect else roots
        self._prompt = None if stage.prompt is None else parse_template(stage.prompt, inside)
        self._chat = None if stage.chat is None else parse_template(stage.chat, inside)
        self._system = None if stage.system is None else parse_template(stage.system, inside)
        self.divides = stage.each is not None or stage.where is not None
        """Whether a row may become another number of rows than one."""

    def children(self, row: Upstream) -> list[Child]:
        """What `row` becomes. A row that has no array where `each` says becomes one that is unfit."""
        try:
            return self._children(row)
        except RecursionError:
            error = ItemError(type=f"{UNFIT}unreadable", message=f"row {row.index} is nested too deeply")
            return [Child(None, unfit=error)]

    def _children(self, row: Upstream) -> list[Child]:
        scope = _Scope(row)
        if self._each is None:
            return [child for child in (self._child(scope, row.custom_id),) if child is not None]
        try:
            elements = scope.find(self._each, "each")
            if not _is_list(elements):
                raise Unfit("each", f"{_shown(self._each)} of row {row.index} is no array", "each")
            if len(elements) > MAX_FAN_OUT:
                what = f"{_shown(self._each)} of row {row.index} has {len(elements):,} elements"
                raise Unfit("too_many", f"{what}: {MAX_FAN_OUT:,} at most", "each")
        except Unfit as e:
            return [Child(None, unfit=e.error)]
        found: list[Child] = []
        for element in elements:
            child = self._child(_Scope(row, item=element, decoded=scope), None)
            if child is not None:
                found.append(child)
        return found

    def member(self, row: Upstream) -> bytes:
        """The JSON of `row` as an element of what the stage collects; raise `Unfit`."""
        try:
            return self._value(_Scope(row))
        except RecursionError:
            raise Unfit("unreadable", f"row {row.index} is nested too deeply", "row") from None

    def collected(self, members: Sequence[bytes]) -> Child:
        """The row that `members` become together."""
        if self._prompt is None and self._chat is None:
            return Child(Row(value=Raw(b"[%b]" % b",".join(members))))
        try:
            texts = [_text(_decode(member)) for member in members]
            return Child(self._asked(_Scope(Upstream(0), rows="\n\n".join(texts))))
        except Unfit as e:
            return Child(None, unfit=e.error)
        except RecursionError:
            message = "one of the collected rows is nested too deeply"
            return Child(None, unfit=ItemError(type=f"{UNFIT}unreadable", message=message, field="row"))

    # --- one row -----------------------------------------------------------------------------------
    def _child(self, scope: _Scope, custom_id: str | None) -> Child | None:
        try:
            if self._where is not None and not scope.find(self._where, "where", default=None):
                return None
            kept = None
            if self._keep:
                kept = _encode({name: scope.find(path, "keep", default=None) for name, path in self._keep})
            if self._prompt is None and self._chat is None:
                return Child(Row(value=Raw(self._value(scope))), kept, custom_id)
            return Child(self._asked(scope), kept, custom_id)
        except Unfit as e:
            return Child(None, custom_id=custom_id, unfit=e.error)

    def _value(self, scope: _Scope) -> bytes:
        if isinstance(self._row, dict):
            return _encode({name: scope.find(path, "row") for name, path in self._row.items()})
        if self._row == ("value",) and scope.row.value is not None:
            return scope.row.value  # as it stands, numbers and all
        return _encode(scope.find(self._row, "row"))

    def _asked(self, scope: _Scope) -> Prompt:
        if self._prompt is not None:
            text = scope.fill(self._prompt, "prompt")
            if not text:
                raise Unfit("empty", f"the prompt of row {scope.row.index} is empty", "prompt")
            return TextPrompt(text=text)
        messages: list[dict[str, Any]] = []
        if self._system is not None:
            messages.append({"role": "system", "content": scope.fill(self._system, "system")})
        messages.append({"role": "user", "content": scope.fill(self._chat or (), "chat")})
        return ChatPrompt(messages=messages)


_NONE: Final = object()


class _Scope:
    """The values that paths lead to, each read once."""

    def __init__(
        self, row: Upstream, *, item: Any = _NONE, rows: Any = _NONE, decoded: _Scope | None = None
    ) -> None:
        self.row = row
        self._roots: dict[str, Any] = {} if decoded is None else decoded.read.copy()
        if item is not _NONE:
            self._roots[ITEM] = item
        if rows is not _NONE:
            self._roots[ROWS] = rows

    @property
    def read(self) -> dict[str, Any]:
        """What was read so far, by root."""
        return self._roots

    def find(self, path: Path, field: str, *, default: Any = _NONE) -> Any:
        """What `path` leads to; `default`, or `Unfit` without one, if that is not there."""
        try:
            value = self._root(path[0], field)
        except Unfit:
            if default is _NONE:
                raise
            return default
        for part in path[1:]:
            if _is_object(value) and part in value:
                value = value[part]
            elif _is_list(value) and part.isdecimal() and len(part) < 16 and int(part) < len(value):  # noqa: PLR2004
                value = value[int(part)]
            else:
                value = _NONE
                break
        if value is _NONE:
            if default is _NONE:
                raise Unfit(
                    "missing", f"row {self.row.index} of the stage before has no {_shown(path)}", field
                )
            return default
        return value

    def fill(self, template: Sequence[str | Path], field: str) -> str:
        """The text of a template."""
        return "".join(p if isinstance(p, str) else _text(self.find(p, field)) for p in template)

    def _root(self, name: str, field: str) -> Any:
        if name not in self._roots:
            self._roots[name] = self._read(name, field)
        return self._roots[name]

    def _read(self, name: str, field: str) -> Any:
        row = self.row
        try:
            match name:
                case "value" if row.value is not None:
                    return _decode(row.value)
                case "kept" if row.kept is not None:
                    return _decode(row.kept)
                case "json" if row.text is not None:
                    return _decode(row.text)
                case "lines" if row.text is not None:
                    return [line.strip() for line in row.text.splitlines() if line.strip()]
                case "text" if row.text is not None:
                    return row.text
                case "id" if row.custom_id is not None:
                    return row.custom_id
                case "index":
                    return row.index
                case _:
                    return _NONE
        except _BAD:
            raise Unfit("unreadable", f"{name} of row {row.index} cannot be read as JSON", field) from None


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _text(value: Any) -> str:
    """A value in a text: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else _encode(value).decode()


def _shown(path: Path) -> str:
    return ".".join(path)[:200]
