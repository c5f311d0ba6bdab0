"""How functions over rows run: `[forge]` for all, `[functions.NAME]` for one."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

BatchingText = Annotated[str, Meta(pattern=r"^(rows:[1-9][0-9]{0,4}|tokens:[1-9][0-9]{0,8}|submit)$")]
WorkerBatchingText = Annotated[str, Meta(pattern=r"^(rows:[1-9][0-9]{0,4}|tokens:[1-9][0-9]{0,8})$")]
SizeText = Annotated[str, Meta(pattern=r"^(estimate|length|tokenizer:.{1,1024})$")]
WaitMs = Annotated[int, Meta(ge=0, le=3_600_000)]
Processes = Annotated[int, Meta(ge=0, le=1_024)]
Concurrency = Annotated[int, Meta(ge=1, le=10_000)]


class ForgeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Functions over rows, all of them. What is not set here is as the function's decorator says."""

    batching: BatchingText | None = None
    """How `headrace run` batches: `rows:N`, `tokens:BUDGET`, or `submit` (store the rows durably and exit)."""
    worker_batching: WorkerBatchingText | None = None
    """How a worker batches what was submitted: `rows:N` or `tokens:BUDGET`; by default as `batching` says."""
    max_wait_ms: WaitMs | None = None
    """How long a worker's batch waits to fill, in milliseconds; 50 by default."""
    order: Literal["ordered", "free"] | None = None
    """Which rows a budget of tokens packs: neighbours (`ordered`), or those of like size (`free`, the default)."""
    size: SizeText | None = None
    """What a row counts against a budget: `estimate` (bytes ÷ 3.5), `length` (bytes), `tokenizer:PATH`."""
    processes: Processes | None = None
    """Processes of each function; 0: one for each core."""
    concurrency: Concurrency | None = None
    """Batches at once in one process of an async function."""


class FunctionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[functions.NAME]`: as `[forge]`, for one function; it comes before it."""

    batching: BatchingText | None = None
    """How `headrace run` batches."""
    worker_batching: WorkerBatchingText | None = None
    """How a worker batches."""
    max_wait_ms: WaitMs | None = None
    """How long a worker's batch waits to fill."""
    order: Literal["ordered", "free"] | None = None
    """Which rows a budget packs."""
    size: SizeText | None = None
    """What a row counts against a budget."""
    processes: Processes | None = None
    """Processes."""
    concurrency: Concurrency | None = None
    """Batches at once in one process."""
    options: dict[str, str] = {}
    """What the function itself reads by `headrace.forge.option(name)`."""
