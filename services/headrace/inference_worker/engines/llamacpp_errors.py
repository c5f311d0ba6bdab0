"""llama.cpp's errors as ours: it tells them by texts, and by few types."""

from __future__ import annotations

from http import HTTPStatus

from headrace.inference_worker.engines.memory import says_out_of_memory
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed, OutOfMemory

CACHE_IS_FULL = "context size has been exceeded"
"""What llama.cpp says when the cells of its cache are used up by all that runs; a prompt that is too long for its slot
has an error of its own.
"""


def failure(
    message: str, kind: str = "invalid_request_error", code: int = HTTPStatus.BAD_REQUEST
) -> Exception:
    """`ItemFailed` for what is the item's own fault, `OutOfMemory` if others leave no room for it, `EngineDied` if the
    server is going down.
    """
    message = message.strip()
    lower = message.lower()
    if code == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineDied(f"llama.cpp is not available: {message}")
    if CACHE_IS_FULL in lower or says_out_of_memory(lower):
        return OutOfMemory(f"llama.cpp: {message}")
    if kind == "exceed_context_size_error" or "context size" in lower:
        return ItemFailed("too_long", message, field="prompt")
    if "invalid token" in lower:
        return ItemFailed("invalid_token", message, field="prompt_token_ids")
    if "grammar" in lower or "json schema" in lower or "json_schema" in lower:
        return ItemFailed("invalid_parameter", message, field="structured_outputs")
    if kind == "invalid_request_error":
        return ItemFailed("invalid_parameter", message)
    return ItemFailed("engine_error", f"llama.cpp: {message or kind or 'no reason given'}")
