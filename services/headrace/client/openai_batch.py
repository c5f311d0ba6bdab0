"""Lines of an OpenAI Batch file: `{"custom_id", "method", "url", "body"}`.

One typed decode a line: the tables of `openai_fields` become fields of the Struct, so a refused field is a
type error that is explained by its reason.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from headrace.client.constraints import Constraints, constraint_of
from headrace.client.conversation import check_tools, estimate_tokens, text_bytes
from headrace.client.items import Item, Messages, Model, chat_item
from headrace.client.openai_fields import CHAT_ONLY, COMPLETIONS_ONLY, HARMLESS, LABELS, REASONS, REFUSED
from headrace.client.problems import shown, wrong
from headrace.client.sampling import Params, ParamsTable, check_ids
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import ChatPrompt, TextPrompt, TokenPrompt
from headrace.contracts.names import CustomId

CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"


class BodyFields(Constraints, kw_only=True, forbid_unknown_fields=True):
    """The fields of `body` that are honoured; the harmless and the refused ones are added from their tables."""

    model: Model | None = None
    messages: Messages | None = None
    prompt: str | list[int | str | list[int]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_Body: Any = msgspec.defstruct(
    "Body",
    [*((name, Any, None) for name in (*HARMLESS, *LABELS)), *((name, None, None) for name in REFUSED)],
    bases=(BodyFields,),
    kw_only=True,
    forbid_unknown_fields=True,
)


class _LineFields(Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: CustomId
    method: str
    url: str
    body: BodyFields


BatchLine: Final = cast(
    "type[_LineFields]",
    msgspec.defstruct(
        "BatchLine", [("body", _Body)], bases=(_LineFields,), kw_only=True, forbid_unknown_fields=True
    ),
)
"""The type to decode a line with; its `body` has every field of the tables."""

_EXTRA: Final = (*HARMLESS, *LABELS)
_extra = attrgetter(*_EXTRA)
_NO_EXTRA: Final = (None,) * len(_EXTRA)
_chat_only = attrgetter(*CHAT_ONLY)
_NO_CHAT: Final = (None,) * len(CHAT_ONLY)
_completions_only = attrgetter(*COMPLETIONS_ONLY)
_NO_COMPLETIONS: Final = (None,) * len(COMPLETIONS_ONLY)


def batch_item(line: _LineFields, table: ParamsTable, vocab_size: int, labels: Counter[str]) -> Item:
    """The item of a batch line; raise `InvalidInput` naming the field that is wrong or cannot be honoured.

    `labels` counts the fields that were accepted without an effect.
    """
    if refused := check_address(line.method, line.url):
        raise refused
    body = line.body
    if _extra(body) != _NO_EXTRA:
        _check_extra(body, labels)
    if line.url == CHAT_URL:
        return _chat(line, body, table)
    return _completion(line, body, table, vocab_size)


def check_address(method: object, url: object) -> InvalidInput | None:
    """The error of a line that is for no endpoint of ours. What is no text is left to the typed decode to name."""
    if isinstance(method, str) and method != "POST":
        return wrong("method", f"must be POST, got {shown(method)}")
    if isinstance(url, str) and url not in (CHAT_URL, COMPLETIONS_URL):
        return wrong("url", f"{shown(url)} is not served: use {CHAT_URL} or {COMPLETIONS_URL}")
    return None


def explain(error: InvalidInput) -> InvalidInput:
    """Give a field of the table of refused ones its reason instead of a type error."""
    head, _, name = (error.field or "").partition(".")
    if head == "body" and name in REFUSED:
        return wrong(f"body.{name}", f"{name} is refused: {REASONS[name]}")
    return error


def _check_extra(body: BodyFields, labels: Counter[str]) -> None:
    for name, value in zip(_EXTRA, _extra(body), strict=True):
        if value is None:
            continue
        if name in LABELS:
            labels[f"body.{name}"] += 1
        elif not any(value == ok and type(value) is type(ok) for ok in _allowed(name)):
            raise wrong(f"body.{name}", f"{name} = {shown(value)} is refused: {REASONS[name]}")


def _allowed(name: str) -> tuple[Any, ...]:
    # `1.0` may be written `1`.
    return (*HARMLESS[name], 1) if name == "length_penalty" else HARMLESS[name]


def _chat(line: _LineFields, body: BodyFields, table: ParamsTable) -> Item:
    if _completions_only(body) != _NO_COMPLETIONS:
        raise _misplaced(body, COMPLETIONS_ONLY, CHAT_URL)
    if body.messages is None:
        raise wrong("body.messages", "missing field 'messages'")
    limit = body.max_tokens
    if body.max_completion_tokens is not None:
        if limit is not None and limit != body.max_completion_tokens:
            raise wrong(
                "body.max_tokens", f"is {limit}, but max_completion_tokens is {body.max_completion_tokens}"
            )
        limit = body.max_completion_tokens
    logprobs: int | None = None
    if body.logprobs is not None and not isinstance(body.logprobs, bool):
        raise wrong("body.logprobs", f"expected a boolean for chat completions, got {shown(body.logprobs)}")
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise wrong("body.top_logprobs", "needs logprobs: true")
    params = _in_body(table, body, limit, logprobs)
    item = chat_item(body.messages, "body.messages", params, line.custom_id, body.model)
    item.template = body.chat_template_kwargs or None
    if body.tools or body.tool_choice is not None:
        check_tools(body.tools, body.tool_choice, "body.")
        if body.tools:
            prompt = cast("ChatPrompt", item.prompt)
            item.prompt = ChatPrompt(messages=prompt.messages, tools=body.tools, tool_choice=body.tool_choice)
            item.prompt_tokens += estimate_tokens(len(msgspec.json.encode(body.tools)))
    return item


def _completion(line: _LineFields, body: BodyFields, table: ParamsTable, vocab_size: int) -> Item:
    if _chat_only(body) != _NO_CHAT:
        raise _misplaced(body, CHAT_ONLY, COMPLETIONS_URL)
    logprobs = body.logprobs
    if isinstance(logprobs, bool):
        raise wrong("body.logprobs", f"expected a number for completions, got {shown(logprobs)}")
    params = _in_body(table, body, body.max_tokens, logprobs)
    prompt = body.prompt
    if prompt is None:
        raise wrong("body.prompt", "missing field 'prompt'")
    where = "body.prompt"
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt, where = prompt[0], "body.prompt[0]"
    if isinstance(prompt, list):
        ids = _ids(prompt, where)
        if vocab_size:
            check_ids(where, ids, vocab_size)
        return Item(TokenPrompt(ids=ids), params, line.custom_id, body.model, len(ids))
    text = str(prompt)
    if not text:
        raise wrong(where, "the prompt is empty")
    return Item(TextPrompt(text=text), params, line.custom_id, body.model, estimate_tokens(text_bytes(text)))


def _ids(prompt: list[Any], where: str) -> list[int]:
    """`prompt` as the token ids of one prompt."""
    if not prompt:
        raise wrong(where, "the prompt is empty")
    if any(not isinstance(part, int) for part in prompt):
        if all(isinstance(part, str | list) for part in prompt):
            raise wrong(
                where, f"several prompts in one line ({len(prompt)}): give each its own line and custom_id"
            )
        raise wrong(where, "mixes token ids with other things")
    for i, value in enumerate(prompt):
        if not 0 <= value < 2**31:
            raise wrong(f"{where}[{i}]", f"token id {shown(value)} is not a token id")
    return cast("list[int]", prompt)


def _in_body(table: ParamsTable, body: BodyFields, limit: int | None, logprobs: int | None) -> Params:
    """The parameters, with the names of fields as they stand in this form of line."""
    structured = constraint_of(body)
    try:
        return table.of(body, limit, logprobs, structured)
    except InvalidInput as e:
        name = e.field or ""
        if name == "max_tokens" and body.max_completion_tokens is not None:
            name = "max_completion_tokens"
        elif name == "logprobs" and body.top_logprobs is not None:
            name = "top_logprobs"
        e.field = f"body.{name}" if name else "body"
        raise


def _misplaced(body: BodyFields, names: tuple[str, ...], url: str) -> InvalidInput:
    name = next(name for name in names if getattr(body, name) is not None)
    return wrong(f"body.{name}", f"{name} is no field of {url}")
