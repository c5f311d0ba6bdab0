"""What a submit is told, what it says on its way, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from headrace.client.formats import Form
from headrace.client.inputs import InputFormat
from headrace.client.policies import Deadline, Share
from headrace.client.problems import LineError
from headrace.client.tokenise import Where
from headrace.contracts.names import Lane


class Receipt(Struct, frozen=True, kw_only=True):
    """What a submit achieved: `submitted` items are durably stored, `refused` lines are not among them.

    `resumed_from` is how many an earlier run had stored; equal to `submitted` if there was nothing left to do.
    `errors` are those of the refused lines (1,000 at most); `notes` are worth a line to the user.
    """

    job: str
    submitted: int
    refused: int = 0
    resumed_from: int = 0
    errors: list[LineError] = []
    notes: list[str] = []
    trace_id: str | None = None


class Progress(Struct, frozen=True, kw_only=True):
    """Where a submit is. `phase`: `reading` (spooling), `checking`, `storing` or `sealed`.

    Bytes are those of the input file, and start again for the second pass. `items` is 0 until all are checked.
    `waiting` says why nothing goes on, empty while it does.
    """

    job: str
    phase: str
    bytes_read: int = 0
    total_bytes: int = 0
    stored: int = 0
    items: int = 0
    waiting: str = ""


OnProgress = Callable[[Progress], None]
"""Must be quick. It is called from a thread while checking, and from the event loop while storing."""


class SubmitOptions(Struct, frozen=True, kw_only=True):
    """How to read and run the lines of a job.

    `defaults` are fields of `Generation` for lines that do not set them. `form` `rows` takes each line as any JSON
    value, for a function that is no model. `patience_s`: how long to go on while nothing gets stored. `tenant` is that
    of the settings by default. `traceparent` is the trace that the submit joins. `deadline` and `max_failed` end the
    job early: when it passes, or when a larger share of what ran is failed or dead. A job keeps those that it was
    opened with. `pipeline` and `stage` name what the job is a part of.
    """

    function: str = "generate"
    lane: Lane = Lane.NORMAL
    form: Form = "lines"
    input_format: InputFormat = "auto"
    column: str | None = None
    id_column: str | None = None
    skip_bad: bool = False
    defaults: dict[str, Any] = {}
    tokenise: Where = "auto"
    tokenizer: Path | None = None
    patience_s: float = 60.0
    tenant: str | None = None
    traceparent: str | None = None
    deadline: Deadline | None = None
    max_failed: Share | None = None
    pipeline: str | None = None
    stage: str | None = None
