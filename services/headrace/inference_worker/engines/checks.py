"""Checks that every engine makes of an item before it runs: each failure is that item's alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, cast

from headrace.contracts.generation import DEFAULT_GENERATION, Generation
from headrace.contracts.messages import ChatPrompt
from headrace.inference_worker.engines.protocol import ItemFailed

GENERATION_FIELDS: Final[tuple[str, ...]] = Generation.__struct_fields__
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


class ParameterTable:
    """Which `Generation` fields an engine honours; any other that is set is refused by name.

    One C-level comparison for each item, since the cheapest engine takes tens of thousands a second.
    """

    def __init__(self, engine: str, honoured: Iterable[str]) -> None:
        self.honoured = frozenset(honoured)
        unknown = self.honoured - set(GENERATION_FIELDS)
        if unknown:
            raise ValueError(f"not fields of Generation: {sorted(unknown)}")
        self._engine = engine
        self._others = tuple(f for f in GENERATION_FIELDS if f not in self.honoured)
        self._get = attrgetter(*self._others) if self._others else None
        self._defaults = self._get(DEFAULT_GENERATION) if self._get else None

    def check(self, params: Generation) -> None:
        """Raise `ItemFailed('unsupported_parameter')` for the first set field that is not honoured."""
        if self._get is None or self._get(params) == self._defaults:
            return
        for name in self._others:
            if getattr(params, name) != getattr(DEFAULT_GENERATION, name):
                raise unsupported(self._engine, name)


def unsupported(engine: str, name: str, why: str = "") -> ItemFailed:
    """The error for a parameter that this engine cannot honour."""
    tail = f": {why}" if why else ""
    return ItemFailed("unsupported_parameter", f"engine {engine} cannot honour {name}{tail}", field=name)


def check_ids(ids: Sequence[int], vocab_size: int, *, field: str = "prompt_token_ids") -> None:
    """Token ids must be 0 ≤ id < `vocab_size` (0: unknown, only the sign is checked); at least one."""
    if not ids:
        raise ItemFailed("invalid_prompt", f"{field} is empty", field=field)
    limit = vocab_size or 2**31
    if min(ids) >= 0 and max(ids) < limit:
        return
    for position, value in enumerate(ids):
        if not 0 <= value < limit:
            where = f"{field}[{position}]"
            message = f"{where} is {value}: the vocabulary has ids 0..{limit - 1}"
            raise ItemFailed("invalid_token", message, field=where)


def check_length(prompt_tokens: int, max_tokens: int, *, limit: int, capacity: int = 0, n: int = 1) -> None:
    """Prompt and completion must fit the model's `limit`, and all `n` completions the KV cache (tokens; 0: none)."""
    size = prompt_tokens + max_tokens
    if limit and size > limit:
        message = f"prompt of {prompt_tokens} + max_tokens {max_tokens} = {size} tokens is over the limit of {limit}"
        raise ItemFailed("too_long", message, field="max_tokens" if prompt_tokens < limit else "prompt")
    need = prompt_tokens + n * max_tokens
    if capacity and need > capacity:
        message = f"the item needs {need} tokens of KV cache and the engine has {capacity}"
        raise ItemFailed("too_long", message, field="max_tokens" if prompt_tokens < capacity else "prompt")


def check_chat(prompt: ChatPrompt) -> None:
    """Messages need a known role and text content (an assistant's tool calls may stand without it)."""
    if not prompt.messages:
        raise ItemFailed("invalid_prompt", "messages is empty", field="messages")
    for position, message in enumerate(prompt.messages):
        where = f"messages[{position}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            shown = repr(role)[:80]
            text = f"{where}.role is {shown}: use one of {', '.join(sorted(ROLES))}"
            raise ItemFailed("invalid_prompt", text, field=f"{where}.role")
        content = message.get("content")
        if content is None and role == "assistant" and message.get("tool_calls"):
            continue
        _check_content(content, f"{where}.content")


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    if not parts:
        text = f"{where} is {'empty' if content == [] else type(cast('object', content)).__name__}: use text"
        raise ItemFailed("invalid_prompt", text, field=where)
    for position, part in enumerate(parts):
        field = f"{where}[{position}]"
        known = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind: Any = known.get("type")
        if kind != "text" or not isinstance(known.get("text"), str):
            text = f"{field} is no text part ({str(kind)[:40]}): only text is taken"
            raise ItemFailed("invalid_prompt", text, field=field)


def message_text(message: dict[str, Any]) -> str:
    """The text of a checked message, its parts joined; empty where it has none."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content) if content else ""


def flat_messages(prompt: ChatPrompt) -> list[dict[str, Any]]:
    """The messages with their content as one string, which every chat template can render."""
    return [
        {**message, "content": message_text(message)} if message.get("content") is not None else message
        for message in prompt.messages
    ]


def last_user_text(prompt: ChatPrompt) -> str:
    """The last user message's text; the last message's where no user spoke."""
    for message in reversed(prompt.messages):
        if message.get("role") == "user":
            return message_text(message)
    return message_text(prompt.messages[-1])


def cut_at_stop(text: str, stop: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """`text` up to the earliest of the stop strings (and with it, if `include`), and which one it was."""
    found = [(at, s) for s in stop if (at := text.find(s)) >= 0]
    if not found:
        return text, None
    at, which = min(found, key=lambda pair: pair[0])
    return text[: at + len(which)] if include else text[:at], which
