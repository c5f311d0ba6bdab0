"""Sampling parameters as lines carry them, and the table that makes each distinct set once.

A job's lines mostly share one set, so checking it, building its `Generation` and hashing that is done for
each distinct set and not for each line.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.client.problems import from_msgspec, shown, wrong
from headrace.contracts.codec import fingerprint
from headrace.contracts.errors import InvalidInput
from headrace.contracts.generation import Generation, StructuredOutput
from headrace.contracts.messages import FunctionSpec

_MAX_SETS: Final = 4_096
"""Distinct sets kept; lines with a seed each would otherwise fill the memory."""


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Generation` in a line. `null` is the same as absent; bounds are `Generation`'s own.

    `logprobs` is missing here since its form depends on the kind of line.
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutput | None = None
    priority: int | None = None
    lora: str | None = None


_NORMALISED: Final = ("max_tokens", "logprobs", "stop", "structured_outputs")
"""Fields that the kinds of line spell in several ways: they are passed beside the line."""
_REST: Final = tuple(name for name in Sampling.__struct_fields__ if name not in _NORMALISED)
_NAMES: Final = (*_NORMALISED, *_REST)
_rest = attrgetter(*_REST)


class Params(Struct, frozen=True):
    """One distinct set: `generation` for the task, its fingerprint, and how many new tokens it asks for."""

    generation: Generation
    fingerprint: str
    new_tokens: int


class ParamsTable:
    """Every distinct set of parameters of one job.

    `defaults` apply where a line says nothing. Token ids are checked against the function's vocabulary.
    """

    def __init__(self, spec: FunctionSpec, defaults: Mapping[str, Any] | None = None) -> None:
        self._spec = spec
        self._defaults = {k: v for k, v in (defaults or {}).items() if v is not None}
        self._sets: dict[Any, Params] = {}
        if "stop" in self._defaults:
            self._defaults["stop"] = _stop_list(self._defaults["stop"])
        try:
            self._build({})  # wrong defaults are the caller's error, not that of line 1
        except InvalidInput as e:
            raise wrong(e.field or "", f"default {e.field}: {e}") from None

    def of(
        self,
        line: Sampling,
        max_tokens: int | None,
        logprobs: int | None,
        structured: StructuredOutput | None = None,
    ) -> Params:
        """The set of `line`; raise `InvalidInput` naming the field that is out of bounds."""
        stop = line.stop
        key: Any = (
            max_tokens,
            logprobs,
            tuple(stop) if isinstance(stop, list) else stop,
            structured,
            *_rest(line),
        )
        try:
            found = self._sets.get(key)
        except TypeError:  # a list or an object inside: its JSON is as good a key
            key = msgspec.json.encode(key)
            found = self._sets.get(key)
        if found is None:
            values = (max_tokens, logprobs, _stop_list(stop), structured, *_rest(line))
            given = zip(_NAMES, values, strict=True)
            found = self._build({n: v for n, v in given if v is not None and v != {}})
            if len(self._sets) >= _MAX_SETS:
                self._sets.clear()
            self._sets[key] = found
        return found

    def _build(self, given: dict[str, Any]) -> Params:
        values = {**self._defaults, **given}
        try:
            made = msgspec.convert(values, Generation)
        except msgspec.ValidationError as e:
            raise _of_generation(e, values) from None
        if self._spec.vocab_size:
            self._check_ids(made, self._spec.vocab_size)
        return Params(made, fingerprint(made), made.max_tokens or self._spec.default_max_tokens)

    @staticmethod
    def _check_ids(made: Generation, vocab_size: int) -> None:
        check_ids("stop_token_ids", made.stop_token_ids, vocab_size)
        check_ids("allowed_token_ids", made.allowed_token_ids, vocab_size)
        check_ids("logit_bias", list(made.logit_bias) if made.logit_bias else None, vocab_size)


def check_ids(field: str, ids: list[int] | None, vocab_size: int) -> None:
    """Raise `InvalidInput` naming the first of `ids` that is not in a vocabulary of `vocab_size`."""
    if ids and max(ids) >= vocab_size:
        at = next(i for i, value in enumerate(ids) if value >= vocab_size)
        where = f"{field}[{at}]" if field != "logit_bias" else field
        raise wrong(where, f"token id {shown(ids[at])} is outside the vocabulary of {vocab_size} tokens")


def _stop_list(stop: str | list[str] | None) -> list[str] | None:
    """`stop` in one form; an empty list is none."""
    if isinstance(stop, str):
        return [stop]
    return stop or None


def _of_generation(error: msgspec.ValidationError, values: dict[str, Any]) -> InvalidInput:
    """An error of a set of parameters; rules between fields begin with the name of the field that breaks them."""
    encoded = msgspec.json.encode({k: v for k, v in values.items() if not isinstance(v, dict | Struct)})
    found = from_msgspec(error, encoded)
    first = str(found).split(" ", 1)[0]
    if not found.field and first in Generation.__struct_fields__:
        found.field = first
    return found
