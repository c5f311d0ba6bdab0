"""Log probabilities in the two forms of OpenAI's API: chat completions, and (legacy) completions."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class TokenLogprob(Struct, frozen=True):
    """One generated token: its text, natural log probability, and the likeliest alternatives, best first."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = []


def chat_form(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`.

    https://platform.openai.com/docs/api-reference/chat/object
    """
    return {
        "content": [
            {**_entry(t.token, t.logprob), "top_logprobs": [_entry(text, value) for text, value in t.top]}
            for t in tokens
        ]
    }


def completion_form(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; offsets are in characters of the text.

    https://platform.openai.com/docs/api-reference/completions/object
    """
    offsets: list[int] = []
    at = 0
    for t in tokens:
        offsets.append(at)
        at += len(t.token)
    return {
        "tokens": [t.token for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [dict(t.top) if t.top else None for t in tokens],
        "text_offset": offsets,
    }


def openai_form(tokens: list[TokenLogprob], *, chat: bool) -> dict[str, Any]:
    """The form of the endpoint that was asked."""
    return chat_form(tokens) if chat else completion_form(tokens)


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
