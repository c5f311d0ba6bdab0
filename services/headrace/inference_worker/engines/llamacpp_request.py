"""What llama.cpp is asked: `Generation` as its request, and what it cannot honour.

Its request is OpenAI's with fields of its own:
https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from __future__ import annotations

import zlib
from typing import Any, Final, cast

import msgspec

from headrace.contracts.messages import ChatPrompt, TextPrompt, TokenPrompt
from headrace.inference_worker.engines.checks import ParameterTable, flat_messages, unsupported
from headrace.inference_worker.engines.protocol import ItemFailed, Work

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
