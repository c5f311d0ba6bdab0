"""From the bytes of a line to an item: which form it has, one typed decode, one error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import Raw

from headrace.client.items import Item, PlainLine, plain_item
from headrace.client.openai_batch import BatchLine, batch_item, check_address, explain
from headrace.client.problems import from_msgspec, shown, wrong
from headrace.client.sampling import ParamsTable
from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import FunctionSpec, Row

Form = Literal["lines", "rows"]
"""`lines`: prompts, as plain or OpenAI Batch lines. `rows`: any JSON value, for a function that is no model; the
`custom_id` of an object names it in the results, and stays in the row.
"""
MAX_CUSTOM_ID: Final = 512

_decode_plain = msgspec.json.Decoder(PlainLine).decode
_decode_batch = msgspec.json.Decoder(BatchLine).decode
_decode_any = msgspec.json.Decoder().decode
_BATCH_FIELDS = ("body", "url", "method")
_BAD = (msgspec.MsgspecError, ValueError, RecursionError)


class LineDecoder:
    """Decodes the lines of one job; `labels` counts the accepted fields that have no effect.

    `nothing` is an item with the job's defaults and no content.

    Lines of both forms may stand in one file. The form of the last line is tried first, so that each
    line of a uniform file is decoded once.
    """

    def __init__(
        self, spec: FunctionSpec, *, form: Form = "lines", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.labels: Counter[str] = Counter()
        self._table = ParamsTable(spec, defaults)
        self._vocab = spec.vocab_size
        self.nothing = Item(Row(value=Raw(b"0")), self._table.of(PlainLine(), None, None))
        self._batch = False
        self.decode = self._row if form == "rows" else self._line

    def _line(self, raw: bytes) -> Item:
        """The item in `raw`; raise `InvalidInput` naming the field."""
        try:
            return self._batch_item(raw) if self._batch else self._plain_item(raw)
        except _BAD as e:
            first = e
        other = not self._batch
        try:
            item = self._batch_item(raw) if other else self._plain_item(raw)
        except _BAD as e:
            plain, batch = (e, first) if self._batch else (first, e)
            raise _why(raw, plain, batch) from None
        self._batch = other
        return item

    def _plain_item(self, raw: bytes) -> Item:
        return plain_item(_decode_plain(raw), self._table, self._vocab)

    def _batch_item(self, raw: bytes) -> Item:
        return batch_item(_decode_batch(raw), self._table, self._vocab, self.labels)

    def _row(self, raw: bytes) -> Item:
        try:
            value: Any = _decode_any(raw)
        except _BAD as e:
            raise from_msgspec(e, raw) from None
        named: Any = cast("dict[str, Any]", value).get("custom_id") if isinstance(value, dict) else None
        # A row is its function's business: what no custom id can be is a field like any other.
        custom_id = named if isinstance(named, str) and 0 < len(named) <= MAX_CUSTOM_ID else None
        return Item(Row(value=Raw(raw.strip())), self.nothing.params, custom_id)


def _why(raw: bytes, plain: Exception, batch: Exception) -> InvalidInput:
    """The error of a line that has neither form, as whoever wrote it sees it: is it JSON, whose form was meant, is it
    for an endpoint that there is, and only then which field is wrong.
    """
    try:
        value: Any = _decode_any(raw)
    except _BAD as e:
        return from_msgspec(e, raw)
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else shown(value)
        hint = "; a file with one array is no JSONL" if isinstance(value, list) else ""
        return wrong("", f"a line must be a JSON object, got {kind}{hint}")
    fields = cast("dict[str, Any]", value)
    if not any(name in fields for name in _BATCH_FIELDS):
        return from_msgspec(plain, raw)
    return check_address(fields.get("method"), fields.get("url")) or explain(from_msgspec(batch, raw))


__all__ = ["Form", "InvalidInput", "LineDecoder"]
