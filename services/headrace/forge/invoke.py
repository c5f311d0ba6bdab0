"""One batch through one function, in this process: rows decoded, the callable called, its answers encoded.

A row that cannot be decoded never reaches the function; it gets its error and the others go on. What the function
does wrong for the whole batch is a `BatchFailed`, and whoever asked decides how to go on.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, Literal, cast

import msgspec
from msgspec import Struct

from headrace.contracts.messages import ItemError
from headrace.forge.function import Function, RowError

MAX_MESSAGE: Final = 2_000

Kind = Literal["raised", "wrong_count", "crashed", "timeout"]


class RowOutcome(Struct, array_like=True):
    """What came of a row: the JSON of its answer, or its error."""

    value: bytes | None = None
    error: ItemError | None = None


class BatchFailed(Exception):
    """A batch has no answers. `passing`: the exception is one that the function's `retry` names.

    `done` are the outcomes of the first rows where the function gives one after the other (a generator); the row after
    them is the one at which it failed.
    """

    def __init__(
        self, kind: Kind, message: str, *, passing: bool = False, done: list[RowOutcome] | None = None
    ) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message[:MAX_MESSAGE]
        self.passing = passing
        self.done = done or []


class _Batch:
    """A batch on its way: which rows the function sees, and the outcomes as they come."""

    def __init__(self, function: Function[..., Any], raws: Sequence[bytes]) -> None:
        self._function = function
        self.outcomes: list[RowOutcome | None] = [None] * len(raws)
        self.seen: list[int] = []
        self.rows: list[Any] = []
        for at, raw in enumerate(raws):
            try:
                row = function.codec.decode(raw)
            except (msgspec.MsgspecError, ValueError, RecursionError) as e:
                self.outcomes[at] = _invalid_row(e, raw)
            else:
                self.seen.append(at)
                self.rows.append(row)

    def take(self, answers: list[Any]) -> list[RowOutcome]:
        """The outcomes, once there is one answer for each row that was seen."""
        if len(answers) != len(self.rows):
            raise BatchFailed("wrong_count", self._count(len(answers)))
        for at, answer in zip(self.seen, answers, strict=True):
            self.outcomes[at] = self.outcome(answer)
        return [outcome or RowOutcome() for outcome in self.outcomes]

    def outcome(self, answer: Any) -> RowOutcome:
        """One answer as an outcome."""
        if isinstance(answer, RowError):
            return RowOutcome(error=ItemError(type=answer.type, message=str(answer.message)[:MAX_MESSAGE]))
        try:
            return RowOutcome(value=bytes(self._function.codec.encode(answer)))
        except msgspec.ValidationError as e:
            said = f"the answer is no {self._function.codec.answer_type}: {e}"
        except Exception as e:  # noqa: BLE001  (the encoding calls code of the answer's own)
            said = f"the answer cannot be written as JSON: {type(e).__name__}: {e}"
        return RowOutcome(error=ItemError(type="invalid_answer", message=said[:MAX_MESSAGE]))

    def failed(self, error: BaseException, answers: list[Any] | None = None) -> BatchFailed:
        """What the function raised, with what it had given before."""
        done: list[RowOutcome] = []
        if answers is not None and len(answers) < len(self.rows):
            for at, answer in zip(self.seen, answers, strict=False):
                self.outcomes[at] = self.outcome(answer)
            until = self.seen[len(answers)]
            done = [outcome or RowOutcome() for outcome in self.outcomes[:until]]
        passing = isinstance(error, self._function.retry.on) if self._function.retry.on else False
        return BatchFailed("raised", f"{type(error).__name__}: {error}", passing=passing, done=done)

    def listed(self, returned: Any) -> list[Any]:
        """What the function returned as a list; anything that is no row of answers is refused by name."""
        if isinstance(returned, list):
            return returned  # pyright: ignore[reportUnknownVariableType]
        if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__iter__"):
            kind = type(cast("object", returned)).__name__
            raise BatchFailed("wrong_count", f"it returned {kind} and not a list of {len(self.rows)} answers")
        return list(returned)

    def _count(self, got: int) -> str:
        one = "answer" if got == 1 else "answers"
        return f"it returned {got} {one} for {len(self.rows)} {'row' if len(self.rows) == 1 else 'rows'}"


def invoke(function: Function[..., Any], raws: Sequence[bytes]) -> list[RowOutcome]:
    """The outcomes of a batch by a plain function or generator; raise `BatchFailed`."""
    batch = _Batch(function, raws)
    if not batch.rows:
        return batch.take([])
    given: list[Any] | None = None
    try:
        returned = function.call(list(batch.rows))
        if isinstance(returned, Iterator):
            given = []
            _drain(cast("Iterator[Any]", returned), given.append, len(batch.rows))
            returned = given
        answers = batch.listed(returned)
    except BatchFailed:
        raise
    except (Exception, SystemExit, GeneratorExit) as e:
        raise batch.failed(e, given) from e
    return batch.take(answers)


async def invoke_async(function: Function[..., Any], raws: Sequence[bytes]) -> list[RowOutcome]:
    """As `invoke`, for an async function or async generator; a plain one blocks the loop."""
    if not function.is_async:
        return invoke(function, raws)
    batch = _Batch(function, raws)
    if not batch.rows:
        return batch.take([])
    given: list[Any] | None = None
    try:
        returned = function.call(list(batch.rows))
        if isinstance(returned, AsyncIterator):
            given = []
            async for answer in cast("AsyncIterator[Any]", returned):
                given.append(answer)
                if len(given) > len(batch.rows):
                    break
            answers = given
        else:
            answers = batch.listed(await returned if inspect.isawaitable(returned) else returned)
    except BatchFailed:
        raise
    except (Exception, SystemExit) as e:
        raise batch.failed(e, given) from e
    return batch.take(answers)


def _drain(answers: Iterator[Any], add: Callable[[Any], None], rows: int) -> None:
    """Take one answer after the other, and no more than one too many: a generator may never end."""
    for count, answer in enumerate(answers, 1):
        add(answer)
        if count > rows:
            return


def _invalid_row(error: Exception, raw: bytes) -> RowOutcome:
    # When it is needed: the client's room takes most of the time that a process of a function takes to start.
    from headrace.client.problems import from_msgspec

    found = from_msgspec(error, raw)
    field = found.field or None
    where = f"{field}: " if field else ""
    return RowOutcome(
        error=ItemError(type="invalid_row", message=f"{where}{found}"[:MAX_MESSAGE], field=field)
    )


__all__ = ["BatchFailed", "RowOutcome", "invoke", "invoke_async"]
