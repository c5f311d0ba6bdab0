"""From an accepted item to the message that carries it: shape, subject, bytes, headers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.client.items import Item
from headrace.client.uploads import Upload
from headrace.contracts.codec import PROMPT, SCHEMA_HEADER, TASK, TRACEPARENT
from headrace.contracts.messages import Blob, BlobPrompt, FunctionSpec, Row, Task
from headrace.contracts.names import Lane
from headrace.contracts.objects import blob_of
from headrace.contracts.subjects import MAX_SHAPE, Subjects, shape_of
from headrace.mesh.wire import OutMessage, header_block

RESERVED: Final = 1_024
"""Bytes of max_payload kept for headers: the batch's, the trace's, the schema's."""

LARGE: Final = 512 << 10
LIMIT: Final = 32_000_000
"""Defaults of the settings `large_item_bytes` and `max_item_bytes`."""

TaskHeaders = Callable[[Task], bytes]
"""The header block of a task; called once for each, in the order of indices."""


def task_headers(traceparent_of: Callable[[Task], str | None] | None = None) -> TaskHeaders:
    """How tasks get their headers: the schema, and a `traceparent` where `traceparent_of` gives one.

    Jobs are sampled whole, so most get one constant block that costs nothing.
    """
    plain = header_block({SCHEMA_HEADER: TASK.name})
    if traceparent_of is None:
        return lambda _: plain
    blocks: dict[str, bytes] = {}

    def headers(task: Task) -> bytes:
        traceparent = traceparent_of(task)
        if traceparent is None:
            return plain
        block = blocks.get(traceparent)
        if block is None:
            blocks.clear()  # items beyond the traced ones share one; the others come once each
            block = blocks[traceparent] = plain + header_block({TRACEPARENT: traceparent})
        return block

    return headers


class TaskMaker:
    """Makes the messages of one job.

    `room` is how many bytes a message may have: max_payload less what headers need. The prompt of a task with more than
    `large` bytes becomes an object; no task may have more than `limit` with its prompt.
    """

    def __init__(
        self,
        subjects: Subjects,
        spec: FunctionSpec,
        *,
        job: str,
        lane: Lane,
        tenant: str,
        max_payload: int,
        headers: TaskHeaders | None = None,
        large: int = LARGE,
        limit: int = LIMIT,
        deadline_us: int | None = None,
    ) -> None:
        self.room = max_payload - RESERVED
        self.large = min(large, self.room)
        self.limit = limit
        self._deadline_us = deadline_us
        self._spec = spec
        self._job = job
        self._tenant = tenant
        self._headers = headers or task_headers()
        self._limit = spec.max_model_len or 2**MAX_SHAPE
        self._subjects = [
            subjects.task(spec.name, lane, spec.clamp_shape(k), job) for k in range(MAX_SHAPE + 1)
        ]

    def message(self, item: Item, index: int, submitted_us: int) -> OutMessage:
        """The message of `item` under `index`. Its size is not checked here."""
        task = self._task(item, index, submitted_us)
        return OutMessage(self._subjects[self._shape(item)], TASK.encode(task), self._headers(task))

    def by_reference(self, item: Item, index: int, submitted_us: int) -> tuple[OutMessage, Upload]:
        """The message of an item whose prompt is an object, and that object; equal items give equal ones."""
        data = PROMPT.encode(item.prompt)
        upload = Upload(blob_of(f"{self._job}/{index}@1", "input", data), data)
        task = self._task(item, index, submitted_us, BlobPrompt(blob=upload.blob))
        message = OutMessage(self._subjects[self._shape(item)], TASK.encode(task), self._headers(task))
        return message, upload

    def size(self, item: Item) -> int:
        """Bytes of the task that `item` becomes, with its prompt."""
        return len(TASK.encode(self._task(item, 2**52, 2**51)))

    def rest(self, item: Item) -> int:
        """Bytes of the message of `item` if its prompt is an object."""
        blob = blob_of(f"{self._job}/{2**52}@1", "input", b"")
        stub = BlobPrompt(blob=Blob(name=blob.name, size=2**52, digest=blob.digest))
        return len(TASK.encode(self._task(item, 2**52, 2**51, stub)))

    def _task(self, item: Item, index: int, submitted_us: int, prompt: BlobPrompt | None = None) -> Task:
        params = item.params
        return Task(
            job=self._job,
            index=index,
            function=self._spec.name,
            prompt=prompt or item.prompt,
            params=params.generation,
            params_fingerprint=params.fingerprint,
            tenant=self._tenant,
            custom_id=item.custom_id,
            model=item.model,
            prompt_tokens=item.prompt_tokens,
            chat=item.chat,
            submitted_us=submitted_us,
            deadline_us=self._deadline_us,
        )

    def _shape(self, item: Item) -> int:
        """The smallest k with prompt + new tokens (of all n choices) ≤ 2^k, held to the model's limit; 0 for rows."""
        if isinstance(item.prompt, Row):
            return 0
        prompt, params = item.prompt_tokens, item.params
        cut = params.generation.truncate_prompt_tokens
        if cut is not None and cut < prompt:
            prompt = cut
        total = min(prompt + params.new_tokens, self._limit)
        if params.generation.n > 1:
            total = min(total + (params.generation.n - 1) * params.new_tokens, 2**MAX_SHAPE)
        return shape_of(total)
