"""Telling errors of memory from others, and waiting for calls that never return."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from headrace.inference_worker.engines.background import in_daemon
from headrace.inference_worker.engines.llamacpp_errors import failure
from headrace.inference_worker.engines.memory import is_out_of_memory
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed, OutOfMemory


class OutOfMemoryError(RuntimeError):
    """As torch's is named."""


def _caused(by: BaseException) -> BaseException:
    try:
        raise ValueError("the step failed") from by
    except ValueError as e:
        return e


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("std::bad_alloc"), True),
        (_caused(MemoryError()), True),
        (RuntimeError("the grammar has no root"), False),
        (ValueError("prompt is longer than the model's limit"), False),
    ],
)
def test_memory_is_known_by_type_or_text(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("message", "kind", "code", "expected"),
    [
        ("Context size has been exceeded.", "server_error", 500, OutOfMemory),
        ("900 tokens exceed the available context size", "exceed_context_size_error", 400, ItemFailed),
        ("failed to allocate buffer for kv cache", "server_error", 500, OutOfMemory),
        ("Compute error.", "server_error", 500, ItemFailed),
        ("Loading model", "unavailable_error", 503, EngineDied),
    ],
)  # fmt: skip
def test_what_llama_cpp_says_of_memory(message: str, kind: str, code: int, expected: type) -> None:
    assert type(failure(message, kind, code)) is expected


@pytest.mark.anyio
async def test_a_blocking_call_returns_or_raises_or_is_left_behind() -> None:
    done: list[int] = []
    await in_daemon(done.append, 1)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        await in_daemon(lambda: 1 // 0)
    never = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await in_daemon(never.wait)
    never.set()


def test_a_stuck_call_does_not_keep_a_process_from_ending() -> None:
    code = """
import asyncio, threading
from headrace.inference_worker.engines.background import in_daemon
async def main():
    try:
        async with asyncio.timeout(0.1):
            await in_daemon(threading.Event().wait)
    except TimeoutError:
        print("left behind")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=20
    )
    assert done.stdout == "left behind\n"
