"""What can be called: declared callees, their prices, and what an attempt may cost at most."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from msgspec import Raw, Struct

from headrace.contracts.errors import InvalidInput, NotFound
from headrace.contracts.ledger import CallUsage, Effect, Unit
from headrace.mesh.callee_settings import CalleeSettings, PriceSettings

MTOK = 1_000_000
TOKENS_PER_MESSAGE = 8
"""What a chat template adds to each message at most, beside its text."""
GENERATE = CalleeSettings(kind="function", effect="cost_bearing", function="generate")
"""Our own workers: there without being declared."""


class Callee(Struct, frozen=True):
    """One declared callee."""

    name: str
    settings: CalleeSettings

    @property
    def effect(self) -> Effect:
        """What calling it does to the world."""
        return self.settings.effect

    @property
    def price(self) -> PriceSettings | None:
        """Its prices, if they are declared."""
        return self.settings.price

    def api_key(self) -> str | None:
        """The secret, read from the environment at each call: it is in no setting, record or log."""
        name = self.settings.api_key_env
        if name is None:
            return None
        secret = os.environ.get(name, "").strip()
        if not secret:
            msg = f"callee {self.name}: the environment variable {name} is empty: it should hold the API key"
            raise InvalidInput(msg, field="api_key_env", code="no_api_key")
        if not (
            secret.isascii() and secret.isprintable()
        ):  # the header would be refused, and quoted in the error
            msg = f"callee {self.name}: the environment variable {name} holds characters that no API key has"
            raise InvalidInput(msg, field="api_key_env", code="no_api_key")
        return secret


class Callees:
    """The callees of a gateway by name."""

    def __init__(self, declared: dict[str, CalleeSettings]) -> None:
        self._all = {"generate": GENERATE, **declared}

    def get(self, name: str) -> Callee:
        """The callee; raise `NotFound` with the known ones."""
        found = self._all.get(name)
        if found is None:
            known = ", ".join(sorted(self._all))
            msg = f"no callee {name!r}: known are {known}"
            raise NotFound(msg, code="unknown_callee")
        return Callee(name, found)

    @staticmethod
    def unknown(effect: Effect) -> CalleeSettings:
        """What stands for a callee that is declared no more: it is never called again."""
        return CalleeSettings(kind="http", effect=effect, max_attempts=1)

    def names(self) -> list[str]:
        """All names."""
        return sorted(self._all)


class Body(Struct, frozen=True):
    """A body as it will be sent, and the bounds that follow from it; None where nothing bounds it."""

    value: Any
    model: str | None
    input_tokens: int
    """Never less than what the callee will count: UTF-8 bytes, since a token has at least one."""
    max_output_tokens: int | None
    stream: bool = False


def read_body(callee: Callee, body: Raw) -> Body:
    """Decode a call's body and complete it by what the callee declares; raise `InvalidInput` naming the field."""
    try:
        value = msgspec.json.decode(bytes(body))
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise InvalidInput(
            f"the body is no JSON: {str(e)[:200]}", field="body", code="invalid_json"
        ) from None
    if callee.settings.kind == "http":
        return Body(value, None, len(bytes(body)), callee.settings.max_output_tokens or 0)
    if not isinstance(value, dict):
        msg = f"callee {callee.name} takes a JSON object, this is {type(value).__name__}"
        raise InvalidInput(msg, field="body", code="invalid_body")
    fields: dict[str, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
    if callee.settings.kind == "openai" and callee.settings.model and not fields.get("model"):
        fields["model"] = callee.settings.model
    limit = _output_limit(fields)
    if limit is None and callee.settings.max_output_tokens:
        limit = callee.settings.max_output_tokens
        fields["max_tokens"] = limit
    n = fields.get("n") or 1
    if not isinstance(n, int) or n < 1:
        raise InvalidInput("n is the number of answers, 1 or more", field="body.n", code="invalid_body")
    messages: Any = fields.get("messages")
    overhead = TOKENS_PER_MESSAGE * (len(messages) + 1 if isinstance(messages, list) else 1)  # pyright: ignore[reportUnknownArgumentType]
    return Body(
        value=fields,
        model=fields.get("model") if isinstance(fields.get("model"), str) else None,
        input_tokens=len(bytes(body)) + overhead,
        max_output_tokens=None if limit is None else limit * n,
        stream=bool(fields.get("stream")),
    )


def _output_limit(fields: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(
                f"{name} is a number of tokens, 1 or more", field=f"body.{name}", code="invalid_body"
            )
        return value
    return None


def worst_case(callee: Callee, body: Body) -> dict[Unit, int | None]:
    """What an attempt takes of each unit at most; None where nothing bounds it."""
    output, price = body.max_output_tokens, callee.price
    tokens = None if output is None else body.input_tokens + output
    micro: int | None
    if price is not None:
        micro = None if output is None else cost(price, body.input_tokens, output)
    else:
        # What runs on our own workers costs no money.
        micro = 0 if callee.settings.free or callee.settings.kind == "function" else None
    return {"calls": 1, "tokens": tokens, "micro": micro}


def actual(callee: Callee, usage: CallUsage) -> dict[Unit, int]:
    """What a call did take of each unit."""
    price = callee.price
    return {
        "calls": 1,
        "tokens": usage.input_tokens + usage.output_tokens,
        "micro": 0
        if price is None
        else cost(price, usage.input_tokens, usage.output_tokens, usage.cached_tokens),
    }


def cost(price: PriceSettings, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> int:
    """Micro-units of money, rounded up. Cached input has its own price where one is declared."""
    cached = min(cached_tokens, input_tokens) if price.cached_micro_per_mtok is not None else 0
    total = (
        (input_tokens - cached) * price.input_micro_per_mtok
        + cached * (price.cached_micro_per_mtok or 0)
        + output_tokens * price.output_micro_per_mtok
    )
    return -(-total // MTOK) + price.micro_per_call
