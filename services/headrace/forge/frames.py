"""What parent and child say to each other: MessagePack with its length before it, over a pair of sockets."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from headrace.forge.invoke import Kind, RowOutcome

HEAD: Final = 4
"""Bytes of the length."""
LONGEST: Final = 1 << 30


class Hello(Struct):
    """The parent's first word: which function, and where Python finds it."""

    reference: str
    path: list[str]
    options: dict[str, str] = {}


class Ready(Struct):
    """The child's answer to it; `error` says why there is no such function there."""

    identity: str = ""
    error: str = ""


class Ask(Struct, array_like=True):
    """One batch."""

    id: int
    rows: list[bytes]


class Answer(Struct, array_like=True):
    """What came of a batch: outcomes, or how it failed. `seconds` it took, and the process's memory after it."""

    id: int
    outcomes: list[RowOutcome] = []
    kind: Kind | None = None
    message: str = ""
    passing: bool = False
    seconds: float = 0.0
    memory_mb: int = 0


class TooLong(Exception):
    """A frame that no reader takes."""


_encoder = msgspec.msgpack.Encoder()


def frame(message: Struct) -> bytes:
    """The bytes of a message."""
    data = _encoder.encode(message)
    if len(data) > LONGEST:
        raise TooLong(f"a batch's answers have {len(data):,} bytes; {LONGEST:,} is the most")
    return len(data).to_bytes(HEAD, "big") + data


decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode
decode_ask = msgspec.msgpack.Decoder(Ask).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
