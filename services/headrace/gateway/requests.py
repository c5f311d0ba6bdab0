"""A request of `hr.api.submit`: its envelope taken off, its items as the lines that the client's submit reads.

One item stands in the request itself, beside the envelope's fields; several stand in `items`. What a line
may say is checked in one place, the client; here are only the envelope and the bounds.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw, Struct

from headrace.client.jobs import new_job_name
from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import Lane, check_token

MAX_ITEMS: Final = 1_000
"""Items of one request; a request is bounded by the broker's max_payload as well."""

_LINE_ONLY: Final = ("prompt", "messages", "prompt_token_ids", "row")


class Envelope(Struct, frozen=True, kw_only=True):
    """What a request says beside its items; the names are not checked yet."""

    function: str = "generate"
    job: str | None = None
    lane: Lane = Lane.NORMAL
    tenant: str | None = None
    deadline: str | float | None = None
    max_failed: str | float | None = None
    items: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_ITEMS)] | None = None


class Submission(Struct, frozen=True, kw_only=True):
    """A request that is well formed as far as the envelope goes: `lines` are its items, one JSON value each."""

    function: str
    job: str
    lane: Lane
    tenant: str
    lines: list[bytes]
    deadline: str | float | None
    max_failed: str | float | None
    rows: bool
    single: bool


def read_request(data: bytes, tenant: str) -> Submission:
    """Take a request apart; raise `InvalidInput` naming the field. `tenant` is who it is for if it says nothing."""
    try:
        data.decode()  # what stays Raw is taken as it is, unlike decoded text
        fields = msgspec.json.decode(data, type=dict[str, Raw])
        envelope = msgspec.json.decode(data, type=Envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise _wrong(e) from None
    rest = {name: value for name, value in fields.items() if name not in Envelope.__struct_fields__}
    if envelope.items is None:
        if not rest:
            msg = f"nothing to do: give one of {', '.join(_LINE_ONLY)}, or items"
            raise InvalidInput(msg, field="prompt", code="missing_field")
        items = [rest]
    else:
        if rest:
            name = next(iter(rest))[:80]
            msg = f"{name!r} stands beside items: each item says it for itself"
            raise InvalidInput(msg, field=name, code="unknown_field")
        items = [_fields(raw, at) for at, raw in enumerate(envelope.items)]
    rows = [_is_row(item, at, single=envelope.items is None) for at, item in enumerate(items)]
    if any(rows) != all(rows):
        msg = f"items mix rows and prompts: item {rows.index(not rows[0])} is of the other kind"
        raise InvalidInput(msg, field="items", code="mixed_items")
    return Submission(
        function=check_token("function", envelope.function),
        job=new_job_name() if envelope.job is None else check_token("job", envelope.job),
        lane=envelope.lane,
        tenant=check_token("tenant", tenant if envelope.tenant is None else envelope.tenant),
        # Sorted, so that the order of an item's fields makes no other job of the same request.
        lines=[
            bytes(item["row"]) if rows[0] else msgspec.json.encode(item, order="sorted") for item in items
        ],
        deadline=envelope.deadline,
        max_failed=envelope.max_failed,
        rows=rows[0],
        single=envelope.items is None,
    )


def _is_row(item: dict[str, Raw], at: int, *, single: bool) -> bool:
    if "row" not in item:
        return False
    if len(item) > 1:
        other = next(name for name in item if name != "row")[:80]
        where = other if single else f"items[{at}].{other}"
        msg = f"{other!r} stands beside row: a row goes to its function as it is, with nothing else"
        raise InvalidInput(msg, field=where, code="unknown_field")
    return True


def _fields(raw: Raw, at: int) -> dict[str, Raw]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Raw])
    except (msgspec.MsgspecError, ValueError) as e:
        raise _wrong(e, f"items[{at}]") from None


def _wrong(error: Exception, where: str = "") -> InvalidInput:
    """What msgspec found, with the place named as the caller wrote it, and without the payload."""
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
        return InvalidInput("the request is not UTF-8", field=where or None, code="invalid_json")
    text, _, path = str(error)[:300].partition(" - at `$")
    field = (where + path.rstrip("`")).lstrip(".") or None
    code = "invalid_field" if isinstance(error, msgspec.ValidationError) else "invalid_json"
    return InvalidInput(f"{field or 'the request'}: {text}", field=field, code=code)
