"""What an engine is to the worker: capacity, `run`, and progress in tokens.

Cancelling the coroutine of `run` aborts the item inside the engine. What `run` and `prepare` raise says whose fault
a failure is, and that alone decides what becomes of the item:

- `ItemFailed`: the item's. It is wrong, or refused: `failed` at once, its neighbours untouched.
- `OutOfMemory`: the item may be too large for what runs beside it. It runs once more with nothing beside it, its
  lease kept; if that is not enough, it is `failed`, with the type `out_of_memory`.
- `EngineDied`: the engine's, or that of some item in it. All that were in it are suspects: their leases go back, and
  each runs apart at its next delivery. One that is in an engine that dies for a second time, and with nothing beside
  it, is `dead`, with the type `poison`. An engine that makes no token for `token_timeout_s`, and a process that dies
  of a fault (SIGSEGV, SIGABRT, SIGBUS, SIGILL, SIGFPE), count as dead engines.
- anything else: nobody's, as far as anyone knows (a refused connection, a full disk). Tried again after a growing
  delay with jitter, up to `max_tries` deliveries, then `dead` with its last error, type `tries_exhausted`.

A process that is killed (SIGKILL, a power cut) says nothing about its items: their leases lapse, and each lapse is a
try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from msgspec import Raw, Struct

from headrace.contracts.generation import Generation
from headrace.contracts.messages import Choice, ItemError, Prompt, Usage


class ItemFailed(Exception):
    """The item itself is wrong or refused; final for this item, harmless to its neighbours."""

    def __init__(self, type_: str, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{type_}: {message}")
        self.error = ItemError(type=type_, message=message[:2048], field=field)


class OutOfMemory(Exception):
    """There is no memory for the item beside what runs now; the engine is well."""


class EngineDied(Exception):
    """The engine cannot go on; everything in it is suspect and its leases go back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine can hold. Tokens are KV-cache tokens; 0 for a limit means there is none.

    `slots`: items that run at once; the worker keeps the engine's waiting queue from running empty by
    sending up to `slots * 1.125` when `queues` is true (the engine has a waiting queue of its own).
    """

    engine: str
    model: str
    slots: int
    capacity_tokens: int
    max_model_len: int = 0
    vocab_size: int = 0
    tokenizer: str = ""
    tokenizer_fingerprint: str = ""
    queues: bool = False
    rows: bool = False
    """It takes rows and no prompts: there is one shape for all of them."""
    row_tokens: int = 0
    """What a row is taken for until some have come: their queue says nothing of their size."""
    version: str = ""
    """Of a function over rows."""


class Work(Struct, frozen=True, kw_only=True):
    """One item for an engine. `id` is unique per attempt. `max_tokens` is resolved (never None)."""

    id: str
    prompt: Prompt
    params: Generation
    max_tokens: int
    prompt_tokens: int = 0
    """As estimated or counted by the client; `prepare` gives the exact number where the engine can count."""
    chat: bool = False
    traceparent: str | None = None
    attempt: int = 1
    """Which delivery of its task it is, 1 at first."""


class Output(Struct, frozen=True, kw_only=True):
    """What came of an item: completions of a model, or the value of a function over a row."""

    choices: list[Choice] = []
    usage: Usage = Usage()
    value: Raw | None = None


@runtime_checkable
class Engine(Protocol):
    """One model (or function) being run. All methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Capacity and identity; valid after `start`."""
        ...

    async def start(self) -> None:
        """Load the model. Raise `HeadraceError` with one sentence if it cannot be (path, memory, package)."""
        ...

    async def stop(self) -> None:
        """Free everything, child processes included; idempotent; pending `run` calls raise `EngineDied`."""
        ...

    def prepare(self, work: Work) -> Work:
        """Tokenise and check an item before it is admitted: exact `prompt_tokens`, unsupported parameters,
        ids against the vocabulary, length against the model. Raise `ItemFailed` (`too_long`, `invalid_token`,
        `invalid_parameter`, `unsupported_parameter`, `invalid_prompt`). Cheap: no model step.
        """
        ...

    async def run(self, work: Work) -> Output:
        """Run one prepared item to its end. Concurrent calls batch. What it may raise is told above."""
        ...

    def tokens_generated(self) -> int:
        """Monotonic count of tokens produced since `start`: what the watchdog watches."""
        ...

    def stats(self) -> dict[str, Any]:
        """Cheap figures for reports and benchmarks: at least `steps` and `running` where the engine knows them."""
        ...
