"""`headrace audit`: the proof of a job's account, or of all jobs together, once or through a whole run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.api import ask
from headrace.cli.audit_view import AuditView, print_audit, print_tenant
from headrace.cli.exit_codes import Exit
from headrace.cli.options import Dir, Json, Url
from headrace.cli.output import print_json, say
from headrace.cli.status import job_audit
from headrace.cli.target import run_on_mesh
from headrace.cli.watching import ENDED, follow_readings
from headrace.contracts.api import AuditRequest, JobAudit, TenantAudit
from headrace.contracts.errors import HeadraceError, InvalidInput, Unavailable
from headrace.contracts.names import check_token

if TYPE_CHECKING:
    from headrace.mesh.connection import Mesh

DEFAULT_INTERVAL_S = 1.0
SAMPLE_TIMEOUT_S = 15.0
"""How long a sample waits for a completion service that may have been killed while it was asked."""

Audit = JobAudit | TenantAudit


def audit(
    job: Annotated[
        str | None, typer.Argument(help="Name of the job [default: all of them].", show_default=False)
    ] = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Take samples until the job (or every job) has ended.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval", min=0.01, help="Seconds between samples [default: 1].", show_default=False
        ),
    ] = None,
    folder: Dir = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Prove the account of a job from three sources: the producer's manifest, the broker, the data plane.

    Balanced means submitted = ok + failed + dead + cancelled + queued + landing, for all items and for each shape.
    Exit code 1 if it is not: with --watch, if any sample is not. --watch --json prints one sample a line, the last one
    of the ended job. Samples go on through restarts of the broker and of the services.
    """
    if job is not None:
        check_token("job", job)
    if interval is not None and not watch:
        raise InvalidInput("--interval is the time between the samples of --watch", field="interval")
    if watch:
        samples = Samples(as_json=json)
        try:
            run_on_mesh(
                folder, url, lambda mesh: watch_audit(mesh, job, samples, interval or DEFAULT_INTERVAL_S)
            )
        finally:
            samples.say_summary()
        balanced = not samples.unbalanced
    else:
        found = run_on_mesh(folder, url, lambda mesh: _one(mesh, job))
        _print(found, as_json=json)
        balanced = found.balanced
    if not balanced:
        raise typer.Exit(Exit.FAILED)


class Samples:
    """What was sampled so far."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.balanced = 0
        self.unbalanced = 0

    def take(self, found: Audit) -> None:
        """Count one sample, and print it as a line of JSON if that is asked for."""
        if found.balanced:
            self.balanced += 1
        else:
            self.unbalanced += 1
        if self.as_json:
            print_json(found)

    def say_summary(self) -> None:
        """One line on standard error."""
        n = self.balanced + self.unbalanced
        say(f"{n:,} samples: {self.balanced:,} balanced, {self.unbalanced:,} unbalanced")


async def watch_audit(mesh: Mesh, job: str | None, samples: Samples, interval_s: float) -> None:
    """Sample until the job has ended, or without one every job. A service that does not answer makes no sample."""
    latest: list[Audit] = []
    with AuditView(quiet=samples.as_json) as view:

        def show(found: Audit) -> None:
            latest[:] = [found]
            samples.take(found)
            view.show(found)

        await follow_readings(
            _sampler(mesh, job),
            _has_ended,
            show=show,
            trouble=view.note,
            interval_s=interval_s,
            first_s=interval_s,
        )
    if not samples.as_json:
        _print(latest[0], as_json=False)


def _sampler(mesh: Mesh, job: str | None) -> Callable[[], Awaitable[Audit]]:
    async def sample() -> Audit:
        try:
            return await _one(mesh, job, timeout_s=SAMPLE_TIMEOUT_S)
        except HeadraceError as e:
            if e.code == "broker_refused":  # completion was answered by a broker that is starting or stopping
                raise Unavailable(str(e), code=e.code) from None
            raise

    return sample


async def _one(mesh: Mesh, job: str | None, *, timeout_s: float = 30.0) -> Audit:
    if job is not None:
        return await job_audit(mesh, job, timeout_s=timeout_s)
    return await ask(mesh, "audit", AuditRequest(), TenantAudit, timeout_s=timeout_s)


def _has_ended(found: Audit) -> bool:
    return found.open_jobs == 0 if isinstance(found, TenantAudit) else found.state in ENDED


def _print(found: Audit, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    elif isinstance(found, TenantAudit):
        print_tenant(found)
    else:
        print_audit(found)
