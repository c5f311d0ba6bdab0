"""Constraints on the output, in the spellings of OpenAI and vLLM: one of them becomes the contract's own."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from headrace.client.problems import wrong
from headrace.client.sampling import Sampling
from headrace.contracts.generation import StructuredOutput


class JsonSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`json_schema` of a response format. The schema is enforced whether or not `strict` is set."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Constraints(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body that constrain the output, beside vLLM's `structured_outputs`."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


_FORMS: Final = (
    "structured_outputs",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_forms = attrgetter(*_FORMS)
_NO_FORM: Final = (None,) * len(_FORMS)


def constraint_of(body: Constraints) -> StructuredOutput | None:
    """The one constraint that `body` asks for; raise `InvalidInput` for a second one, or one out of bounds."""
    values = _forms(body)
    if values == _NO_FORM:
        return None
    given = [name for name, value in zip(_FORMS, values, strict=True) if value is not None]
    form = body.response_format
    if form is not None and form.type == "text":
        given.remove("response_format")
    if len(given) > 1:
        raise wrong(f"body.{given[1]}", f"constrains the output a second time, after {given[0]}")
    if not given:
        return None
    if given[0] == "structured_outputs":
        return body.structured_outputs
    try:
        if form is not None and given[0] == "response_format":
            return _of_format(form)
        # The bounds of the contract hold for these names too.
        return msgspec.convert({given[0].removeprefix("guided_"): getattr(body, given[0])}, StructuredOutput)
    except msgspec.ValidationError as e:
        raise wrong(f"body.{given[0]}", str(e).split(" - at", 1)[0].replace("`", "")) from None


def _of_format(form: ResponseFormat) -> StructuredOutput:
    if form.type == "json_object":
        return StructuredOutput(json_object=True)
    if form.json_schema is None:
        raise wrong("body.response_format.json_schema", "missing field 'json_schema'")
    return StructuredOutput(json=form.json_schema.schema)
