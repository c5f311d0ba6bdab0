"""What llama.cpp answers: its stream of events, gathered into choices."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from headrace.contracts.messages import ChatPrompt, Choice, Usage
from headrace.inference_worker.engines.llamacpp_errors import failure
from headrace.inference_worker.engines.logprobs import TokenLogprob, openai_form
from headrace.inference_worker.engines.protocol import EngineDied, Output, Work


class _Top(Struct, frozen=True):
    token: str
    logprob: float


class _Logprob(Struct, frozen=True):
    token: str
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(Struct, frozen=True):
    content: list[_Logprob] | None = None


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = []


class _ChunkChoice(Struct, frozen=True):
    index: int = 0
    text: str = ""
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = _Details()


class _Error(Struct, frozen=True):
    message: str = ""
    type: str = ""
    code: int = 500


class Chunk(Struct, frozen=True):
    """One event of its stream."""

    choices: list[_ChunkChoice] = []
    usage: _Usage | None = None
    error: _Error | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


class _Part:
    """One choice as it grows."""

    __slots__ = ("calls", "finish", "logprobs", "pieces")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.logprobs: list[TokenLogprob] = []
        self.finish: str | None = None


class Answer:
    """Gathers the stream of one item; `tokens` counts its events, which are about one for each token."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._parts = [_Part() for _ in range(work.params.n)]
        self._usages: list[_Usage] = []
        self.tokens = 0
        self.error: _Error | None = None

    def add(self, chunk: Chunk) -> int:
        """Take one event in; return how many tokens it brought, as far as can be told."""
        if chunk.error is not None:
            self.error = chunk.error
            return 0
        if chunk.usage is not None:
            self._usages.append(chunk.usage)
        for choice in chunk.choices:
            self._add_choice(choice)
        brought = sum(1 for c in chunk.choices if c.finish_reason is None)
        self.tokens += brought
        return brought

    def output(self) -> Output:
        """The finished item. Raise `ItemFailed` if llama.cpp refused it, `EngineDied` if it is going down."""
        if self.error is not None:
            raise failure(self.error.message, self.error.type, self.error.code)
        if any(part.finish is None for part in self._parts):
            raise EngineDied("llama.cpp ended an answer in the middle")
        usage = Usage(
            prompt_tokens=max((u.prompt_tokens for u in self._usages), default=self._work.prompt_tokens),
            completion_tokens=sum(u.completion_tokens for u in self._usages),
            cached_tokens=max((u.prompt_tokens_details.cached_tokens for u in self._usages), default=0),
        )
        return Output(choices=[self._choice(part) for part in self._parts], usage=usage)

    def _add_choice(self, choice: _ChunkChoice) -> None:
        part = self._parts[choice.index]
        if choice.finish_reason is not None:
            part.finish = choice.finish_reason
        delta = choice.delta
        text = choice.text if delta is None else (delta.reasoning_content or "") + (delta.content or "")
        if text:
            part.pieces.append(text)
        for call in delta.tool_calls if delta is not None else []:
            _merge_call(part.calls, call)
        if choice.logprobs is not None and choice.logprobs.content:
            limit = self._work.params.logprobs or 0
            part.logprobs.extend(
                TokenLogprob(e.token, e.logprob, [(t.token, t.logprob) for t in e.top_logprobs[:limit]])
                for e in choice.logprobs.content
            )

    def _choice(self, part: _Part) -> Choice:
        work = self._work
        chat = work.chat or isinstance(work.prompt, ChatPrompt)
        asked = work.params.logprobs is not None
        finish = cast("Literal['stop', 'length', 'tool_calls']", part.finish)
        return Choice(
            text="".join(part.pieces),
            finish_reason=finish if finish in ("length", "tool_calls") else "stop",
            tool_calls=[part.calls[i] for i in sorted(part.calls)] or None,
            logprobs=openai_form(part.logprobs, chat=chat) if asked else None,
        )


def _merge_call(calls: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """Tool calls come in pieces, keyed by index; their arguments are to be joined."""
    call = calls.setdefault(int(piece.get("index", 0)), {"type": "function", "function": {"arguments": ""}})
    function: dict[str, Any] = piece.get("function") or {}
    if "id" in piece:
        call["id"] = piece["id"]
    if function.get("name"):
        call["function"]["name"] = function["name"]
    call["function"]["arguments"] += function.get("arguments") or ""
