"""What llama.cpp is asked and what it answers: `Generation` to its request, its stream to choices.

Its request is OpenAI's with fields of its own:
https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

import zlib
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import Struct

from headrace.contracts.messages import ChatPrompt, Choice, TextPrompt, TokenPrompt, Usage
from headrace.inference_worker.engines.checks import ParameterTable, flat_messages, unsupported
from headrace.inference_worker.engines.llamacpp_errors import failure
from headrace.inference_worker.engines.logprobs import TokenLogprob, openai_form
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed, Output, Work

ENGINE: Final = "llamacpp"

# Generation field -> field of the request. What is not here (and not handled below) is refused by name.
DIRECT: Final = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
}
# Honoured in a form of their own by `_specials`.
SPECIAL: Final = ("max_tokens", "seed", "logprobs", "logit_bias", "structured_outputs")
TABLE: Final = ParameterTable(ENGINE, (*DIRECT, *SPECIAL))

# Any JSON object, by RFC 8259's grammar; blanks are bounded, since a small model may emit them for ever.
JSON_OBJECT: Final = r"""
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( pair ( ws "," ws pair )* )? ws "}"
pair   ::= string ws ":" ws value
array  ::= "[" ws ( value ( ws "," ws value )* )? ws "]"
string ::= "\"" ( [^"\\\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) )* "\""
number ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]{1,16} )? ( [eE] [-+]? [0-9]{1,3} )?
ws     ::= [ \t\n]{0,8}
"""

_PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_RANDOM_SEED: Final = 0xFFFFFFFF


def check_parameters(work: Work, slots: int) -> None:
    """Refuse by name what llama.cpp cannot do, before it is asked."""
    params = work.params
    TABLE.check(params)
    if params.n > slots:
        raise ItemFailed("invalid_parameter", f"n is {params.n} and the engine has {slots} slots", field="n")
    s = params.structured_outputs
    if s is None:
        return
    if s.regex is not None:
        why = "llama.cpp takes json, json_object, choice or grammar (GBNF)"
        raise unsupported(ENGINE, "structured_outputs.regex", why)
    if s.json is not None and not isinstance(work.prompt, ChatPrompt):
        # Outside a chat it hands a schema to another compiler, and goes on unconstrained if that one fails.
        why = "llama.cpp checks a schema for chats only: send messages"
        raise unsupported(ENGINE, "structured_outputs.json", why)
    if s.grammar is not None and s.grammar.lstrip().startswith("%"):
        # As above: a faulty one would be dropped in silence.
        why = "use GBNF, not llguidance"
        raise unsupported(ENGINE, "structured_outputs.grammar", why)


def json_schema(work: Work) -> dict[str, Any] | None:
    """The schema that the item's output must follow, if it has one."""
    s = work.params.structured_outputs
    if s is None or s.json is None:
        return None
    schema: Any = s.json
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as e:
            raise _bad_schema(f"is no JSON: {e}") from None
    if not isinstance(schema, dict):
        raise _bad_schema("is no JSON object")
    return cast("dict[str, Any]", schema)


def _bad_schema(why: str) -> ItemFailed:
    field = "structured_outputs.json"
    return ItemFailed("invalid_parameter", f"{field} {why}", field=field)


def build_request(work: Work, *, seed: int, cache_prompt: bool) -> dict[str, Any]:
    """The request for a checked item, streamed, with its usage at the end."""
    request: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": work.max_tokens,
        "cache_prompt": cache_prompt,
    }
    prompt = work.prompt
    if isinstance(prompt, ChatPrompt):
        request["messages"] = flat_messages(prompt)
        # What a model thinks aloud stays in its text: there is no field for it in a choice.
        request["reasoning_format"] = "none"
        if prompt.tools:
            request["tools"] = prompt.tools
            request["tool_choice"] = prompt.tool_choice or "auto"
    elif isinstance(prompt, TokenPrompt):
        request["prompt"] = prompt.ids
    elif isinstance(prompt, TextPrompt):
        request["prompt"] = prompt.text
    params = work.params
    for field, name in DIRECT.items():
        value = getattr(params, field)
        if value is not None:
            request[name] = value
    _specials(request, work, seed)
    return request


def _specials(request: dict[str, Any], work: Work, seed: int) -> None:
    params = work.params
    # Without a seed of its own an item draws one from the engine's and its id: equal prompts differ, runs repeat.
    drawn = params.seed if params.seed is not None else zlib.crc32(f"{seed}/{work.id}".encode())
    request["seed"] = drawn % _RANDOM_SEED
    if any(getattr(params, name) not in (None, 0.0) for name in _PENALTIES):
        # Its default looks back 64 tokens only; -1 is the whole context, as vLLM does.
        request["repeat_last_n"] = -1
    if params.logit_bias:
        request["logit_bias"] = [[token, bias] for token, bias in params.logit_bias.items()]
    if params.logprobs is not None:
        # 0 alternatives would switch them off altogether; what is too many is cut from the answer.
        wanted = max(1, params.logprobs)
        if isinstance(work.prompt, ChatPrompt):
            request["logprobs"], request["top_logprobs"] = True, wanted
        else:
            request["logprobs"] = wanted
    s = params.structured_outputs
    if s is None:
        return
    schema = json_schema(work)
    if schema is not None:
        request["json_schema"] = schema
    elif s.choice is not None:
        request["grammar"] = "root ::= " + " | ".join(_literal(one) for one in s.choice)
    else:
        request["grammar"] = s.grammar if s.grammar is not None else JSON_OBJECT


def _literal(text: str) -> str:
    """A GBNF string: JSON's escapes of quote, backslash and control characters are understood by it."""
    return msgspec.json.encode(text).decode()


# --- its answer -------------------------------------------------------------------------------------


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
