"""`submit`: from a source of lines to a receipt. Resumable at every step.

The path is that of docs/architecture.md, "The path of a task", steps 1 to 3; `submission` has the steps.
"""

from __future__ import annotations

import asyncio

import msgspec

from headrace.client.inputs import SourceArgument, open_input
from headrace.client.jobs import new_job_name
from headrace.client.options import OnProgress, Progress, Receipt, SubmitOptions
from headrace.client.submission import Submission
from headrace.client.tokenise import choose_tokeniser
from headrace.contracts.names import Lane, check_token
from headrace.mesh.checks.start import refuse_loss
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import get_function


async def submit(
    mesh: Mesh,
    source: SourceArgument,
    *,
    job: str | None = None,
    options: SubmitOptions | None = None,
    on_progress: OnProgress | None = None,
) -> Receipt:
    """Store every line of `source` durably under `job` (a new UUIDv7 by default) and return the receipt.

    Raise `InvalidLines` (nothing is stored) unless `skip_bad`; `InvalidInput`, `NotFound` (file, function); `Conflict`
    (the name is taken by another input, the job was cancelled, the streams would not keep it); `Refused` or
    `Unavailable` naming what is not stored.
    """
    options = options or SubmitOptions()
    name = check_token("job", job) if job is not None else new_job_name()
    mesh.subjects.task(options.function, options.lane, 0, name)  # refuses what cannot stand in a subject
    lane = Lane(options.lane)
    spec = await get_function(mesh, options.function)
    await refuse_loss(mesh, (mesh.topology.tasks, mesh.topology.jobs))
    if options.tenant is not None:
        check_token("tenant", options.tenant)
    report = on_progress or _quiet
    report(Progress(job=name, phase="reading"))
    tokeniser, note = await asyncio.to_thread(choose_tokeniser, spec, options.tokenise, options.tokenizer)
    opened = await asyncio.to_thread(
        open_input,
        source,
        input_format=options.input_format,
        column=options.column,
        id_column=options.id_column,
        whole_rows=options.form == "rows",
    )
    with opened as lines:
        run = Submission(mesh, lines, spec, tokeniser, job=name, lane=lane, options=options, report=report)
        receipt = await run.run()
    return receipt if note is None else msgspec.structs.replace(receipt, notes=[*receipt.notes, note])


def _quiet(_progress: Progress) -> None:
    """Nobody wants to know."""


__all__ = ["OnProgress", "Progress", "Receipt", "Submission", "SubmitOptions", "submit"]
