"""`embed`: a text's vector, by a static embedding model on the CPU.

A row is a text, or an object with `text`; its value is a list of numbers, a vector of length 1. The cosine similarity
of two texts is the dot product of their vectors.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated

from msgspec import Meta, Struct

from headrace.forge.builtin.static_model import StaticModel, load_static_model
from headrace.forge.function import function, option


class Text(Struct, frozen=True):
    """A row; other fields are for whoever reads the results."""

    text: Annotated[str, Meta(max_length=1 << 24)]


@cache
def _model() -> StaticModel:
    return load_static_model(option("model"))


@function(name="embed", version="1", batching="rows:256")
def embed(rows: list[Text | str]) -> list[list[float]]:
    """A text's vector, by a static embedding model."""
    return _model().embed([row if isinstance(row, str) else row.text for row in rows])
