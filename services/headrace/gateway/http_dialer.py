"""Attempts at callees that speak HTTP: OpenAI-compatible servers, and declared tools.

Nothing is retried here and no redirect followed: one attempt is one request. The connection itself says when it begins
to write, since that is what tells "it did not happen" from "nobody knows". A connection
that stood idle may have been closed by the other side; a request that is written to it then looks exactly like one that
was read and lost. So connections are kept for a moment only, and for money and destructive calls not at all.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
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
from headrace.gateway.http1 import Answer, Http1
from headrace.gateway.http_connection import ANSWERED, HEAD_SENT, SENDING, SENT, Request
from headrace.gateway.plain import fields, items, json_or_none, text
from headrace.gateway.verdicts import Seen
from headrace.mesh.crash import armed, crash_point
from headrace.mesh.redact import Redactor

OK, NOT_FOUND, TOO_MANY_REQUESTS = 200, 404, 429
MAX_ANSWER_BYTES = 32 << 20
"""Of an answer to a resolver's question."""
MAX_ERROR_BYTES = 64 << 10
"""What is read of an answer that is an error."""
TOO_LARGE = "answer_too_large"
KEPT_S = 2.0
"""How long an idle connection is kept."""
_REFUSED = frozenset({400, 401, 402, 403, 404, 405, 406, 410, 411, 413, 414, 415, 422, 431, 451})
"""Whole answers that say: it was not done. Other 4xx (408, 409, 425, …) say nothing certain."""
_HEADERS = {
    "content-type": "application/json",
    "accept": "application/json",
    "accept-encoding": "identity",
    "user-agent": "headrace",
}
_url = functools.lru_cache(maxsize=1_024)(httpx.URL)
_REQUEST_IDS = ("x-request-id", "request-id", "x-amzn-requestid")


