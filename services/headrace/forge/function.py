"""`@function`: a callable over a list of rows, with its name, version, limits and the batching that suits it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast, overload

from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import check_token
from headrace.forge.batching import Batching, parse_batching
from headrace.forge.sizes import SizeFunction, named_size
from headrace.forge.types import Codec, codec_of

P = ParamSpec("P")
R = TypeVar("R")

MAX_PROCESSES: Final = 1_024
MAX_TRIES: Final = 100
MAX_DELAY_S: Final = 3_600
_ERROR_TYPE = re.compile(r"[a-z0-9_]{1,64}\Z")
_VERSION = re.compile(r"[\x21-\x7e]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class RowError:
    """What a function returns in the place of an answer: this row is wrong, the others are not.

    `type` is a stable word for programs (a-z, 0-9, _), `message` says what and why.
    """

    type: str
    message: str = ""

    def __post_init__(self) -> None:
        if not _ERROR_TYPE.match(self.type):
            msg = f"the type of a RowError is 1 to 64 of the characters a-z 0-9 _; got {self.type[:80]!r}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Retry:
    """When a batch that raised is tried again as it is, before it is split.

    `on`: the exceptions that may pass by themselves (none by default: what a function raises is a row's fault).
    `tries`: calls at most; `delay_s` before the second, doubled before each further one.
    """

    on: tuple[type[BaseException], ...] = ()
    tries: int = 3
    delay_s: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.tries <= MAX_TRIES or not 0 <= self.delay_s <= MAX_DELAY_S:
            raise ValueError(f"Retry takes tries from 1 to {MAX_TRIES} and delay_s from 0 to {MAX_DELAY_S:,}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may take. `timeout_s`: seconds of one batch, then its process is ended and the batch split.

    `memory_mb`: a process that has grown beyond it is replaced after its batch (0: never).
    """

    timeout_s: float = 600.0
    memory_mb: int = 0


@dataclass(frozen=True, slots=True)
class Declared:
    """What the decorator was told of how to run; settings and flags come before it."""

    batching: Batching | None = None
    max_wait_ms: int | None = None
    order: str | None = None
    processes: int = 1
    concurrency: int = 1
    size: SizeFunction | None = None


@dataclass(eq=False)
class Function(Generic[P, R]):
    """A function over rows. Called directly it is the plain callable, so that it is tested like any other."""

    call: Callable[P, R]
    name: str
    version: str
    codec: Codec
    declared: Declared = field(default_factory=Declared)
    limits: Limits = field(default_factory=Limits)
    retry: Retry = field(default_factory=Retry)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The callable itself."""
        return self.call(*args, **kwargs)

    @property
    def reference(self) -> str:
        """`module:name`, by which another process finds it."""
        return f"{self.call.__module__}:{self.call.__qualname__}"

    @property
    def identity(self) -> str:
        """`module:name@version`: stands as the model of each row that it made."""
        return f"{self.reference}@{self.version}"

    @property
    def is_async(self) -> bool:
        """Whether it is awaited: several of its batches then share a process."""
        return inspect.iscoroutinefunction(self.call) or inspect.isasyncgenfunction(self.call)

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        return (inspect.getdoc(self.call) or "").partition("\n")[0]


@overload
def function(call: Callable[P, R], /) -> Function[P, R]: ...
@overload
def function(
    *,
    name: str | None = None,
    version: str = "1",
    batching: str | None = None,
    max_wait_ms: int | None = None,
    order: str | None = None,
    size: str | Callable[[Any], int] | None = None,
    cpu_bound: bool = False,
    processes: int | None = None,
    concurrency: int = 1,
    timeout_s: float = 600.0,
    memory_mb: int = 0,
    retry: Retry | None = None,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(
    call: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    batching: str | None = None,
    max_wait_ms: int | None = None,
    order: str | None = None,
    size: str | Callable[[Any], int] | None = None,
    cpu_bound: bool = False,
    processes: int | None = None,
    concurrency: int = 1,
    timeout_s: float = 600.0,
    memory_mb: int = 0,
    retry: Retry | None = None,
) -> Function[P, R] | Callable[[Callable[P, R]], Function[P, R]]:
    """Declare a callable over rows: `def probe(rows: list[Row]) -> list[Answer]`, plain, async or a generator.

    `rows` and answers are msgspec Structs by annotation, or any JSON without one. One answer for each row, in order;
    an answer may be a `RowError`. `cpu_bound`: one process for each core, unless `processes` says how many.
    `concurrency`: batches at once in one process, of an async function. Raise `InvalidInput` for what cannot be.
    """

    def made(call: Callable[P, R]) -> Function[P, R]:
        if not callable(call) or not hasattr(call, "__qualname__"):
            raise InvalidInput("@function stands above a def", field="function")
        called = check_token("function", name or call.__name__)
        where = f"function {called}"
        if not _VERSION.match(version):
            raise InvalidInput(f"{where}: version is 1 to 64 visible characters", field="version")
        workers = processes if processes is not None else (0 if cpu_bound else 1)
        _within(where, "processes", workers, 0, MAX_PROCESSES)
        _within(where, "concurrency", concurrency, 1, 10_000)
        _within(where, "timeout_s", timeout_s, 0.001, 7 * 86_400)
        _within(where, "memory_mb", memory_mb, 0, 1 << 30)
        if order not in (None, "ordered", "free"):
            raise InvalidInput(f"{where}: order is ordered or free", field="order")
        declared = Declared(
            batching=parse_batching(batching) if batching is not None else None,
            max_wait_ms=max_wait_ms,
            order=order,
            processes=workers,
            concurrency=concurrency,
            size=named_size(size) if isinstance(size, str) else SizeFunction("given", size) if size else None,
        )
        found = Function(
            call=call,
            name=called,
            version=version,
            codec=codec_of(call, where),
            declared=declared,
            limits=Limits(timeout_s, memory_mb),
            retry=retry or Retry(),
        )
        update_wrapper(found, call)  # pyright: ignore[reportArgumentType]
        return found

    return made if call is None else made(call)


_options: dict[str, str] = {}


def option(name: str, default: str = "") -> str:
    """What `[functions.NAME] options` sets for the function that runs in this process."""
    return _options.get(name, default)


def set_options(options: Mapping[str, str]) -> None:
    """Give the function of this process its options; the forge does so before the first batch."""
    _options.clear()
    _options.update(options)


def functions_of(module_name: str) -> list[Function[Any, Any]]:
    """Every `@function` that is defined in an imported module, in the order of its names."""
    found: dict[str, Function[Any, Any]] = {}
    for value in vars(sys.modules[module_name]).values():
        if isinstance(value, Function):
            function = cast("Function[Any, Any]", value)
            found[function.reference] = function
    return sorted(found.values(), key=lambda f: f.name)


def _within(where: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidInput(f"{where}: {name} is from {low:g} to {high:g}; got {value:g}", field=name)
