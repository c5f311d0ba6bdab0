"""`Generation` as vLLM's SamplingParams, every field of it, and vLLM's refusals as errors of the item."""

from __future__ import annotations

from typing import Any, Final

from headrace.contracts.generation import Generation, StructuredOutput
from headrace.inference_worker.engines.protocol import ItemFailed
from headrace.inference_worker.engines.vllm_args import vllm

# The same name, meaning and form in both.
SAME: Final = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
)
# Honoured elsewhere: the first two below, the prompt's cut by the tokenizer, the rest by the request.
ELSEWHERE: Final = ("max_tokens", "structured_outputs", "truncate_prompt_tokens", "priority", "lora")


def sampling_params(params: Generation, max_tokens: int, *, defaults: dict[str, Any]) -> Any:
    """SamplingParams for an item. `defaults`: the model's own, for fields that the task leaves open.

    Raise `ItemFailed('invalid_parameter')` for what vLLM refuses.
    """
    values = {name: value for name, value in defaults.items() if name in SAME}
    for name in SAME:
        value = getattr(params, name)
        # A default that is a number and not None (penalties of 0) gives way to the model's own as None does.
        if value is not None and not (name in values and value == getattr(_OPEN, name)):
            values[name] = value
    values["max_tokens"] = max_tokens
    values["output_kind"] = vllm("vllm.sampling_params", "RequestOutputKind").FINAL_ONLY
    # Text is made from the ids after the item has ended, outside the engine's loop. The exceptions need it inside:
    # stop strings are looked for in the text, and the tokens of log probabilities are named by it.
    values["detokenize"] = (
        bool(params.stop) or params.logprobs is not None or params.prompt_logprobs is not None
    )
    try:
        if params.structured_outputs is not None:
            values["structured_outputs"] = _structured(params.structured_outputs)
        return vllm("vllm.sampling_params", "SamplingParams")(**values)
    except (ValueError, TypeError) as e:
        raise refusal(e) from e


def refusal(error: Exception) -> ItemFailed:
    """A refusal by vLLM as an error of that item: the parameter that it names, or the one its text tells of."""
    message = str(error).strip() or repr(error)
    field: str | None = getattr(error, "parameter", None)
    lower = message.lower()
    if "vocab" in lower and field is None:
        return ItemFailed("invalid_token", message, field="prompt_token_ids")
    if "maximum model length" in lower or "longer than" in lower:
        return ItemFailed("too_long", message, field="prompt")
    if field is None and any(word in lower for word in ("grammar", "regex", "json", "schema", "structured")):
        field = "structured_outputs"
    return ItemFailed("invalid_parameter", message, field=field)


def _structured(s: StructuredOutput) -> Any:
    return vllm("vllm.sampling_params", "StructuredOutputsParams")(
        json=s.json,
        regex=s.regex,
        choice=s.choice,
        grammar=s.grammar,
        # vLLM takes True or nothing.
        json_object=True if s.json_object else None,
    )


_OPEN: Final = Generation()
