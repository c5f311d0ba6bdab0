"""One accepted line, whatever its form was, and the plain form of a line."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from headrace.client.conversation import (
    check_messages,
    estimate_chat_tokens,
    estimate_tokens,
    text_bytes,
)
from headrace.client.problems import wrong
from headrace.client.sampling import Params, ParamsTable, Sampling, check_ids
from headrace.contracts.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from headrace.contracts.names import CustomId, TokenId

Model = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]
Messages = Annotated[list[dict[str, Any]], Meta(max_length=4_096)]


_PROMPTS: Final = ("prompt", "messages", "prompt_token_ids")


class Item(Struct):
    """What a line asks for. `prompt_tokens` is an estimate until a tokenizer has counted.

    `chat` asks for an answer in the shape of a chat completion; `template` are extra variables of the chat template,
    `rendered` the conversation as that template's text, where the client renders it.
    """

    prompt: Prompt
    params: Params
    custom_id: str | None = None
    model: str | None = None
    prompt_tokens: int = 0
    chat: bool = False
    template: dict[str, Any] | None = None
    rendered: str | None = None


class PlainLine(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`{"prompt": …}`, `{"messages": […]}` or `{"prompt_token_ids": […]}`, with any field of `Generation`."""

    prompt: Text | None = None
    messages: Messages | None = None
    prompt_token_ids: TokenIds | None = None
    custom_id: CustomId | None = None
    model: Model | None = None
    logprobs: int | None = None


def plain_item(line: PlainLine, table: ParamsTable, vocab_size: int) -> Item:
    """The item of a plain line; raise `InvalidInput` naming the field that is wrong."""
    params = table.of(line, line.max_tokens, line.logprobs, line.structured_outputs)
    text, messages, ids = line.prompt, line.messages, line.prompt_token_ids
    if (text is not None) + (messages is not None) + (ids is not None) != 1:
        present = [name for name in _PROMPTS if getattr(line, name) is not None]
        found = " and ".join(present) or "none"
        raise wrong(
            present[1] if present else "prompt", f"takes exactly one of {', '.join(_PROMPTS)}: got {found}"
        )
    if text is not None:
        tokens = estimate_tokens(text_bytes(text))
        return Item(TextPrompt(text=text), params, line.custom_id, line.model, tokens)
    if messages is not None:
        return chat_item(messages, "messages", params, line.custom_id, line.model)
    ids = ids or []
    if vocab_size:
        check_ids("prompt_token_ids", ids, vocab_size)
    return Item(TokenPrompt(ids=ids), params, line.custom_id, line.model, len(ids))


def chat_item(
    messages: list[dict[str, Any]], where: str, params: Params, custom_id: str | None, model: str | None
) -> Item:
    """The item of a conversation; `where` is the path of `messages` in the line."""
    messages = check_messages(messages, where)
    tokens = estimate_chat_tokens(messages)
    return Item(ChatPrompt(messages=messages), params, custom_id, model, tokens, chat=True)
