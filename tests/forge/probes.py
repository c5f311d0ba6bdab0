"""Functions that the forge's tests run: good ones, and each way to be bad. Their processes import this module."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from headrace.forge import Retry, RowError, function, option


class Word(Struct):
    """A row: a word, which may say what the function is to do at it."""

    text: str
    n: int = 0


class Count(Struct):
    """What is known of a word."""

    upper: str
    length: int


def _do(word: str) -> RowError | None:
    """What the word asks for, if it asks for something."""
    match word:
        case "refuse":
            return RowError("refused_word", "this word is not counted")
        case "raise":
            raise ValueError("this word raises")
        case "exit":
            os._exit(7)
        case "system-exit":
            sys.exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)
        case "hang":
            time.sleep(600)
        case _:
            pass
    return None


def _count(word: Word) -> Count | RowError:
    return _do(word.text) or Count(word.text.upper(), len(word.text))


@function(version="3", timeout_s=30.0)
def count(rows: list[Word]) -> list[Count | RowError]:
    """Upper case and length."""
    return [_count(row) for row in rows]


@function
def one_by_one(rows: list[Word]) -> Iterator[Count | RowError]:
    """The same, one answer after the other."""
    for row in rows:
        yield _count(row)


@function(concurrency=4)
async def later(rows: list[Word]) -> list[Count | RowError]:
    """The same, awaited."""
    await asyncio.sleep(0.01)
    return [_count(row) for row in rows]


@function
async def later_one_by_one(rows: list[Word]) -> AsyncIterator[Count | RowError]:
    """The same, awaited, one answer after the other."""
    for row in rows:
        await asyncio.sleep(0)
        yield _count(row)


@function
def plain(rows):
    """Any JSON in, any JSON out."""
    return [{"got": row} for row in rows]


@function(size=lambda row: row.n, batching="tokens:100")
def measured(rows: list[Word]) -> list[dict[str, int]]:
    """A row counts its own n; the answer does not depend on what else is in the batch."""
    return [{"n": row.n} for row in rows]


@function(size=lambda row: row.n, batching="tokens:1000")
def measured_slowly(rows: list[Word]) -> list[int]:
    """Takes its time."""
    time.sleep(0.3)
    return [row.n for row in rows]


@function
def drops_some(rows: list[Word]) -> list[Count]:
    """Forgets rows, as a function that filters would."""
    return [Count(row.text.upper(), len(row.text)) for row in rows if row.text != "drop"]


@function
def returns_nothing(rows: list[Word]) -> Any:
    """Forgets to return."""


@function
def wrong_answers(rows: list[Word]) -> list[Count]:
    """Answers with what its annotation does not allow, or no JSON stands for."""
    return [
        object() if row.text == "object" else {"upper": 5} if row.text == "wrong" else _count(row)
        for row in rows
    ]


@function
def endless(rows: list[Word]) -> Iterator[int]:
    """Never stops answering."""
    while True:
        yield 1


@function(timeout_s=1.0)
def slow(rows: list[Word]) -> list[Count | RowError]:
    """May hang."""
    return [_count(row) for row in rows]


@function(memory_mb=1)
def grows(rows: list[Word]) -> list[int]:
    """Its process is larger than allowed from the start, so that each batch gets another one."""
    return [os.getpid() for _ in rows]


@function
def who(rows: list[Any]) -> list[int]:
    """The process that ran it."""
    return [os.getpid() for _ in rows]


@function
def options(rows: list[Any]) -> list[str]:
    """What the settings say to it."""
    return [option("greeting", "none") for _ in rows]


@function
def prints(rows: list[Any]) -> list[int]:
    """Prints where answers of a command stand."""
    print("this is no answer")
    return [len(rows)] * len(rows)


@function(retry=Retry(on=(ConnectionError,), tries=4, delay_s=0.01))
def unsteady(rows: list[dict[str, str]]) -> list[str]:
    """Fails twice for each file that it is given, with an error that passes."""
    log = Path(rows[0]["log"])
    with log.open("a") as out:
        out.write("x")
    if log.stat().st_size < 3:
        raise ConnectionError("not yet")
    return ["ok"] * len(rows)


@function(timeout_s=60.0)
def holds_the_interpreter(rows: list[dict[str, float]]) -> list[float]:
    """Sleeps in native code without letting go of the interpreter: no thread of its process runs meanwhile."""
    sleep = ctypes.PyDLL(None).usleep
    for row in rows:
        for _ in range(int(row["seconds"] * 10)):
            sleep(100_000)
    return [row["seconds"] for row in rows]


@function(timeout_s=60.0)
def logs_runs(rows: list[dict[str, Any]]) -> list[int]:
    """Appends each row that it runs to a file, slowly."""
    for row in rows:
        with Path(row["log"]).open("a") as out:
            out.write(f"{row['i']}\n")
        time.sleep(row.get("seconds", 0.0))
    return [row["i"] for row in rows]
