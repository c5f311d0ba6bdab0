"""`headrace doctor`: what of a mesh is not as it should be, and how to mend it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table, say
from headrace.cli.target import connect, find_settings, run_async
from headrace.contracts.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from headrace.contracts.api import Finding
    from headrace.mesh.connection import Mesh
    from headrace.mesh.settings import Settings

AcceptLoss = Annotated[
    list[int] | None,
    typer.Option(
        "--accept-loss",
        min=1,
        metavar="NUMBER",
        help="A loss of the broker that you have seen to, by the number that its finding names: it is told no more.",
        show_default=False,
    ),
]


def doctor(
    *, accept_loss: AcceptLoss = None, folder: Dir = None, url: Url = None, json: Json = False
) -> None:
    """Check a mesh: the broker and its limits, streams and consumers, durability, services, workers, disk and clock.

    Each finding is ok, warn or fail, with how to mend it; docs/doctor.md lists them. Exit code 1 if any is fail.
    """
    findings = _findings(folder, url, accept_loss or [])
    if json:
        print_json(findings)
    else:
        rows = [(f.check, f.state, f.found, f.mend) for f in findings]
        print_table(("check", "state", "found", "mend"), rows)
    if any(f.state == "fail" for f in findings):
        raise typer.Exit(Exit.FAILED)


def _findings(folder: Path | None, url: str | None, accept_losses: list[int]) -> list[Finding]:
    from headrace.mesh.checks.findings import fail

    try:
        settings = find_settings(folder, url)
    except NotFound as e:
        if accept_losses:
            raise
        return [fail("mesh", str(e), "headrace up, or --url")]
    return run_async(_examine(settings, accept_losses))


async def _examine(settings: Settings, accept_losses: list[int]) -> list[Finding]:
    from headrace.cli.doctor_checks import examine
    from headrace.cli.doctor_local import local_findings
    from headrace.mesh.checks.findings import fail

    try:
        mesh = await connect(settings)
    except Unavailable as e:
        if accept_losses:
            raise
        mend = "start the broker (headrace up), or correct --url / HEADRACE_NATS_URL, and the credentials"
        return [fail("server", str(e), mend), *local_findings(settings)]
    async with mesh:
        if accept_losses:
            await _accept(mesh, accept_losses)
        return await examine(mesh)


async def _accept(mesh: Mesh, losses: list[int]) -> None:
    from headrace.cli.api import ask
    from headrace.contracts.api import ChecksReply, ChecksRequest

    reply = await ask(mesh, "checks", ChecksRequest(accept_losses=losses), ChecksReply, timeout_s=20.0)
    for number in losses:
        say(f"loss {number} is accepted" + ("" if number in reply.accepted else " already"))
