"""Results as messages: one place that builds what a worker publishes of an item."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from msgspec import UNSET, structs

from headrace.contracts import codec
from headrace.contracts.codec import SCHEMA_HEADER, TRACEPARENT
from headrace.contracts.messages import Blob, BlobPrompt, ItemError, Result, Task, Timings
from headrace.contracts.suspects import Suspect
from headrace.inference_worker.engines.protocol import EngineInfo, Output
from headrace.inference_worker.incidents import sentence, storable
from headrace.inference_worker.intake import Item, now_us
from headrace.mesh import tracing
from headrace.mesh.connection import Mesh
from headrace.mesh.settle import Done
from headrace.mesh.wire import OutMessage, header_block

HEADROOM: Final = 8_192
"""Bytes left under max_payload for the headers that publishing adds, and for what a reply has around a result."""
_CACHED: Final = 4_096

NotOk = Literal["failed", "dead"]


class LargeResult(NamedTuple):
    """A result that is too large for a message: `data` is all of it, `stub` what the message will say."""

    stub: Result
    data: bytes


class Outcomes:
    """Builds `Done(...)` values for one worker; subjects and header blocks are cached, since millions are
    alike.
    """

    def __init__(self, mesh: Mesh, worker: str, info: EngineInfo) -> None:
        self._subjects = mesh.subjects
        self._limit = mesh.max_payload - HEADROOM
        self._most = mesh.settings.max_item_bytes
        self._worker = worker
        self._engine = info.engine
        self._model = info.model[:512]
        self._schema = header_block({SCHEMA_HEADER: codec.RESULT.name})
        self._cache: dict[tuple[str, str, str], str] = {}

    def ok(self, item: Item, output: Output) -> Done | LargeResult:
        """The item's answer, which may be too large for a message; beyond the limit it is `failed`, naming its size."""
        task = item.task
        result = Result(
            job=task.job,
            index=task.index,
            function=task.function,
            status="ok",
            generation=task.generation,
            tenant=task.tenant,
            custom_id=task.custom_id,
            choices=output.choices,
            value=UNSET if output.value is None else output.value,
            usage=output.usage,
            model=self._model,
            engine=self._engine,
            params_fingerprint=task.params_fingerprint,
            worker=self._worker,
            attempt=item.delivery.delivered,
            chat=task.chat,
            timings=self._timings(item),
            trace_id=tracing.trace_id(item.traceparent) if item.traceparent else None,
            input_blob=_input_blob(task),
            shape=item.lane.shape,
        )
        data = codec.RESULT.encode(result)
        if len(data) > self._most:
            size = f"the result has {len(data):,} bytes; max_item_bytes allows {self._most:,}"
            message = f"{size}: ask for fewer tokens, choices or logprobs"
            return self.failed(item, ItemError(type="result_too_large", message=message))
        if len(data) > self._limit:
            return LargeResult(structs.replace(result, choices=[], value=UNSET), data)
        return self._done(item, data)

    def by_reference(self, item: Item, result: LargeResult, blob: Blob) -> Done:
        """The message of a result that is stored as `blob`. It has its task, in case that the object gets lost."""
        data = codec.RESULT.encode(structs.replace(result.stub, blob=blob, task=item.task))
        if len(data) > self._limit:
            data = codec.RESULT.encode(structs.replace(result.stub, blob=blob))
        return self._done(item, data)

    def failed(self, item: Item, error: ItemError) -> Done:
        """The item itself is wrong or refused; it carries its task, so that a retry needs nothing else."""
        return self._not_ok(item, "failed", error)

    def dead(self, item: Item, tries: int, last_error: str) -> Done:
        """Tries are exhausted."""
        message = f"given up after {tries} {'try' if tries == 1 else 'tries'}; the last error: {last_error}"
        return self._not_ok(item, "dead", ItemError(type="tries_exhausted", message=message))

    def poison(self, item: Item, record: Suspect) -> Done:
        """It ended engines."""
        return self._not_ok(item, "dead", ItemError(type="poison", message=sentence(record)))

    def _not_ok(self, item: Item, status: NotOk, error: ItemError) -> Done:
        # The bounds of the contract: a result that its reader cannot decode would be no outcome at all.
        field = error.field and error.field[:256]
        error = ItemError(type=error.type, message=storable(error.message), field=field)
        data = self._encode(item, status, error, item.task)
        if len(data) > self._limit:
            # A task close to the limit does not fit into its own result; the outcome matters more.
            note = f"{error.message} (the task is too large to be carried)"[-2048:]
            error = ItemError(type=error.type, message=note, field=error.field)
            data = self._encode(item, status, error, None)
        return self._done(item, data)

    def _encode(self, item: Item, status: NotOk, error: ItemError, carried: Task | None) -> bytes:
        task = item.task
        result = Result(
            job=task.job,
            index=task.index,
            function=task.function,
            status=status,
            generation=task.generation,
            tenant=task.tenant,
            custom_id=task.custom_id,
            error=error,
            model=self._model,
            engine=self._engine,
            params_fingerprint=task.params_fingerprint,
            worker=self._worker,
            attempt=item.delivery.delivered,
            chat=task.chat,
            timings=self._timings(item),
            trace_id=tracing.trace_id(item.traceparent) if item.traceparent else None,
            input_blob=_input_blob(task),
            shape=item.lane.shape,
            task=carried,
        )
        return codec.RESULT.encode(result)

    def _done(self, item: Item, data: bytes) -> Done:
        task = item.task
        key = (task.sink, task.function, task.job)
        subject = self._cache.get(key)
        if subject is None:
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            subject = self._cache[key] = self._subjects.result(*key)
        headers = self._schema
        if item.traceparent and tracing.trace_id(item.traceparent):
            headers += header_block({TRACEPARENT: item.traceparent})
        return Done((OutMessage(subject, data, headers),))

    @staticmethod
    def _timings(item: Item) -> Timings:
        return Timings(
            submitted_us=item.task.submitted_us,
            received_us=item.received_us,
            started_us=item.started_us,
            finished_us=now_us(),
        )


def _input_blob(task: Task) -> str | None:
    """Name of the object that holds the task's prompt, if it lies in one."""
    return task.prompt.blob.name if isinstance(task.prompt, BlobPrompt) else None
