"""Every subject of Headrace, built and taken apart in one place.

All tokens are validated before they are used; the prefix (`hr`) is a setting so that two meshes can
share one account.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.contracts.errors import InvalidInput
from headrace.contracts.names import Lane, check_token

DEFAULT_PREFIX = "hr"
MAIL_LANES = ("work", "control", "reply")
_TASK_TOKENS = 6
_SHAPE_TOKEN = re.compile(r"t([0-9]{1,2})")
MAX_SHAPE = 24
"""Largest shape: 2^24 tokens, more than any model's context."""


def shape_of(tokens: int) -> int:
    """Return the smallest k with `tokens` <= 2**k; 0 for rows without tokens.

    >>> [shape_of(n) for n in (0, 1, 2, 3, 64, 65)]
    [0, 0, 1, 2, 6, 7]
    """
    return (tokens - 1).bit_length() if tokens > 1 else 0


@dataclass(frozen=True, slots=True)
class TaskAddress:
    """What the subject of a task says of it."""

    function: str
    lane: Lane
    shape: int
    job: str


@dataclass(frozen=True, slots=True)
class Subjects:
    """Builders for each subject, all under one validated `prefix`."""

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        check_token("prefix", self.prefix)

    # --- tasks -------------------------------------------------------------------------------------
    def task(self, function: str, lane: Lane | str, shape: int, job: str) -> str:
        """Subject of one task: `hr.tasks.<function>.<lane>.t<k>.<job>`."""
        check_token("function", function)
        check_token("job", job)
        return f"{self.prefix}.tasks.{function}.{_lane(lane)}.t{_shape(shape)}.{job}"

    def tasks_of_shape(self, function: str, lane: Lane | str, shape: int) -> str:
        """Filter of the one durable consumer of a (function, lane, shape)."""
        check_token("function", function)
        return f"{self.prefix}.tasks.{function}.{_lane(lane)}.t{_shape(shape)}.>"

    def tasks_of_function(self, function: str) -> str:
        """Filter matching the waiting and leased tasks of a function."""
        return f"{self.prefix}.tasks.{check_token('function', function)}.*.*.*"

    def tasks_of_job(self, job: str) -> str:
        """Filter matching the waiting and leased tasks of a job, and not its manifest."""
        return f"{self.prefix}.tasks.*.*.*.{check_token('job', job)}"

    def manifest(self, job: str) -> str:
        """Subject of a job's progress record, in the stream of its tasks."""
        return f"{self.prefix}.tasks.manifest.{check_token('job', job)}"

    def parse_task(self, subject: str) -> TaskAddress:
        """Take a task's subject apart; raise `InvalidInput` if it is none."""
        parts = subject.split(".")
        shape = _SHAPE_TOKEN.fullmatch(parts[4]) if len(parts) == _TASK_TOKENS else None
        if shape is None or parts[0] != self.prefix or parts[1] != "tasks":
            msg = f"subject {subject[:200]!r} is not a task's"
            raise InvalidInput(msg, field="subject")
        try:
            function, job = check_token("function", parts[2]), check_token("job", parts[5])
            return TaskAddress(function, Lane(parts[3]), _shape(int(shape[1])), job)
        except (ValueError, InvalidInput) as e:
            msg = f"subject {subject[:200]!r} is not a task's: {e}"
            raise InvalidInput(msg, field="subject") from e

    # --- results -----------------------------------------------------------------------------------
    def result(self, sink: str, function: str, job: str) -> str:
        """Subject of one result: `hr.results.<sink>.<function>.<job>`; sink is `job` or `call`."""
        check_token("function", function)
        return f"{self.prefix}.results.{check_token('sink', sink)}.{function}.{check_token('job', job)}"

    def results_of_sink(self, sink: str) -> str:
        """Filter of the one consumer of a sink."""
        return f"{self.prefix}.results.{check_token('sink', sink)}.>"

    def results_of_job(self, job: str) -> str:
        """Filter matching the stored results of a job that its sink has not acked."""
        return f"{self.prefix}.results.job.*.{check_token('job', job)}"

    # --- jobs --------------------------------------------------------------------------------------
    def job_event(self, job: str, event: str) -> str:
        """Subject of a job event: `hr.jobs.<job>.<event>`."""
        return f"{self.prefix}.jobs.{check_token('job', job)}.{check_token('event', event)}"

    def all_jobs(self) -> str:
        """Filter of every job event."""
        return f"{self.prefix}.jobs.>"

    # --- dead letters, front door, registry --------------------------------------------------------
    def dead(self, origin: str) -> str:
        """Subject of dead letters that came from the stream or service `origin`."""
        return f"{self.prefix}.dead.{check_token('origin', origin)}"

    # --- governed calls -----------------------------------------------------------------------------
    def call(self, tenant: str, agent: str) -> str:
        """Subject of a call that waits for a gateway: `hr.calls.<tenant>.<agent>`."""
        return f"{self.prefix}.calls.{check_token('tenant', tenant)}.{check_token('agent', agent)}"

    def ledger_call(self, tenant: str, call: str) -> str:
        """Subject of a call's records: `hr.ledger.call.<tenant>.<call>`."""
        return f"{self.prefix}.ledger.call.{check_token('tenant', tenant)}.{check_token('call', call)}"

    def ledger_budget(self, tenant: str, budget: str) -> str:
        """Subject of a budget's head: `hr.ledger.budget.<tenant>.<budget>`."""
        return f"{self.prefix}.ledger.budget.{check_token('tenant', tenant)}.{check_token('budget', budget)}"

    def ledger_roster(self, tenant: str) -> str:
        """Subject of the list of a tenant's budgets: `hr.ledger.roster.<tenant>`."""
        return f"{self.prefix}.ledger.roster.{check_token('tenant', tenant)}"

    def evidence(self, tenant: str, call: str) -> str:
        """Subject of what was learned of a call beside its records: `hr.evidence.<tenant>.<call>`."""
        return f"{self.prefix}.evidence.{check_token('tenant', tenant)}.{check_token('call', call)}"

    # --- agents -------------------------------------------------------------------------------------
    def mail(self, agent: str, lane: str, sender: str) -> str:
        """Subject of mails of one sender in one lane of an agent's mailbox: `hr.mail.<agent>.<lane>.<sender>`.

        Lane is `work`, `control` or `reply`. The sender is a token, so that permissions can say who sends as whom.
        """
        return f"{self.mail_lane(agent, lane)[:-1]}{check_token('sender', sender)}"

    def mail_lane(self, agent: str, lane: str) -> str:
        """Filter of the one consumer of a lane of an agent's mailbox: `hr.mail.<agent>.<lane>.*`."""
        if lane not in MAIL_LANES:
            msg = f"mail lane {lane[:80]!r} is unknown: use one of {', '.join(MAIL_LANES)}"
            raise InvalidInput(msg, field="lane", code="invalid_name")
        return f"{self.prefix}.mail.{check_token('agent', agent)}.{lane}.*"

    def mail_of(self, agent: str) -> str:
        """Filter matching all lanes of an agent's mailbox."""
        return f"{self.prefix}.mail.{check_token('agent', agent)}.>"

    def agent_state(self, agent: str) -> str:
        """Subject of an agent's committed states: `hr.agents.state.<agent>`."""
        return f"{self.prefix}.agents.state.{check_token('agent', agent)}"

    def capture(self, agent: str, run: str) -> str:
        """Subject of what an agent did in one run: `hr.capture.<agent>.<run>`."""
        return f"{self.prefix}.capture.{check_token('agent', agent)}.{check_token('run', run)}"

    def reply(self, request: str) -> str:
        """Subject of a late answer: `hr.replies.<request>`."""
        return f"{self.prefix}.replies.{check_token('request', request)}"

    def api(self, name: str) -> str:
        """Request subject of the front door: `hr.api.<name>` (never inside a stream)."""
        return f"{self.prefix}.api." + ".".join(check_token("endpoint", part) for part in name.split("."))


def _lane(lane: Lane | str) -> str:
    try:
        return Lane(lane).value
    except ValueError:
        known = ", ".join(Lane)
        msg = f"lane {str(lane)[:80]!r} is unknown: use one of {known}"
        raise InvalidInput(msg, field="lane", code="invalid_name") from None


def _shape(shape: int) -> int:
    if not 0 <= shape <= MAX_SHAPE:
        msg = f"shape {shape} is outside 0..{MAX_SHAPE}"
        raise InvalidInput(msg, field="shape")
    return shape
