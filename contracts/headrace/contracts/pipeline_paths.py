"""Paths and templates of a pipeline: how a stage names what it takes of the row before it.

A path is `value.questions.0.text`: a root, then keys of objects and positions in arrays. A template is text with paths
between braces, `Ask about: {value.text}`; doubled braces stand for themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from headrace.contracts.errors import InvalidInput

ROOTS: Final = ("value", "text", "json", "lines", "kept", "id", "index")
"""`value`: what the function returned; `text`: the model's first choice; `json`: that text, read as JSON; `lines`: its
lines that are not blank, as an array; `kept`: what the row carries along; `id`: its custom id; `index`: its place."""
ITEM: Final = "item"
"""One element of the array that `each` names."""
ROWS: Final = "rows"
"""In a template of a stage that collects: all its rows, as text."""
MAX_PARTS: Final = 16

Path = tuple[str, ...]


def parse_path(text: str, roots: Collection[str]) -> Path:
    """The parts of a path; raise `InvalidInput` saying what is wrong with it.

    >>> parse_path("value.questions.0", ROOTS)
    ('value', 'questions', '0')
    """
    parts = tuple(text.split("."))
    if parts[0] not in roots:
        msg = f"{text[:80]!r} begins with {parts[0][:40]!r}: a path begins with one of {', '.join(roots)}"
        raise InvalidInput(msg)
    if len(parts) > MAX_PARTS:
        msg = f"{text[:80]!r} has {len(parts)} parts: {MAX_PARTS} at most"
        raise InvalidInput(msg)
    if len(parts) > 1 and parts[0] in ("text", "id", "index", ROWS):
        msg = f"{text[:80]!r}: {parts[0]} has nothing inside"
        raise InvalidInput(msg)
    for part in parts:
        if not part or any(c in "{}" or c < " " for c in part):
            msg = f"{text[:80]!r} is no path: names with dots between them, as value.title"
            raise InvalidInput(msg)
    return parts


def parse_template(text: str, roots: Collection[str]) -> tuple[str | Path, ...]:
    """The template as literal texts and paths in turn; raise `InvalidInput` saying what is wrong with it.

    >>> parse_template("Say {{{text}}}!", ROOTS)
    ('Say {', ('text',), '}!')
    """
    pieces: list[str | Path] = []
    literal: list[str] = []
    at = 0
    while at < len(text):
        if text.startswith(("{{", "}}"), at):
            literal.append(text[at])
            at += 2
        elif text[at] == "{":
            end = text.find("}", at)
            if end < 0:
                msg = f"a brace is not closed: {text[at : at + 40]!r} (write {{{{ for a brace itself)"
                raise InvalidInput(msg)
            if literal:
                pieces.append("".join(literal))
                literal = []
            pieces.append(parse_path(text[at + 1 : end].strip(), roots))
            at = end + 1
        elif text[at] == "}":
            msg = (
                f"a brace closes nothing: {text[max(0, at - 40) : at + 1]!r} (write }}}} for a brace itself)"
            )
            raise InvalidInput(msg)
        else:
            end = min((i for i in (text.find("{", at), text.find("}", at)) if i >= 0), default=len(text))
            literal.append(text[at:end])
            at = end
    if literal:
        pieces.append("".join(literal))
    return tuple(pieces)


def named(keep: Sequence[str] | Mapping[str, str]) -> list[tuple[str, str]]:
    """The fields that a row carries, each with its path: by the name given, else by the last part of the path."""
    if isinstance(keep, Mapping):
        return list(keep.items())
    return [(path.rsplit(".", 1)[-1], path) for path in keep]
