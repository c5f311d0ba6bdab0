"""Conversations in OpenAI's form: checked, and brought into the one shape that chat templates take."""

from __future__ import annotations

from typing import Any, Final, cast

from headrace.client.problems import shown, wrong

_REFUSED: Final = {
    "audio": "audio is not supported: only text goes to the model",
    "function_call": "function_call is deprecated: use tool_calls",
}
_MESSAGE_TOKENS: Final = 6
"""What a chat template adds to each message, about."""


def check_messages(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return `messages` with text parts joined to one string; raise `InvalidInput` naming what no text model takes.

    Parts are joined by line breaks, as vLLM does for templates that print `content` as it is
    (`vllm/entrypoints/chat_utils.py`). Fields that OpenAI does not define pass: the model's own template may use them.
    """
    if not messages:
        raise wrong(where, "messages is empty: a model would answer nonsense")
    joined: list[dict[str, Any]] | None = None
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or not role:
            raise wrong(
                f"{where}[{i}].role", f"expected a role such as system, user or assistant, got {shown(role)}"
            )
        for name, reason in _REFUSED.items():
            if message.get(name) is not None:
                raise wrong(f"{where}[{i}].{name}", reason)
        if type(content) is str:
            continue
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, list):
            raise wrong(f"{where}[{i}].content", f"expected a string or text parts, got {shown(content)}")
        if joined is None:
            joined = list(messages)
        text = _join(cast("list[Any]", content), f"{where}[{i}].content")
        joined[i] = {**message, "content": text}
    return messages if joined is None else joined


def _join(parts: list[Any], where: str) -> str:
    texts: list[str] = []
    for k, part in enumerate(parts):
        if isinstance(part, str):
            texts.append(part)
            continue
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind, text = fields.get("type"), fields.get("text")
        if kind != "text":
            raise wrong(f"{where}[{k}].type", f"only parts of type 'text' go to the model, got {shown(kind)}")
        if not isinstance(text, str):
            raise wrong(f"{where}[{k}].text", f"expected a string, got {shown(text)}")
        texts.append(text)
    return "\n".join(texts)


def check_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, where: str) -> None:
    """Raise `InvalidInput` unless each tool is a function with a name, and `choice` is one that exists."""
    names: list[str] = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise wrong(
                f"{where}tools[{i}].type", f"only type 'function' is supported, got {shown(tool.get('type'))}"
            )
        function = tool.get("function")
        name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise wrong(f"{where}tools[{i}].function.name", f"expected a name, got {shown(name)}")
        names.append(name)
    if choice is None or choice == "none":
        return
    if not names:
        raise wrong(f"{where}tool_choice", "tool_choice is given without tools")
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            raise wrong(
                f"{where}tool_choice", f"expected none, auto, required or a function, got {shown(choice)}"
            )
        return
    function = choice.get("function")
    chosen = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or chosen not in names:
        raise wrong(f"{where}tool_choice", f"names the function {shown(chosen)}, which is not among tools")


def text_bytes(text: str) -> int:
    """Bytes of `text` in UTF-8; costs nothing for ASCII."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def estimate_tokens(size: int) -> int:
    """Tokens of `size` bytes of text, about: 3.5 bytes each, rounded up.

    >>> estimate_tokens(0), estimate_tokens(7), estimate_tokens(8)
    (0, 2, 3)
    """
    return (size * 2 + 6) // 7


def estimate_chat_tokens(messages: list[dict[str, Any]]) -> int:
    """Tokens of a rendered conversation, about."""
    size = sum(text_bytes(m["content"]) for m in messages if type(m.get("content")) is str)
    return estimate_tokens(size) + _MESSAGE_TOKENS * len(messages)
