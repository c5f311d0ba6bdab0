"""How a model is asked: every sampling parameter that travels with a task, with its bounds.

The names and meanings are those of vLLM's `SamplingParams`
(https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html). An engine that cannot honour a field
says so for that item; nothing is ignored in silence.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.contracts.names import TokenId

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class StructuredOutput(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Constrain the output; exactly one field is set. Sizes are bounded since grammars are compiled."""

    json: dict[str, Any] | Annotated[str, Meta(max_length=65_536)] | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=8_192)] | None = None
    choice: (
        Annotated[list[Annotated[str, Meta(max_length=4_096)]], Meta(min_length=1, max_length=1_024)] | None
    ) = None
    grammar: Annotated[str, Meta(min_length=1, max_length=65_536)] | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        chosen = [n for n in ("json", "regex", "choice", "grammar") if getattr(self, n) is not None]
        chosen += ["json_object"] if self.json_object else []
        if len(chosen) != 1:
            got = ", ".join(chosen) or "none"
            msg = f"structured_outputs takes exactly one of json, regex, choice, grammar, json_object; got {got}"
            raise ValueError(msg)


class Generation(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of one task. `None` means the engine's own default.

    `max_tokens` bounds completion tokens; None lets the function's `default_max_tokens` apply.
    `priority`: lower runs first inside an engine that schedules by it. `lora` names an adapter that
    the worker was configured with.
    """

    n: Annotated[int, Meta(ge=1, le=64)] = 1
    max_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1_048_576)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Unit | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=100)] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1_024)] | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=65_536)] | None = None
    structured_outputs: StructuredOutput | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    lora: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            msg = f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}"
            raise ValueError(msg)
        if self.n > 1 and self.temperature == 0.0:
            msg = f"n = {self.n} with temperature 0 gives {self.n} equal choices: use n = 1, or a temperature above 0"
            raise ValueError(msg)


DEFAULT_GENERATION = Generation()

__all__ = ["DEFAULT_GENERATION", "Generation", "StructuredOutput"]
