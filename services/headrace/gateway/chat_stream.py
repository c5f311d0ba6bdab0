"""A chat completion that comes as server-sent events, put together again as if it had come whole."""

from __future__ import annotations

from typing import Any

from headrace.contracts.ledger import CallUsage
from headrace.gateway.plain import count, fields, items, json_or_none, text

_DATA = "data:"
_DONE = "[DONE]"


class ChatStream:
    """Takes the lines of a stream. `chunks` counts those that carried something of an answer."""

    def __init__(self, input_tokens: int) -> None:
        self.chunks = 0
        self.done = False
        self.finish_reason: str | None = None
        self._input_tokens = input_tokens
        self._usage: CallUsage | None = None
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def take(self, line: str) -> None:
        """One line; what is no event of a completion is passed over."""
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            self.done = True
            return
        event = fields(json_or_none(data))
        self._usage = usage_of(event) or self._usage
        self._head = {k: event[k] for k in ("id", "model", "created") if k in event} or self._head
        for choice in items(event.get("choices")):
            self._take_choice(fields(choice))

    def _take_choice(self, choice: dict[str, Any]) -> None:
        mine = self._choices.setdefault(
            count(choice.get("index")) or 0, {"content": [], "tool_calls": {}, "finish_reason": None}
        )
        delta = fields(choice.get("delta"))
        said = delta.get("content") or choice.get("text")
        if isinstance(said, str) and said:
            mine["content"].append(said)
            self.chunks += 1
        if calls := items(delta.get("tool_calls")):
            for call in calls:
                _take_tool_call(mine["tool_calls"], fields(call))
            self.chunks += 1
        if (reason := text(choice.get("finish_reason"), 64)) is not None:
            mine["finish_reason"] = self.finish_reason = reason

    def completion(self) -> dict[str, Any]:
        """The completion as far as it came, in OpenAI's form."""
        choices: list[dict[str, Any]] = []
        for index, mine in sorted(self._choices.items()):
            message: dict[str, Any] = {"role": "assistant", "content": "".join(mine["content"])}
            if mine["tool_calls"]:
                message["tool_calls"] = [_whole(call) for _, call in sorted(mine["tool_calls"].items())]
            choices.append({"index": index, "message": message, "finish_reason": mine["finish_reason"]})
        return {**self._head, "object": "chat.completion", "choices": choices}

    def usage(self) -> CallUsage:
        """What the callee said; else the most that was sent and one token for each chunk, marked as estimated."""
        if self._usage is not None:
            return self._usage
        return CallUsage(input_tokens=self._input_tokens, output_tokens=self.chunks, source="estimated")


def _take_tool_call(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    """A piece of a tool call: the first has its id and name, all have some of its arguments."""
    mine = calls.setdefault(count(delta.get("index")) or 0, {"arguments": []})
    function = fields(delta.get("function"))
    for name, value in (("id", delta.get("id")), ("type", delta.get("type")), ("name", function.get("name"))):
        if isinstance(value, str) and value:
            mine.setdefault(name, value)
    if isinstance(function.get("arguments"), str):
        mine["arguments"].append(function["arguments"])


def _whole(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call.get("name", ""), "arguments": "".join(call["arguments"])}
    return {"id": call.get("id", ""), "type": call.get("type", "function"), "function": function}


def usage_of(value: Any) -> CallUsage | None:
    """The usage that an OpenAI-compatible answer states, if it is one."""
    stated = fields(fields(value).get("usage"))
    prompt, completion = count(stated.get("prompt_tokens")), count(stated.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    return CallUsage(
        input_tokens=prompt,
        output_tokens=completion,
        cached_tokens=count(fields(stated.get("prompt_tokens_details")).get("cached_tokens")) or 0,
        reasoning_tokens=count(fields(stated.get("completion_tokens_details")).get("reasoning_tokens")) or 0,
    )
