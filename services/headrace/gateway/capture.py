"""What is kept of calls: redacted, and as an object where it is too large for a record.

An object is stored before the record that names it. If the gateway dies in between, the call is in doubt as it would
have been, and the object is swept once the call has its end. A store that takes nothing does not hold up the
accounting: after a while the record is written without a body, and says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from headrace.contracts.account import CallView
from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import HeadraceError, Refused, Unavailable
from headrace.contracts.ledger import CallError, CallOutcome
from headrace.contracts.messages import Blob
from headrace.contracts.objects import call_blob
from headrace.gateway.callees import Callee
from headrace.gateway.dialing import Attempted, Dialer, Order
from headrace.gateway.records import Asked, request_of
from headrace.gateway.verdicts import Seen
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh, backoff_s
from headrace.mesh.crash import crash_point
from headrace.mesh.redact import Redactor

log = logging.getLogger("headrace.gateway")

STORE_WITHIN_S: Final = 4.0
"""Less than the grace of a lease: who waited longer would find its call taken over."""
SHOWN_BYTES: Final = 32_768
"""A waiting call's body up to this size stands in the evidence itself."""
MARGIN: Final = 4_096
"""What an answer has beside its body, at most."""


class Capture:
    """Keeps the bodies of calls for one gateway."""

    def __init__(self, mesh: Mesh, redactor: Redactor, *, inline_bytes: int, requests: bool = False) -> None:
        self._mesh = mesh
        self._objects = BlobStore(mesh)
        self._redactor = redactor
        self._inline = min(inline_bytes, mesh.max_payload // 4)
        self._requests = requests

    # --- outcomes ----------------------------------------------------------------------------------
    async def attempted(self, tenant: str, call: str, attempt: int, attempted: Attempted) -> Attempted:
        """`attempted` as it is kept; `live` is what its caller gets."""
        text = self._redactor.text
        error = attempted.error
        error = CallError(type=error.type, message=text(error.message)[:2_048], status=error.status)
        outcome = attempted.outcome
        if outcome is None:
            return replace(attempted, error=error)
        try:
            encoded = msgspec.json.encode(outcome.body)
            body = self._redactor.live(outcome.body, encoded)
            kept = self._redactor.kept(body)
        except RecursionError:
            omitted = replace(outcome, body=None, omitted="too_deep")
            return replace(attempted, error=error, outcome=omitted, live=omitted)
        redacted = kept is not outcome.body
        live = replace(
            outcome, body=body, provider_request_id=_kept(text, outcome.provider_request_id),
            response_id=_kept(text, outcome.response_id), finish_reason=_kept(text, outcome.finish_reason, 64),
        )  # fmt: skip
        outcome = replace(live, body=kept, redacted=redacted)
        data = msgspec.json.encode(kept) if redacted else encoded
        if len(data) > self._inline:
            outcome = await self._as_object(tenant, call, f"outcome-{attempt}", outcome, data)
            live = replace(live, blob=outcome.blob, redacted=redacted)
        return replace(attempted, error=error, outcome=outcome, live=live)

    async def _as_object(
        self, tenant: str, call: str, what: str, outcome: CallOutcome, data: bytes
    ) -> CallOutcome:
        blob = call_blob(tenant, call, what, data)
        try:
            await self._store(blob, data)
        except HeadraceError as e:
            log.error("an outcome is recorded without its body", extra={"call": call, "reason": str(e)[:200]})  # noqa: TRY400
            return replace(outcome, body=None, omitted=e.code)
        crash_point("outcome-object-stored")
        return replace(outcome, body=None, blob=blob)

    async def _store(self, blob: Blob, data: bytes) -> None:
        until = time.monotonic() + STORE_WITHIN_S
        attempt = 0
        while True:
            left = until - time.monotonic()
            try:
                async with asyncio.timeout(max(0.1, left)):
                    await self._objects.put(blob, data)
            except (Unavailable, TimeoutError):
                delay = backoff_s(attempt)
                attempt += 1
                if delay >= until - time.monotonic():
                    raise Unavailable("the object store does not answer", code="object_store_away") from None
                await asyncio.sleep(delay)
            else:
                return

    # --- requests ----------------------------------------------------------------------------------
    async def request(self, asked: Asked) -> Blob | None:
        """Keep the body of a call that is about to be made, if that is asked for.

        Raise `Refused` if the store has no room for it, `Unavailable` if it is away: then the call waits.
        """
        return await self._request(asked) if self._requests else None

    async def _request(self, asked: Asked) -> Blob:
        data = self._shown(asked)
        blob = call_blob(asked.message.tenant, asked.call, "request", data)
        try:
            await self._store(blob, data)
        except Unavailable:
            raise
        except HeadraceError as e:
            raise Refused(f"the call's body cannot be kept: {e}", code="not_captured") from None
        crash_point("request-object-stored")
        return blob

    async def shown(self, asked: Asked) -> dict[str, Any]:
        """What a person who has to approve sees of a call, as fields of its evidence."""
        data = self._shown(asked)
        if len(data) <= SHOWN_BYTES:
            return {"request": request_of(asked), "body": msgspec.json.decode(data)}
        return {"request": replace(request_of(asked), body=await self._request(asked))}

    def _shown(self, asked: Asked) -> bytes:
        try:
            body = self._redactor.live(asked.body.value, msgspec.json.encode(asked.body.value))
            return msgspec.json.encode(self._redactor.kept(body))
        except RecursionError:
            raise Refused("the call's body is nested too deep to be kept", code="not_captured") from None

    # --- answers -----------------------------------------------------------------------------------
    async def whole(self, answer: CallAnswer) -> CallAnswer:
        """`answer` with the body of its outcome, if that lies in an object and fits into a message.

        A body that does not fit is left to whoever wants it: `blob` says where it lies.
        """
        outcome = answer.outcome
        blob = outcome.get("blob") if outcome else None
        if outcome is None or blob is None:
            return answer
        blob = blob if isinstance(blob, Blob) else msgspec.convert(blob, Blob)
        fits = blob.size + MARGIN <= self._mesh.max_payload
        if fits == (outcome.get("body") is not None):
            return answer
        if not fits:
            return replace(answer, outcome={k: v for k, v in outcome.items() if k != "body"})
        try:
            body = msgspec.json.decode(await self._objects.get(blob))
        except (HeadraceError, msgspec.MsgspecError) as e:
            log.warning(
                "an outcome's object is not there", extra={"call": answer.call_id, "reason": str(e)[:200]}
            )
            return answer
        return replace(answer, outcome=outcome | {"body": body})


class CapturingDialer:
    """A dialer whose attempts are captured: what comes out of it may be kept.

    `used` is told how many tokens a call took, None where nobody knows.
    """

    def __init__(
        self, dialer: Dialer, capture: Capture, used: Callable[[str, str, int | None], None]
    ) -> None:
        self._dialer = dialer
        self._capture = capture
        self._used = used

    async def dial(self, order: Order) -> Attempted:
        """Make one attempt, to its end or its time-out."""
        attempted = await self._dialer.dial(order)
        tokens = None if attempted.seen not in (Seen.NOT_SENT, Seen.REFUSED, Seen.THROTTLED) else 0
        if attempted.outcome is not None:
            tokens = attempted.usage.input_tokens + attempted.usage.output_tokens
        self._used(order.tenant, order.call, tokens)
        return await self._capture.attempted(order.tenant, order.call, order.attempt, attempted)

    async def resolve(self, callee: Callee, view: CallView) -> Attempted | None:
        """What became of the last attempt of a call."""
        found = await self._dialer.resolve(callee, view)
        if found is None:
            return None
        return await self._capture.attempted(view.tenant, view.call, view.last.intent.attempt, found)


def _kept(text: Any, value: str | None, limit: int = 256) -> str | None:
    return None if value is None else text(value)[:limit]
