"""The edge: core NATS requests under `hr.api.*`, by the NATS micro protocol.

Exactly one reply to each request, always a JSON body, errors too. Handlers run concurrently and
bounded; an exception's text reaches the caller only if it is one of ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
import nats.micro
from nats.micro.request import Request
from nats.micro.service import EndpointConfig, ServiceConfig

from headrace.contracts.errors import (
    Conflict,
    HeadraceError,
    InvalidInput,
    NotFound,
    Refused,
    Unavailable,
    Undecodable,
)
from headrace.contracts.names import TOKEN_PATTERN
from headrace.mesh.connection import Mesh

log = logging.getLogger("headrace.mesh.api")

MAX_CONCURRENT = 64
_NAMES = (
    f"Expected `str` matching regex {TOKEN_PATTERN!r}",
    "a name has 1 to 128 of the characters A-Z a-z 0-9 _ -",
)
"""A pattern tells a person nothing."""
_STATUS: tuple[tuple[type[HeadraceError], str], ...] = (
    (InvalidInput, "400"), (Undecodable, "400"), (NotFound, "404"), (Conflict, "409"), (Refused, "422"),
    (Unavailable, "503"),
)  # fmt: skip
_BY_STATUS = {
    "400": InvalidInput,
    "404": NotFound,
    "409": Conflict,
    "422": Refused,
    "503": Unavailable,
    "504": Unavailable,
}

Req = TypeVar("Req")
Handler = Callable[[Req, Mapping[str, str]], Awaitable[Any]]
NamedHandler = Callable[[str, bytes, Mapping[str, str]], Awaitable[Any]]


class ApiServer:
    """The endpoints of one service; `nats service ls` finds it by `name`."""

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        *,
        version: str = "0.1.0",
        description: str = "",
        max_concurrent: int = MAX_CONCURRENT,
    ) -> None:
        self._mesh = mesh
        self._max_concurrent = max_concurrent
        self._config = ServiceConfig(
            name=name, version=version, description=description, stats_handler=self._stats, metadata={}
        )
        self._endpoints: list[EndpointConfig] = []
        self._service: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors = 0

    def endpoint(
        self, name: str, request_type: type[Req], handler: Handler[Req], *, timeout_s: float = 15.0
    ) -> None:
        """Serve `hr.api.<name>`: requests are decoded into `request_type`, what `handler` returns is encoded."""
        decode = msgspec.json.Decoder(request_type).decode

        async def work(request: Request) -> Any:
            try:
                body = decode(request.data or b"{}")
            except (msgspec.MsgspecError, ValueError, RecursionError) as e:
                why = "not UTF-8" if isinstance(e, UnicodeDecodeError) else str(e)[:300].replace(*_NAMES)
                msg = f"request of {name} is wrong: {why}"
                raise InvalidInput(msg) from None
            return await handler(body, request.headers or {})

        self._add(name, self._mesh.subjects.api(name), work, timeout_s)

    def endpoint_of_each(self, name: str, handler: NamedHandler, *, timeout_s: float = 15.0) -> None:
        """Serve `hr.api.<name>.<token>` for every token: `handler` gets the token, and the bytes as they came."""

        async def work(request: Request) -> Any:
            token = request.subject.rpartition(".")[2]
            return await handler(token, bytes(request.data or b""), request.headers or {})

        self._add(name, f"{self._mesh.subjects.api(name)}.*", work, timeout_s)

    def _add(
        self, name: str, subject: str, work: Callable[[Request], Awaitable[Any]], timeout_s: float
    ) -> None:
        async def serve(request: Request) -> None:
            # nats.micro awaits one handler at a time; a task for each keeps a slow one from blocking others.
            if len(self._tasks) >= self._max_concurrent:
                await self._error(request, Unavailable(f"{name} is busy: try again", code="busy"))
                return
            task = asyncio.get_running_loop().create_task(self._answer(name, request, work, timeout_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._endpoints.append(EndpointConfig(name=name.replace(".", "-"), subject=subject, handler=serve))

    async def start(self) -> None:
        """Begin to serve."""
        self._service = await nats.micro.add_service(self._mesh.nc, self._config)
        for endpoint in self._endpoints:
            await self._service.add_endpoint(endpoint)
        await self._mesh.flush()  # the broker knows the subscriptions from here on

    async def stop(self) -> None:
        """Take no more requests, answer those in hand."""
        if self._service is not None and not self._mesh.nc.is_closed:
            await self._service.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        self._service = None

    def _stats(self, _endpoint: object) -> dict[str, int]:
        return {"in_flight": len(self._tasks), "errors": self._errors}

    async def _answer(
        self,
        name: str,
        request: Request,
        work: Callable[[Request], Awaitable[Any]],
        timeout_s: float,
    ) -> None:
        # Published, not requested: nobody waits for an answer, so nothing is done.
        if not request._msg.reply:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  (there is no public way)
            return
        try:
            async with asyncio.timeout(timeout_s):
                reply = await work(request)
            data = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
            if len(data) + 512 > self._mesh.max_payload:
                msg = f"the answer has {len(data)} bytes, more than the broker carries: ask for less"
                raise Refused(msg, code="too_large")
            await request.respond(data)
        except TimeoutError:
            await self._error(request, Unavailable(f"{name} took longer than {timeout_s:g} s"), status="504")
        except HeadraceError as e:
            await self._error(request, e)
        except Exception:
            log.exception("request failed", extra={"endpoint": name})
            await self._error(
                request, HeadraceError("internal error; the service's log has it", code="internal")
            )

    async def _error(self, request: Request, error: HeadraceError, *, status: str = "") -> None:
        self._errors += 1
        code = status or next((s for kind, s in _STATUS if isinstance(error, kind)), "500")
        body = {"code": error.code, "message": str(error)[:4_000]}
        if isinstance(error, InvalidInput):
            body |= {k: v for k, v in (("field", error.field), ("line", error.line)) if v is not None}
        try:
            one_line = " ".join(str(error).split())[:200].encode("ascii", "replace").decode()
            await request.respond_error(code, one_line, msgspec.json.encode({"error": body}))
        except Exception as e:  # noqa: BLE001  (the asker is gone or the broker away: nothing to tell anybody)
            log.warning("an answer could not be sent", extra={"reason": str(e)[:200]})


async def call_api(
    mesh: Mesh, name: str, request: Any, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None
) -> bytes:
    """Ask `hr.api.<name>` and return the body; raise the error of the answer as the class that it was."""
    data = request if isinstance(request, bytes) else msgspec.json.encode(request)
    try:
        answer = await mesh.request(mesh.subjects.api(name), data, timeout_s=timeout_s, headers=headers)
    except Unavailable as e:
        if e.code == "no_responders":
            msg = f"no service answers {mesh.subjects.api(name)}: is it running?"
            raise Unavailable(msg, code="no_responders") from None
        raise
    status = (answer.headers or {}).get("Nats-Service-Error-Code")
    if status:
        raise _as_error(status, answer.data)
    return answer.data


def _as_error(status: str, data: bytes) -> HeadraceError:
    try:
        body = msgspec.json.decode(data)["error"]
        code, message = str(body["code"]), str(body["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return HeadraceError(f"the service answered with error {status[:10]} and no reason")
    kind = _BY_STATUS.get(status, HeadraceError)
    if kind is InvalidInput:
        return InvalidInput(message, field=body.get("field"), line=body.get("line"), code=code)
    return kind(message, code=code)
