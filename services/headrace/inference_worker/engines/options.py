"""How an engine is configured: the options that all share, and typed reading of those that one engine has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from msgspec import Struct

from headrace.contracts.errors import InvalidInput

ENGINES: Final = ("echo", "sim", "llamacpp", "vllm")

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})

N = TypeVar("N", int, float)


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What `create_engine` takes; None means the engine's own default.

    `model`: a path (llamacpp: a GGUF file; vllm: a folder) or a name that the engine resolves.
    `slots`: items that run at once. `context`: tokens of one item, prompt and completion together.
    `threads`: of computing. `seed`: of whatever the engine samples. `extra`: settings of one engine,
    as `name` or `engine.name`; those of another engine (`sim.…` for vllm) are left alone, so that one
    file may hold the settings of several.
    """

    model: str | None = None
    slots: int | None = None
    context: int | None = None
    threads: int | None = None
    seed: int = 0
    extra: dict[str, str] = {}

    def __post_init__(self) -> None:
        for name in ("slots", "context", "threads"):
            value: int | None = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise InvalidInput(f"{name} is {value}: it must be at least 1", field=name)


class Extras:
    """Typed reading of `EngineOptions.extra` for one engine; each bad value is refused by its name."""

    def __init__(self, engine: str, extra: Mapping[str, str]) -> None:
        self._engine = engine
        self._known: list[str] = []
        self._values: dict[str, str] = {}
        for key, value in extra.items():
            prefix, dot, name = key.partition(".")
            if not dot:
                self._values[key] = value
            elif prefix == engine:
                self._values[name] = value
            elif prefix not in ENGINES:
                raise self._bad(key, f"{prefix!r} is no engine: use one of {', '.join(ENGINES)}")

    def text(self, name: str, default: str = "") -> str:
        """The setting as it stands."""
        self._known.append(name)
        return self._values.pop(name, default)

    def choice(self, name: str, default: str, allowed: Iterable[str]) -> str:
        """One of `allowed`."""
        value, allowed = self.text(name, default), tuple(allowed)
        if value not in allowed:
            raise self._bad(name, f"{value!r} is none of {', '.join(allowed)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """true/false, yes/no, on/off, 1/0."""
        value = self.text(name, str(default)).strip().lower()
        if value not in _TRUE | _FALSE:
            raise self._bad(name, f"{value!r} is neither true nor false")
        return value in _TRUE

    def integer(self, name: str, default: int, *, minimum: int = 0, maximum: int = 2**53) -> int:
        """A whole number within bounds, both included."""
        return self._number(name, default, minimum, maximum, int)

    def number(self, name: str, default: float, *, minimum: float = 0.0, maximum: float = 1e18) -> float:
        """A finite number within bounds, both included."""
        return self._number(name, default, minimum, maximum, float)

    def rest(self) -> dict[str, str]:
        """What no other call took; for an engine that passes settings on."""
        taken, self._values = self._values, {}
        return taken

    def finish(self) -> None:
        """Refuse what is left over: a misspelt setting must not be ignored."""
        for name in self._values:
            known = ", ".join(sorted(self._known))
            raise self._bad(name, f"engine {self._engine} has no such setting; it has: {known}")

    def _number(self, name: str, default: N, minimum: N, maximum: N, parse: Callable[[str], N]) -> N:
        text = self.text(name, "")
        if not text:
            return default
        try:
            value = parse(text)
        except ValueError:
            raise self._bad(name, f"{text!r} is not a number of the right kind") from None
        if not math.isfinite(value) or not minimum <= value <= maximum:
            raise self._bad(name, f"{text} is outside {minimum}..{maximum}")
        return value

    def _bad(self, name: str, why: str) -> InvalidInput:
        field = name if "." in name else f"{self._engine}.{name}"
        return InvalidInput(f"setting {field}: {why}", field=field)
