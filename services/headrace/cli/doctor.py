"""`headrace doctor`: what of a mesh is not as it should be, and how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, print_table
from headrace.cli.target import connect, find_settings, run_async
from headrace.contracts.errors import HeadraceError, Unavailable

if TYPE_CHECKING:
    from headrace.cli.doctor_checks import Finding
    from headrace.mesh.settings import Settings


def doctor(*, folder: Dir = None, url: Url = None, json: Json = False) -> None:
    """Check the broker, its streams and consumers, durability, services, workers, disk and clock.

    Each finding is ok, warn or fail, with how to mend it. Exit code 1 if any is fail.
    """
    findings = run_async(_examine(find_settings(folder, url)))
    if json:
        print_json(findings)
    else:
        print_table(
            ("check", "state", "found", "mend"), [(f.check, f.state, f.found, f.mend) for f in findings]
        )
    if any(f.state == "fail" for f in findings):
        raise typer.Exit(Exit.FAILED)


async def _examine(settings: Settings) -> list[Finding]:
    from headrace.cli.doctor_checks import CHECKS, LOCAL_CHECKS, Finding

    findings = [finding for local in LOCAL_CHECKS for finding in local(settings)]
    try:
        mesh = await connect(settings)
    except Unavailable as e:
        return [
            Finding("server", "fail", str(e), "start the broker, or correct --url / HEADRACE_NATS_URL"),
            *findings,
        ]
    async with mesh:
        for name, check in CHECKS:
            try:
                findings += await check(mesh)
            except HeadraceError as e:
                findings.append(Finding(name, "fail", str(e), "see the broker's log"))
    return findings
