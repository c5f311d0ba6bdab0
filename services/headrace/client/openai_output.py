"""Outcomes as lines of an OpenAI Batch output file.

An item that is `ok` has a `response` whose body is what the endpoint would have answered; any other has an `error`
and no response.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.contracts.messages import Choice, Result


def openai_line(result: Result) -> dict[str, Any]:
    """The output line of one outcome. Without a custom id of its own it is called `index-<n>`."""
    name = f"{result.job}-{result.index}"
    ok = result.status == "ok"
    return {
        "id": f"batch_req_{name}",
        "custom_id": result.custom_id or f"index-{result.index}",
        "response": {"status_code": 200, "request_id": name, "body": _body(result)} if ok else None,
        "error": None if ok else _error(result),
    }


def _body(result: Result) -> Any:
    if not isinstance(result.value, msgspec.UnsetType):
        return result.value
    usage = result.usage
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    make = _chat_choice if result.chat else _text_choice
    return {
        "id": f"{'chatcmpl' if result.chat else 'cmpl'}-{result.job}-{result.index}",
        "object": "chat.completion" if result.chat else "text_completion",
        "created": result.timings.finished_us // 1_000_000,
        "model": result.model or "",
        "choices": [make(n, choice) for n, choice in enumerate(result.choices)],
        "usage": counts,
    }


def _chat_choice(n: int, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = choice.tool_calls
    return {
        "index": n,
        "message": message,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
    }


def _text_choice(n: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": n,
        "text": choice.text,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
    }


def _error(result: Result) -> dict[str, Any]:
    found = result.error
    error: dict[str, Any] = {
        "code": found.type if found else result.status,
        "message": (found and found.message) or f"the item is {result.status}",
    }
    if found is not None and found.field:
        error["param"] = found.field
    return error
