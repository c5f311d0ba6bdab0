"""From the outcomes that a retry chose to the tasks that run again: read in pages, in the order of their index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.completion.retry_rows import Retry
from headrace.completion.store import Connection
from headrace.contracts.codec import SCHEMA_HEADER, TASK, TRACEPARENT
from headrace.contracts.errors import HeadraceError
from headrace.contracts.messages import FunctionSpec, Row, Task
from headrace.contracts.subjects import MAX_SHAPE, Subjects, shape_of
from headrace.mesh.wire import OutMessage, check_size, header_block

BATCH_BYTES: Final = 4 << 20
"""Bytes of the tasks of one page, or one task that is larger."""
_FETCH: Final = 100
_BATCH_HEADERS: Final = 256
"""Room for the headers that an atomic batch adds to each message."""

_AT = """
SELECT "index" FROM retry_items WHERE job = $job AND generation = $generation
ORDER BY "index" LIMIT 1 OFFSET $stored - 1"""

_INDICES = """
SELECT "index" FROM retry_items WHERE job = $job AND generation = $generation AND "index" > $after
ORDER BY "index" LIMIT $limit"""

_TASKS = """
SELECT o."index", o.function, o.task, o.shape, o.trace_id
FROM outcomes AS o JOIN retry_items AS r
    ON r.job = o.job AND r."index" = o."index" AND r.generation = $generation
WHERE o.job = $job AND o."index" BETWEEN $first AND $last AND o.generation < $generation AND o.task IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY o."index" ORDER BY o.generation DESC) = 1 ORDER BY o."index" """

_task = msgspec.json.Decoder(Task)


class Again(Struct, frozen=True):
    """One item that runs again. `task` is the JSON that its last outcome carried; None if that is gone."""

    index: int
    function: str = ""
    task: str | None = None
    shape: int | None = None
    trace_id: str | None = None


class Unstorable(HeadraceError):
    """An item whose task cannot be made: it gets an outcome that says so, since nothing else ever will."""


def index_at(connection: Connection, retry: Retry, stored: int) -> int:
    """The index of the last of the first `stored` items of the retry; -1 of none."""
    values = {"job": retry.job, "generation": retry.generation, "stored": stored}
    row = connection.execute(_AT, values).fetchone() if stored else None
    return -1 if row is None else int(row[0])


def page(connection: Connection, retry: Retry, after: int, limit: int) -> list[Again]:
    """The items of the retry with an index above `after`: at most `limit`, and about `BATCH_BYTES`."""
    key = {"job": retry.job, "generation": retry.generation}
    indices = [i for (i,) in connection.execute(_INDICES, key | {"after": after, "limit": limit}).fetchall()]
    if not indices:
        return []
    found: dict[int, Again] = {}
    size, upto = 0, indices[-1]
    cursor = connection.execute(_TASKS, key | {"first": indices[0], "last": upto})
    while size < BATCH_BYTES and (rows := cursor.fetchmany(_FETCH)):
        for row in rows:
            size += len(row[2])
            if size > BATCH_BYTES and found:
                break
            found[row[0]] = Again(*row)
    if size >= BATCH_BYTES:
        upto = max(found)
    return [found.get(i) or Again(i) for i in indices if i <= upto]


class TaskMaker:
    """Makes the messages of one retry."""

    def __init__(
        self, subjects: Subjects, retry: Retry, specs: dict[str, FunctionSpec], max_payload: int
    ) -> None:
        self._subjects = subjects
        self._retry = retry
        self._specs = specs
        self._max_payload = max_payload
        self._schema = header_block({SCHEMA_HEADER: TASK.name})

    def message(self, item: Again, now_us: int) -> OutMessage:
        """The task of `item` as the generation of this retry; raise `Unstorable` saying why there can be none."""
        if item.task is None:
            msg = "the outcome that carried the task is gone"
            raise Unstorable(msg, code="task_lost")
        try:
            task = _task.decode(item.task)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            msg = f"the task that the outcome carried cannot be read: {str(e)[:300]}"
            raise Unstorable(msg, code="task_unreadable") from None
        task = replace(
            task,
            job=self._retry.job,
            index=item.index,
            function=item.function,
            generation=self._retry.generation,
            sink="job",
            submitted_us=now_us,
            deadline_us=task.deadline_us if (task.deadline_us or 0) > now_us else None,
        )
        shape = self._shape(item, task)
        subject = self._subjects.task(item.function, self._retry.lane, shape, self._retry.job)
        message = OutMessage(subject, TASK.encode(task), self._headers(item))
        try:
            check_size(message, self._max_payload, _BATCH_HEADERS)
        except HeadraceError as e:
            raise Unstorable(str(e), code="too_large") from None
        return message

    def _shape(self, item: Again, task: Task) -> int:
        # The function may have been registered anew, with other shapes, since the item ran.
        spec = self._specs.get(item.function) or FunctionSpec(name=item.function)
        return spec.clamp_shape(shape_of_task(task, spec) if item.shape is None else item.shape)

    def _headers(self, item: Again) -> bytes:
        if item.trace_id is None or not item.trace_id.strip("0"):
            return self._schema
        # Its outcome names the same trace; the span that sent it first is not known any more.
        parent = item.trace_id[:16] if item.trace_id[:16].strip("0") else item.trace_id[16:]
        return self._schema + header_block({TRACEPARENT: f"00-{item.trace_id}-{parent}-00"})


def shape_of_task(task: Task, spec: FunctionSpec) -> int:
    """The shape that a task has by its tokens, as its submit computed it; 0 of a row."""
    if isinstance(task.prompt, Row):
        return 0
    params = task.params
    new = params.max_tokens or spec.default_max_tokens
    prompt = min(task.prompt_tokens, params.truncate_prompt_tokens or task.prompt_tokens)
    total = min(prompt + new, spec.max_model_len or 2**MAX_SHAPE)
    return shape_of(min(total + (params.n - 1) * new, 2**MAX_SHAPE))


def functions_of(items: Sequence[Again]) -> set[str]:
    """The functions that run these items."""
    return {item.function for item in items if item.function}
