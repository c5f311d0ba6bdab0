"""From the rows of a stage to messages: tasks, objects of large ones, outcomes of those that could not be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from headrace.client.conversation import estimate_chat_tokens, estimate_tokens, text_bytes
from headrace.client.items import Item
from headrace.client.sampling import Params
from headrace.client.tasks import TaskMaker
from headrace.client.uploads import Upload
from headrace.completion.job_rows import now_us
from headrace.completion.stage_mapping import UNFIT, Child
from headrace.contracts.codec import RESULT, SCHEMA_HEADER, fingerprint
from headrace.contracts.messages import ChatPrompt, FunctionSpec, ItemError, Result, TextPrompt
from headrace.contracts.pipeline import PipelineRecord
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.wire import OutMessage, header_block

BATCH_BYTES: Final = 4 << 20
"""Bytes of the tasks of one batch with their objects, or one that is larger."""


class Batch(Struct, frozen=True):
    """`rows` rows of a stage: tasks, objects that they name, and rows that could not be made."""

    rows: int
    messages: list[OutMessage]
    uploads: list[Upload]
    unfit: list[tuple[int, Child]]
    shapes: Counter[str]


class StageTasks:
    """Makes the messages of one stage. `limit` is how many bytes a row may have."""

    def __init__(self, mesh: Mesh, record: PipelineRecord, number: int, function: FunctionSpec) -> None:
        stage = record.spec.stages[number]
        self._mesh = mesh
        self._job = record.spec.job_of(stage)
        self._function = function
        self._tenant = record.tenant
        params = stage.params
        self._params = Params(params, fingerprint(params), params.max_tokens or function.default_max_tokens)
        self.limit = min(mesh.settings.max_item_bytes, BlobStore(mesh).limit)
        self._maker = TaskMaker(
            mesh.subjects,
            function,
            job=self._job,
            lane=record.spec.lane_of(stage),
            tenant=record.tenant,
            max_payload=mesh.max_payload,
            large=mesh.settings.large_item_bytes,
            limit=self.limit,
            deadline_us=record.deadline_us,
        )
        self._header = header_block({SCHEMA_HEADER: RESULT.name})

    def batch(self, children: Sequence[Child], first: int) -> Batch:
        """The messages of rows `first`.. of the stage: of all of them, or of as many as `BATCH_BYTES` allow."""
        made = Batch(0, [], [], [], Counter())
        size, rows, now = 0, 0, now_us()
        for index, child in enumerate(children, first):
            checked = self._checked(child)
            if checked.prompt is None:
                made.unfit.append((index, checked))
                made.shapes["t0"] += 1
            else:
                message, upload = self._message(checked, index, now)
                size += len(message.data) + (len(upload.data) if upload else 0)
                if size > BATCH_BYTES and rows:
                    break
                made.messages.append(message)
                made.uploads.extend([upload] if upload else ())
                made.shapes[message.subject.rsplit(".", 2)[1]] += 1
            rows += 1
        return replace(made, rows=rows)

    def unfit(self, rows: Sequence[tuple[int, Child]]) -> list[tuple[int, Child]]:
        """Those of `rows` that cannot be made."""
        checked = [(index, self._checked(child)) for index, child in rows]
        return [(index, child) for index, child in checked if child.prompt is None]

    def failed(self, index: int, child: Child) -> OutMessage:
        """The outcome of a row that could not be made."""
        result = Result(
            job=self._job,
            index=index,
            function=self._function.name,
            status="failed",
            tenant=self._tenant,
            custom_id=child.custom_id,
            error=child.unfit or ItemError(type=f"{UNFIT}missing"),
            params_fingerprint=self._params.fingerprint,
            worker="completion",
            shape=0,
        )
        subject = self._mesh.subjects.result("job", result.function, self._job)
        return OutMessage(subject, RESULT.encode(result), self._header)

    def _checked(self, child: Child) -> Child:
        """`child`, without its prompt if it is larger than anything may be."""
        if child.prompt is None:
            return child
        size = self._maker.size(self._item(child))
        if size <= self._maker.large or (
            size <= self.limit and self._maker.rest(self._item(child)) <= self._maker.room
        ):
            return child
        message = f"the row has {size:,} bytes; max_item_bytes allows {self.limit:,}"
        return replace(child, prompt=None, unfit=ItemError(type=f"{UNFIT}too_large", message=message))

    def _message(self, child: Child, index: int, now: int) -> tuple[OutMessage, Upload | None]:
        item = self._item(child)
        message = self._maker.message(item, index, now)
        if len(message.data) <= self._maker.large:
            return message, None
        return self._maker.by_reference(item, index, now)

    def _item(self, child: Child) -> Item:
        prompt = child.prompt
        assert prompt is not None  # noqa: S101  (those without are told apart before)
        tokens, chat = 0, isinstance(prompt, ChatPrompt)
        if isinstance(prompt, TextPrompt):
            tokens = estimate_tokens(text_bytes(prompt.text))
        elif isinstance(prompt, ChatPrompt):
            tokens = estimate_chat_tokens(prompt.messages)
        return Item(prompt, self._params, child.custom_id, None, tokens, chat)
