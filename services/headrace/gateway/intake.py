"""From a request of `hr.api.submit` to a stored job: the client's own submit, over lines in memory.

So the front door checks what `headrace submit` checks, stores as it stores, and may be asked again as it may:
the same job with the same body gets the same receipt, with another body it is a conflict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from headrace.client.inputs import Hasher, Input
from headrace.client.lines import Block
from headrace.client.problems import InvalidLines, LineError
from headrace.client.submit import Progress, SubmitOptions
from headrace.client.submit import Submission as Run
from headrace.contracts.api import SubmitReply
from headrace.contracts.codec import TRACEPARENT
from headrace.contracts.errors import HeadraceError, InvalidInput, Refused, Unavailable
from headrace.gateway.requests import Submission
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import get_function

ANSWER_WITHIN_S: Final = 4.0
"""`nats request` waits for five seconds: an answer later than this would reach nobody."""
QUEUE_FULL: Final = "the queue is full"
"""What the client's `Progress.waiting` says then."""
_SHOWN: Final = 5
"""Wrong items that an error names one by one."""


class MemoryLines:
    """The lines of a request as the two passes of a submit read them."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def blocks(self, digest: Hasher | None = None) -> Iterator[Block]:
        """All lines as one block."""
        if digest is not None:
            for line in self._lines:
                # With its length, since a line here may hold line breaks of its own.
                digest.update(b"%d:%b" % (len(line), line))
        yield Block(range(1, len(self._lines) + 1), self._lines)

    def position(self) -> int:
        """Nothing is read from a file."""
        return 0


class MemoryInput(Input):
    """An input without a file behind it: nothing to spool, to change, or to remove."""

    def __init__(self, lines: list[bytes], name: str) -> None:
        self.lines = MemoryLines(lines)
        self.name = name
        self.total_bytes = sum(map(len, lines))

    def check_unchanged(self) -> None:
        """Memory does not change."""

    def close(self) -> None:
        """There is nothing to remove."""


async def store(mesh: Mesh, request: Submission, headers: Mapping[str, str]) -> SubmitReply:
    """Store the items of `request` and return the receipt.

    Raise `InvalidInput` naming the item and field (nothing is stored then), `NotFound` for an unknown function,
    `Conflict` for a job of another body, `Refused` if the queue stays full, and `Unavailable` if not all is confirmed
    as stored in time. After the last two asking again under the same job is safe, and the error says which that is.
    """
    spec = await get_function(mesh, request.function)
    options = SubmitOptions(
        function=request.function,
        lane=request.lane,
        form="rows" if request.rows else "lines",
        tokenise="worker",  # a tokenizer would be loaded for each request
        patience_s=ANSWER_WITHIN_S,
        tenant=request.tenant,
        traceparent=headers.get(TRACEPARENT),
        deadline=request.deadline,
        max_failed=request.max_failed,
    )
    lines = MemoryInput(request.lines, mesh.subjects.api("submit"))
    last: list[Progress] = []
    run = Run(
        mesh, lines, spec, None, job=request.job, lane=request.lane, options=options, report=last.append
    )
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            receipt = await run.run()
    except InvalidLines as e:
        raise _wrong_items(e.errors, e.total, single=request.single) from None
    except TimeoutError:
        raise _not_in_time(request, last[-1] if last else None) from None
    return SubmitReply(
        job=receipt.job,
        submitted=receipt.submitted,
        resumed_from=receipt.resumed_from,
        trace_id=receipt.trace_id,
    )


def _not_in_time(request: Submission, last: Progress | None) -> HeadraceError:
    """What is known when the time is over: how much is stored, and what it waited for."""
    stored, waiting = (last.stored, last.waiting) if last else (0, "")
    msg = (
        f"job {request.job}: {stored} of {len(request.lines)} items are confirmed as stored after "
        f"{ANSWER_WITHIN_S:g} s{': ' if waiting else ''}{waiting}. "
        f'Ask again with "job": "{request.job}" and the same body to go on from there: nothing is stored twice'
    )
    return Refused(msg, code="queue_full") if waiting == QUEUE_FULL else Unavailable(msg, code="timeout")


def _wrong_items(errors: list[LineError], total: int, *, single: bool) -> InvalidInput:
    """The errors of lines as errors of items, by the place that the caller gave them."""
    named = [(_place(e, single=single), e.error) for e in errors[:_SHOWN]]
    said = "; ".join(f"{place or 'the request'}: {error}" for place, error in named)
    more = f"; and {total - len(named)} more" if total > len(named) else ""
    return InvalidInput(f"nothing was stored: {said}{more}", field=named[0][0] or None, code="invalid_item")


def _place(error: LineError, *, single: bool) -> str:
    return error.field if single else f"items[{error.line - 1}]{'.' if error.field else ''}{error.field}"
