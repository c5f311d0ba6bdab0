"""Attempts at callees that speak HTTP: OpenAI-compatible servers, and declared tools.

httpx retries nothing here and follows no redirect: one attempt is one request. Whether a byte of it was written is
taken from the connection's own trace, since that is what tells "it did not happen" from "nobody knows". A connection
that stood idle may have been closed by the other side; a request that is written to it then looks exactly like one that
was read and lost. So connections are kept for a moment only, and for money and destructive calls not at all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from headrace.contracts.account import CallView
from headrace.contracts.errors import HeadraceError
from headrace.contracts.ledger import DANGEROUS, CallError, CallOutcome, CallTimes, CallUsage
from headrace.gateway.awake import within
from headrace.gateway.callees import Callee
from headrace.gateway.chat_stream import ChatStream, usage_of
from headrace.gateway.dialing import Attempted, Order
from headrace.gateway.plain import fields, items, json_or_none, text
from headrace.gateway.verdicts import Seen

OK, NOT_FOUND, TOO_MANY_REQUESTS = 200, 404, 429
MAX_ANSWER_BYTES = 32 << 20
KEPT_S = 2.0
"""How long an idle connection is kept."""
_REFUSED = frozenset({400, 401, 402, 403, 404, 405, 406, 410, 411, 413, 414, 415, 422, 431, 451})
"""Whole answers that say: it was not done. Other 4xx (408, 409, 425, …) say nothing certain."""
_REQUEST_IDS = ("x-request-id", "request-id", "x-amzn-requestid")


class HttpDialer:
    """Makes attempts over HTTP. Close it at the end."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEPT_S)
        self._kept = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=0, limits=limits))
        once = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._once = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=0, limits=once))

    async def close(self) -> None:
        """Close all connections."""
        await self._kept.aclose()
        await self._once.aclose()

    async def dial(self, order: Order) -> Attempted:
        """One request, to its end or its time-out."""
        flight = _Flight(order)
        client = self._once if order.callee.effect in DANGEROUS else self._kept
        try:
            request = self._request(client, order, flight)
        except HeadraceError as e:
            return Attempted(
                seen=Seen.NOT_SENT, error=CallError(type=e.code, message=str(e)), request_sent=False
            )
        except (httpx.InvalidURL, ValueError) as e:
            error = CallError(type="invalid_url", message=f"callee {order.callee.name}: {e}"[:2_048])
            return Attempted(seen=Seen.NOT_SENT, error=error, request_sent=False)
        left_s = max(0.0, order.until_us / 1e6 - time.time())
        try:
            return await within(flight.make(client, request), left_s)
        except TimeoutError:
            return flight.broken("timeout", f"no answer within {order.callee.settings.timeout_s:g} s")
        except httpx.TimeoutException:
            return flight.broken(
                "timeout", f"no connection within {order.callee.settings.connect_timeout_s:g} s"
            )
        except (httpx.HTTPError, httpx.StreamError, OSError) as e:
            return flight.broken("connection", f"{type(e).__name__}: {e}")

    def _request(self, client: httpx.AsyncClient, order: Order, flight: _Flight) -> httpx.Request:
        settings, body = order.callee.settings, order.body.value
        path = settings.path or ("/chat/completions" if settings.kind == "openai" else "")
        headers = {"content-type": "application/json", "accept": "application/json"}
        if order.traceparent:
            headers["traceparent"] = order.traceparent
        if (secret := order.callee.api_key()) is not None:
            headers["authorization"] = f"Bearer {secret}"
        if order.remote_key is not None:
            headers[settings.idempotency_header] = order.remote_key
        if order.body.stream:
            headers["accept"] = "text/event-stream"
            asked = fields(body)
            body = {**asked, "stream_options": {**fields(asked.get("stream_options")), "include_usage": True}}
        return client.build_request(
            settings.method,
            settings.base_url.rstrip("/") + path,
            content=None if settings.method == "GET" else msgspec.json.encode(body),
            headers=headers,
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s, pool=settings.connect_timeout_s),
            extensions={"trace": flight.trace},
        )

    async def resolve(self, callee: Callee, view: CallView) -> Attempted | None:
        """Ask the callee what became of the call: 200 is its outcome, 404 "not applied", everything else unknown."""
        resolver, intent = callee.settings.resolver, view.last.intent
        if resolver is None:
            return None
        path = resolver.path.replace("{key}", intent.remote_key or "").replace("{call}", view.call)
        headers: dict[str, str] = {}
        try:
            if (secret := callee.api_key()) is not None:
                headers["authorization"] = f"Bearer {secret}"
            response = await self._once.get(
                callee.settings.base_url.rstrip("/") + path,
                headers=headers,
                timeout=callee.settings.connect_timeout_s,
            )
        except (HeadraceError, httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            return None
        if response.status_code == NOT_FOUND:
            return Attempted(seen=Seen.NOT_SENT, error=CallError(type="not_applied", status=404))
        if response.status_code != OK or len(response.content) > MAX_ANSWER_BYTES:
            return None
        value = json_or_none(response.content)
        return Attempted(
            seen=Seen.ANSWERED,
            outcome=_outcome(response.status_code, value, response.content, response.headers),
            usage=usage_of(value) or CallUsage(source="estimated"),
        )


class _Flight:
    """What is seen of one request on its way."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._sent_us = self._first_us = 0
        self._stream: ChatStream | None = None
        self._head: tuple[int, Mapping[str, str]] | None = None

    async def trace(self, event: str, _info: Mapping[str, Any]) -> None:
        """Called by the connection at each of its steps."""
        if event.endswith("send_request_headers.started") and not self._sent_us:
            self._sent_us = _now_us()

    async def make(self, client: httpx.AsyncClient, request: httpx.Request) -> Attempted:
        """Send the request and read its answer."""
        response = await client.send(request, stream=True)
        try:
            return await self.read(response)
        finally:
            await response.aclose()

    async def read(self, response: httpx.Response) -> Attempted:
        """Read the answer, bounded, and say what it means."""
        self._first_us = _now_us()
        self._head = (response.status_code, response.headers)
        if response.is_success and "text/event-stream" in response.headers.get("content-type", ""):
            return await self._read_stream(response)
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_bytes():
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                return self.broken("answer_too_large", f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
            parts.append(part)
        return self._whole(response, b"".join(parts))

    async def _read_stream(self, response: httpx.Response) -> Attempted:
        stream = self._stream = ChatStream(self._order.body.input_tokens)
        size = 0
        async for line in response.aiter_lines():
            size += len(line)
            if size > MAX_ANSWER_BYTES:
                return self.broken("answer_too_large", f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
            stream.take(line)
            if stream.done:
                break
        if not stream.done:
            return self.broken("cut", "the stream ended before its last event")
        return Attempted(
            seen=Seen.ANSWERED,
            outcome=self._streamed(stream, partial=False),
            usage=stream.usage(),
            times=self._times(),
        )

    def _whole(self, response: httpx.Response, data: bytes) -> Attempted:
        status, times = response.status_code, self._times()
        value = json_or_none(data)
        if response.is_success:
            usage = usage_of(value) or self._assumed()
            outcome = _outcome(status, value, data, response.headers)
            return Attempted(seen=Seen.ANSWERED, outcome=outcome, usage=usage, times=times)
        error = CallError(type=f"http_{status}", message=_message(value, data), status=status)
        if status == TOO_MANY_REQUESTS:
            return Attempted(
                seen=Seen.THROTTLED, error=error, retry_after_s=_retry_after(response.headers), times=times
            )
        seen = Seen.REFUSED if status in _REFUSED or response.is_redirect else Seen.SERVER_ERROR
        return Attempted(seen=seen, error=error, retry_after_s=_retry_after(response.headers), times=times)

    def broken(self, type_: str, message: str) -> Attempted:
        """The attempt ended without a whole answer; how far it got decides what that means."""
        sent = bool(self._sent_us)
        error = CallError(type=type_, message=f"callee {self._order.callee.name}: {message}"[:2_048])
        if not sent:
            return Attempted(seen=Seen.NOT_SENT, error=error, request_sent=False, times=self._times())
        if self._stream is not None and self._stream.chunks:
            return Attempted(
                seen=Seen.CUT,
                outcome=self._streamed(self._stream, partial=True),
                usage=self._stream.usage(),
                error=error,
                times=self._times(),
            )
        return Attempted(seen=Seen.BROKEN, error=error, times=self._times())

    def _streamed(self, stream: ChatStream, *, partial: bool) -> CallOutcome:
        status, headers = self._head or (200, {})
        body = stream.completion()
        return CallOutcome(
            status=status, body=body, digest=_digest(msgspec.json.encode(body)), partial=partial, chunks=stream.chunks,
            finish_reason=stream.finish_reason, provider_request_id=_first(headers, _REQUEST_IDS),
            response_id=text(body.get("id")),
        )  # fmt: skip

    def _assumed(self) -> CallUsage:
        """The callee does not say: nothing for a tool, the worst case for a model that is paid by tokens."""
        if self._order.callee.settings.kind == "http":
            return CallUsage(source="counted")
        body = self._order.body
        return CallUsage(
            input_tokens=body.input_tokens, output_tokens=body.max_output_tokens or 0, source="assumed"
        )

    def _times(self) -> CallTimes:
        return CallTimes(sent_us=self._sent_us, first_byte_us=self._first_us, done_us=_now_us())


def _outcome(status: int, value: Any, data: bytes, headers: Mapping[str, str]) -> CallOutcome:
    answer = fields(value)
    first = fields(next(iter(items(answer.get("choices"))), None))
    return CallOutcome(
        status=status,
        body=data.decode("utf-8", "replace") if value is None and data else value,
        digest=_digest(data),
        finish_reason=text(first.get("finish_reason"), 64),
        provider_request_id=_first(headers, _REQUEST_IDS),
        response_id=text(answer.get("id")),
    )


def _message(value: Any, data: bytes) -> str:
    """What the callee says of its error, bounded; it may be anything."""
    said = text(fields(fields(value).get("error")).get("message"), 2_048)
    return said or data[:500].decode("utf-8", "replace")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return min(86_400.0, max(0.0, float(headers.get("retry-after", ""))))
    except ValueError:
        return None


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((headers[name][:256] for name in names if headers.get(name)), None)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _now_us() -> int:
    return time.time_ns() // 1_000
