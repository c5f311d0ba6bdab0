"""A model's own chat template, rendered as `transformers` renders it.

The environment is that of `transformers.utils.chat_template_utils` (sandboxed, immutable, trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, a plain `tojson`), so a conversation becomes the same text here as
in the engine. Needs the extra `tokenizers` (jinja2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from headrace.client.problems import wrong

if TYPE_CHECKING:
    import jinja2

_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_VARIABLES: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """One compiled template, with the special tokens that it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._template = _environment().from_string(source)
        self._special = dict(special_tokens or {})

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, with the assistant's turn opened.

        Raise `InvalidInput` with what the template says of a conversation that it does not take.
        """
        import jinja2

        known = _VARIABLES.intersection(variables or ())
        if known:
            name = min(known)
            raise wrong(f"chat_template_kwargs.{name}", f"{name} cannot be set")
        try:
            return self._template.render(
                messages=[_with_parsed_calls(m) for m in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._special | dict(variables or {}),
            )
        except jinja2.TemplateError as e:
            raise wrong("messages", f"the model's chat template refuses it: {str(e)[:200]}") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as e:
            raise wrong("messages", f"the model's chat template fails on it: {type(e).__name__}") from None


def load_chat_template(folder: Path, *, tools: bool = False) -> ChatTemplate | None:
    """The template of a tokenizer's folder, or None if it has none.

    `chat_template.jinja` goes before the field of `tokenizer_config.json`, as in `transformers`; of several
    named ones `default` is taken, or `tool_use` for conversations with tools.
    """
    config = _json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source: Any = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {str(entry["name"]): entry["template"] for entry in cast("list[dict[str, Any]]", source)}
        source = (named.get("tool_use") if tools else None) or named.get("default")
    if not isinstance(source, str):
        return None
    special = {name: _content(config.get(name)) for name in _SPECIAL}
    special |= {name: _content(value) for name, value in _json(folder / "special_tokens_map.json").items()
                if name in _SPECIAL and special.get(name) is None}  # fmt: skip
    return ChatTemplate(source, {k: v for k, v in special.items() if v is not None})


def _content(token: Any) -> str | None:
    """A special token, which a configuration gives as a string or as an object."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _with_parsed_calls(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with the arguments of its tool calls as objects: OpenAI sends strings, templates want objects.

    As vLLM does (`vllm/entrypoints/chat_utils.py`).
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed: list[Any] = []
    for call in cast("list[Any]", calls):
        function: Any = call.get("function") if isinstance(call, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        arguments: Any = function.get("arguments") if isinstance(function, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        if isinstance(arguments, str):
            try:
                parsed.append({**call, "function": {**function, "arguments": json.loads(arguments)}})
            except ValueError:
                raise wrong("messages", "the arguments of a tool call are not JSON") from None
        else:
            parsed.append(call)
    return {**message, "tool_calls": parsed}


def _environment() -> jinja2.Environment:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant said, for training; here its body is just printed."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Any) -> nodes.Node:
            """The statements inside, as they are."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any,
        *,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Without the HTML escapes of jinja2's own filter.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)  # noqa: DTZ005  (the template prints the user's own date)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    names: dict[str, Any] = environment.globals  # pyright: ignore[reportAssignmentType]  (typed as jinja2's own ones)
    names |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