class HttpDialer:
    """Makes attempts over HTTP. Close it at the end."""

    def __init__(self, redactor: Redactor | None = None) -> None:
        self._redactor = redactor or Redactor()
        self._kept = Http1(kept=256, kept_s=KEPT_S)
        self._once = Http1(kept=0)
        self._asking = httpx.AsyncClient(transport=self._once)

    async def close(self) -> None:
        """Close all connections."""
        await self._kept.aclose()
        await self._asking.aclose()

    async def dial(self, order: Order) -> Attempted:
        """One request, to its end or its time-out."""
        flight = _Flight(order, self._redactor)
        client = self._once if order.callee.effect in DANGEROUS else self._kept
        try:
            request = self._request(order, flight)
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

    def _request(self, order: Order, flight: _Flight) -> Request:
        settings, body = order.callee.settings, order.body.value
        path = settings.path or ("/chat/completions" if settings.kind == "openai" else "")
        headers = {**_HEADERS}
        if order.traceparent:
            headers["traceparent"] = order.traceparent
        if (secret := order.callee.api_key()) is not None:
            headers["authorization"] = f"Bearer {secret}"
        if order.remote_key is not None:
            headers[settings.idempotency_header.lower()] = order.remote_key
        if order.body.stream:
            headers["accept"] = "text/event-stream"
            asked = fields(body)
            body = {**asked, "stream_options": {**fields(asked.get("stream_options")), "include_usage": True}}
        url = _url(settings.base_url.rstrip("/") + path)
        data = b"" if settings.method == "GET" else msgspec.json.encode(body)
        raw = [(b"host", url.netloc), *((k.encode(), v.encode()) for k, v in headers.items())]
        if settings.method != "GET":
            raw.append((b"content-length", b"%d" % len(data)))
        return Request(
            method=settings.method,
            url=url,
            headers=raw,
            body=data,
            connect_s=settings.connect_timeout_s,
            step=flight.step,
            apart=armed(),
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
            response = await self._asking.get(
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

    def __init__(self, order: Order, redactor: Redactor) -> None:
        self._order = order
        self._redactor = redactor
        self._sent_us = self._first_us = 0
        self._stream: ChatStream | None = None
        self._head: tuple[int, Mapping[str, str]] | None = None

    def step(self, name: str) -> None:
        """Called by the connection at each of its steps."""
        if name == SENDING:
            self._sent_us = _now_us()
        elif name == HEAD_SENT:
            crash_point("call-half-sent")
        elif name == SENT:
            crash_point("call-sent")
        elif name == ANSWERED:
            crash_point("call-headers-seen")

    async def make(self, client: Http1, request: Request) -> Attempted:
        """Send the request and read its answer."""
        response = await client.send(request)
        try:
            return await self.read(response)
        finally:
            await response.aclose()

    async def read(self, response: Answer) -> Attempted:
        """Read the answer, bounded, and say what it means."""
        self._first_us = _now_us()
        self._head = (response.status_code, response.headers)
        if response.is_success and "text/event-stream" in response.headers.get("content-type", ""):
            return await self._read_stream(response)
        most = self._order.callee.settings.max_answer_bytes
        if not response.is_success:
            most = min(most, MAX_ERROR_BYTES)
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_bytes():
            size += len(part)
            parts.append(part)
            if size > most:
                break
        if size > most and response.is_success:
            return self._overlong(response.status_code)
        return self._whole(response, b"".join(parts))

    async def _read_stream(self, response: Answer) -> Attempted:
        stream = self._stream = ChatStream(self._order.body.input_tokens)
        lines = _Lines(self._order.callee.settings.max_answer_bytes)
        async for line in lines.of(response):
            stream.take(line)
            if stream.chunks:
                crash_point("call-mid-stream")
            if stream.done:
                break
        if lines.over:
            return self._overlong(response.status_code)
        if not stream.done:
            return self.broken("cut", "the stream ended before its last event")
        return Attempted(
            seen=Seen.ANSWERED,
            outcome=self._streamed(stream, partial=False),
            usage=stream.usage(),
            times=self._times(),
        )

    def _whole(self, response: Answer, data: bytes) -> Attempted:
        status, times = response.status_code, self._times()
        value = json_or_none(data)
        if response.is_success:
            usage = usage_of(value) or self._assumed()
            outcome = _outcome(status, value, data, response.headers)
            return Attempted(seen=Seen.ANSWERED, outcome=outcome, usage=usage, times=times)
        error = CallError(type=f"http_{status}", message=self._message(value, data), status=status)
        if status == TOO_MANY_REQUESTS:
            return Attempted(
                seen=Seen.THROTTLED, error=error, retry_after_s=_retry_after(response.headers), times=times
            )
        seen = Seen.REFUSED if status in _REFUSED or response.is_redirect else Seen.SERVER_ERROR
        return Attempted(seen=seen, error=error, retry_after_s=_retry_after(response.headers), times=times)

    def _overlong(self, status: int) -> Attempted:
        """The callee said that it did it, and more than is read: what came of a stream counts, else the worst."""
        most = self._order.callee.settings.max_answer_bytes
        message = f"callee {self._order.callee.name}: the answer has more than {most:,} bytes"
        stream = self._stream
        return Attempted(
            seen=Seen.OVERLONG,
            outcome=CallOutcome(status=status, partial=True, omitted=TOO_LARGE)
            if stream is None
            else self._streamed(stream, partial=True),
            usage=self._assumed() if stream is None else stream.usage(),
            error=CallError(type=TOO_LARGE, message=message, status=status),
            times=self._times(),
        )

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

    def _message(self, value: Any, data: bytes) -> str:
        """What the callee says of its error; it may be anything. Redacted before it is cut, or a part would pass."""
        said = text(fields(fields(value).get("error")).get("message"), MAX_ERROR_BYTES)
        if said:
            return self._redactor.text(said)[:2_048]
        return self._redactor.text(data.decode("utf-8", "replace"))[:500]

    def _times(self) -> CallTimes:
        return CallTimes(sent_us=self._sent_us, first_byte_us=self._first_us, done_us=_now_us())


class _Lines:
    """The lines of an answer, each at once; `over` is set when there were more bytes than are read."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.over = False

    async def of(self, response: Answer) -> AsyncIterator[str]:
        size, rest = 0, b""
        async for part in response.aiter_bytes():
            size += len(part)
            if size > self._most:
                self.over = True
                return
            *whole, rest = (rest + part).split(b"\n") if b"\n" in part else (rest + part,)
            for line in whole:
                yield line.rstrip(b"\r").decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")


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
