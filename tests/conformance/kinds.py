"""The engines under test, and where they legitimately differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.inference_worker.engines.options import EngineOptions

ASYNCIO: tuple[str, dict[str, Any]] = ("asyncio", {})
UVLOOP: tuple[str, dict[str, Any]] = ("asyncio", {"loop_factory": uvloop.new_event_loop})


@dataclass(frozen=True)
class Kind:
    """An engine with its options, and flags for what it can do.

    `samples`: it makes text of its own (echo copies). `structured`: the forms of constrained output that it honours.
    `filler`: max_tokens of an item that is sure to be running still when the test looks.
    `refuses`: a Generation field, set to a value, that it cannot honour (none for vLLM, which honours all).
    """

    name: str
    engine: str
    options: Callable[[Path], EngineOptions]
    backend: tuple[str, dict[str, Any]] = ASYNCIO
    samples: bool = True
    exact_batches: bool = True
    structured: frozenset[str] = frozenset()
    refuses: dict[str, Any] = field(default_factory=dict)
    filler: int = 400
    many: int = 32
    restarts: bool = True
    tokenizer: bool = True

    @property
    def id(self) -> str:
        return f"{self.name}-{'uvloop' if self.backend is UVLOOP else 'asyncio'}"


def _echo(_: Path) -> EngineOptions:
    # With a delay, so that its items can be cancelled and stopped like any other's.
    return EngineOptions(slots=64, context=512, extra={"delay_ms": "60", "vocab_size": "1000"})


def _sim(_: Path) -> EngineOptions:
    # In real time, at a millisecond or so a step.
    extra = {"step_ms": "1", "step_per_seq_ms": "0", "step_per_kv_token_us": "0", "output_median": "12"}
    return EngineOptions(slots=16, context=512, extra=extra)


def _llamacpp(_: Path) -> EngineOptions:
    # Without its cache of prompts, so that the same item takes the same path through its kernels each time.
    return EngineOptions(slots=8, context=512, extra={"prompt_cache": "false"})


def _vllm(mode: str) -> Callable[[Path], EngineOptions]:
    def options(model: Path) -> EngineOptions:
        extra = {
            "mode": mode,
            "kv_cache_memory_bytes": str(16 << 20),
            "max_num_batched_tokens": "1024",
        }
        return EngineOptions(model=str(model), slots=64, context=512, threads=1, extra=extra)

    return options


ECHO = Kind("echo", "echo", _echo, samples=False, refuses={"logprobs": 1}, tokenizer=False)
SIM = Kind("sim", "sim", _sim, refuses={"logprobs": 1}, tokenizer=False)
LLAMACPP = Kind(
    "llamacpp",
    "llamacpp",
    _llamacpp,
    exact_batches=False,
    structured=frozenset({"json", "choice", "grammar", "json_object"}),
    refuses={"min_tokens": 1},
    many=12,
)
VLLM_STEP = Kind(
    "vllm-step",
    "vllm",
    _vllm("step"),
    structured=frozenset({"json", "regex", "choice", "grammar", "json_object"}),
)
VLLM_ASYNC = replace(VLLM_STEP, name="vllm-async", options=_vllm("async"), backend=UVLOOP, restarts=False)


def _both(kind: Kind) -> list[Kind]:
    return [kind, replace(kind, backend=UVLOOP)]


def params() -> list[Any]:
    """Each kind on each loop; vLLM only where it is installed, and its own process (slow to load) on one loop only."""
    found = [pytest.param(k, id=k.id) for k in (*_both(ECHO), *_both(SIM))]
    found += [pytest.param(k, id=k.id, marks=pytest.mark.llamacpp) for k in _both(LLAMACPP)]
    if find_spec("vllm") is not None:
        vllm = (*_both(VLLM_STEP), VLLM_ASYNC)
        found += [pytest.param(k, id=k.id, marks=(pytest.mark.vllm, pytest.mark.timeout(300))) for k in vllm]
    return found
