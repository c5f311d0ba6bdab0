"""The gateway's service: the front door for work, and the one way in which anything outside is called."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Raw

from headrace.contracts.api import SubmitReply
from headrace.contracts.calls import CallAnswer, CallAsk
from headrace.contracts.codec import TRACEPARENT
from headrace.gateway.approvals import Approvals
from headrace.gateway.ask import ask
from headrace.gateway.book import Book
from headrace.gateway.budgets import Budgets
from headrace.gateway.call_objects import CallObjects
from headrace.gateway.call_results import CallResults
from headrace.gateway.callees import Callees
from headrace.gateway.calls import Calls
from headrace.gateway.capture import Capture, CapturingDialer
from headrace.gateway.conduct import Conductor
from headrace.gateway.desk import Desk
from headrace.gateway.dialers import Dialers
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.gate import PolicyGate
from headrace.gateway.intake import store
from headrace.gateway.ledger import StreamLedger
from headrace.gateway.ledger_mark import FILE, LedgerMark
from headrace.gateway.open_calls import OpenCalls
from headrace.gateway.owners import Owners
from headrace.gateway.prompts import Prompts
from headrace.gateway.requests import read_request
from headrace.gateway.resolve import Resolver
from headrace.gateway.telemetry import watch
from headrace.gateway.turns import Turns
from headrace.mesh.checks.start import check_start
from headrace.mesh.leases import LeaseKeeper
from headrace.mesh.microservice import ApiServer
from headrace.mesh.redact import Redactor
from headrace.mesh.service import Service
from headrace.mesh.settings import Settings

log = logging.getLogger("headrace.gateway")

NAME: Final = "headrace-gateway"
LONGEST_WAIT_S: Final = 3_600.0
REQUESTS: Final = 4_096
"""Requests that are answered at once: most of them wait for a call."""


class GatewayService(Service):
    """Any number may run, and each restarts alone: what it holds stands in the ledger.

    Start: take a new life; refuse to if the ledger went back; put in doubt, or end, what an older life left open; then
    take calls. A stop goes in this order:

    1. take no more requests and no more calls
    2. calls that are under way are brought to their end within `grace_s`, their records written; the rest is left to
       the next life, and to other gateways once its leases are over
    3. answer the requests in hand
    4. close connections to callees, end the leases, close the connection
    """

    name = "gateway"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._api: ApiServer | None = None
        self._calls: Calls | None = None
        self._results: CallResults | None = None
        self._dialers: Dialers | None = None
        self._turns: Turns | None = None
        self._approvals: Approvals | None = None
        self._mark: LedgerMark | None = None
        self._leases = LeaseKeeper(settings, "gateway")

    async def on_start(self) -> None:
        """Serve; `nats service ls` shows `headrace-gateway` from now on."""
        mesh, topology = self.mesh, self.mesh.topology
        await check_start(
            mesh, (topology.tasks, topology.jobs, topology.calls, topology.ledger, topology.evidence)
        )
        name = self.settings.gateway.name or _unique_name()
        mark = self._mark = LedgerMark(mesh, Path(self.settings.dir) / FILE)
        await mark.check()
        owners = Owners(mesh)
        me = await owners.begin(name)
        ledger, evidence = StreamLedger(mesh, mark), EvidenceStream(mesh)
        book = Book(ledger, together=self.settings.durability == "safe")
        callees = Callees(self.settings.callees)
        policy, concurrency = self.settings.policy, self.settings.gateway.concurrency
        keys = [c.api_key_env for c in self.settings.callees.values() if c.api_key_env]
        redactor = Redactor(policy.redact, keys)
        capture = Capture(
            mesh, redactor, inline_bytes=self.settings.gateway.outcome_bytes, requests=policy.capture_requests
        )
        dialers = self._dialers = Dialers(mesh, redactor)
        approvals = self._approvals = Approvals(mesh, evidence)
        turns = self._turns = Turns(most_waiting=concurrency // 4)
        gate = PolicyGate(policy, approvals, turns, shown=capture.shown)
        dialer = CapturingDialer(dialers, capture, gate.limits.used)
        await dialers.start()
        await self._leases.start()
        conductor = Conductor(
            me=me,
            ledger=ledger,
            book=book,
            callees=callees,
            gate=gate,
            dialer=dialer,
            keep=capture.request,
            testify=evidence.testify,
            alive=owners.alive,
        )
        resolver = Resolver(
            me=me, ledger=ledger, book=book, callees=callees, dialer=dialer, evidence=evidence
        )
        open_calls = OpenCalls(mesh)
        watch(open_calls)
        self.spawn(open_calls.follow(), "open calls")
        await open_calls.caught_up.wait()
        found = await resolver.recover(open_calls)
        log.info("gateway lives", extra={"gateway": name, "epoch": me.epoch, "left_open": found})
        self.spawn(resolver.sweep_for_ever(open_calls), "resolver")
        self.spawn(self._leases.watch(), "leases")
        self.spawn(mark.keep(), "ledger mark")
        self.spawn(CallObjects(mesh, ledger, evidence).sweep_for_ever(), "objects of calls")
        self._calls = Calls(
            mesh, self._leases, conductor.conduct, capture.whole, turns, concurrency=concurrency
        )
        self._results = CallResults(mesh, ledger)
        await self._calls.start()
        self.spawn(self._results.run(), "results of calls")
        self._api = ApiServer(
            mesh,
            NAME,
            description="The front door: takes work in, and makes governed calls",
            max_concurrent=REQUESTS,
        )
        self._api.endpoint("submit", Raw, self._submit)
        Prompts(mesh).serve(self._api)
        self._api.endpoint("call", CallAsk, self._call, timeout_s=LONGEST_WAIT_S + 10.0)
        Desk(
            mesh,
            ledger=ledger,
            evidence=evidence,
            approvals=approvals,
            budgets=Budgets(ledger),
            resolver=resolver,
        ).serve(self._api)
        await self._api.start()
        # A service that says it is ready is heard. The answer proves that the broker has read the subscriptions
        # before it; a flush would not, since nats-py sends its ping ahead of what waits in its buffer.
        await mesh.request(f"$SRV.PING.{NAME}", b"")

    async def on_drain(self) -> None:
        """Steps 1 to 3 of a stop."""
        if self._turns is not None:
            self._turns.close()
        if self._calls is not None:
            await self._calls.stop(self.settings.grace_s)
        if self._results is not None:
            await self._results.stop()
        if self._api is not None:
            await self._api.stop()
        if self._mark is not None:
            await self._mark.note()

    async def on_stop(self) -> None:
        """Step 4 of a stop."""
        if self._approvals is not None:
            await self._approvals.close()
        if self._dialers is not None:
            await self._dialers.close()
        await self._leases.stop()

    async def _submit(self, body: Raw, headers: Mapping[str, str]) -> SubmitReply:
        request = read_request(bytes(body), self.settings.tenant)
        return await store(self.mesh, request, headers)

    async def _call(self, request: CallAsk, headers: Mapping[str, str]) -> CallAnswer:
        return await ask(
            self.mesh, request, tenant=self.settings.tenant, traceparent=headers.get(TRACEPARENT)
        )


def _unique_name() -> str:
    """A name of this life only: what it leaves open waits for the end of its leases."""
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:64].strip("-") or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
