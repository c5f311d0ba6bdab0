"""Tool calls out of a model's text, by the parser of vLLM that fits the model (its `--tool-call-parser`)."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import ChatPrompt, Choice
from headrace.inference_worker.engines.checks import unsupported
from headrace.inference_worker.engines.protocol import ItemFailed
from headrace.inference_worker.engines.vllm_args import vllm


class Tools:
    """Reads tool calls with one named parser; without a name, tools are refused."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._parser: Any = None
        self._tokenizer = tokenizer
        if not name:
            return
        try:
            self._parser = vllm("vllm.tool_parsers", "ToolParserManager").get_tool_parser(name)
        except KeyError as e:
            field = "vllm.tool_call_parser"
            raise InvalidInput(f"setting {field}: vLLM has no parser {name!r}", field=field) from e

    def check(self, prompt: ChatPrompt) -> None:
        """Refuse tools that nothing would read, and choices that nothing would enforce."""
        if not prompt.tools:
            return
        if self._parser is None:
            why = "set vllm.tool_call_parser to the parser of this model"
            raise unsupported("vllm", "tools", why)
        if prompt.tool_choice not in (None, "auto", "none"):
            raise unsupported("vllm", "tool_choice", "only auto and none are enforced")

    def read(self, prompt: ChatPrompt, choice: Choice) -> Choice:
        """The choice with its tool calls taken out of its text, if it made any."""
        if self._parser is None or not prompt.tools or prompt.tool_choice == "none":
            return choice
        request = vllm(
            "vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"
        ).model_validate({"messages": prompt.messages, "tools": prompt.tools, "tool_choice": "auto"})
        try:
            found = self._parser(self._tokenizer, request.tools).extract_tool_calls(choice.text, request)
        except (ValueError, TypeError, KeyError) as e:
            raise ItemFailed("engine_error", f"the tool call parser failed: {e}") from e
        if not found.tools_called:
            return choice
        calls = [call.model_dump(exclude_none=True) for call in found.tool_calls]
        return structs.replace(choice, text=found.content or "", tool_calls=calls, finish_reason="tool_calls")
