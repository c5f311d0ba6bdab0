"""The functions of the example: texts are split, near-duplicate questions dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from headrace.forge import RowError, function

PASSAGE_CHARACTERS = 400
ALIKE = 0.9
"""Two questions whose vectors have a cosine similarity above this ask the same."""


class Document(Struct):
    """A text with its title; paragraphs are parted by blank lines."""

    title: str
    text: str


class Passages(Struct):
    """A document in pieces that a small model can take in."""

    title: str
    passages: list[str]


class Probe(Struct):
    """A question about a passage, with the question's vector."""

    title: str
    passage: str
    question: str
    vector: list[float]


class Distinct(Struct):
    """Probes of which no two ask the same; how many were left out as near-duplicates, and as no questions."""

    probes: list[dict[str, Any]]
    duplicates: int
    no_questions: int


@function(version="1")
def split(rows: list[Document]) -> list[Passages | RowError]:
    """A document's passages: whole paragraphs, as many as fit."""
    return [
        Passages(row.title, passages)
        if (passages := _passages(row.text))
        else RowError("empty", "the document has no text")
        for row in rows
    ]


def _passages(text: str) -> list[str]:
    passages: list[str] = []
    for paragraph in filter(None, (" ".join(p.split()) for p in text.split("\n\n"))):
        if passages and len(passages[-1]) + len(paragraph) < PASSAGE_CHARACTERS:
            passages[-1] += f" {paragraph}"
        else:
            passages.append(paragraph)
    return passages


@function(version="1", batching="rows:1")
def distinct(rows: list[list[Probe]]) -> list[Distinct]:
    """Probes without those that are near-duplicates of an earlier one."""
    return [_distinct(row) for row in rows]


def _distinct(found: list[Probe]) -> Distinct:
    kept: list[Probe] = []
    vectors = np.empty((0, len(found[0].vector) if found else 0), dtype=np.float32)
    questions = [probe for probe in found if "?" in probe.question]
    for probe in questions:
        vector = np.asarray(probe.vector, dtype=np.float32)
        if not kept or float((vectors @ vector).max()) <= ALIKE:
            kept.append(probe)
            vectors = np.vstack([vectors, vector])
    plain = [{"title": p.title, "passage": p.passage, "question": p.question} for p in kept]
    return Distinct(plain, len(questions) - len(kept), len(found) - len(questions))


@function(version="1")
def probe(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A probe as it is: each becomes a row of its own in the results."""
    return rows
