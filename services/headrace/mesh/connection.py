"""One connection to the broker, with its own inbox prefix, endless reconnects and a reply multiplexer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import re
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Self

import nats.errors
from nats.aio.msg import Msg
from nats.nuid import NUID

from headrace.contracts.errors import Unavailable
from headrace.contracts.names import check_token
from headrace.contracts.subjects import Subjects
from headrace.contracts.topology import Topology
from headrace.mesh import wire
from headrace.mesh.settings import Settings
from headrace.mesh.wire import OutMessage

log = logging.getLogger("headrace.mesh")

FIRST_CONNECT_S = 5.0
MAX_BACKOFF_S = 5.0
NO_RESPONDERS = "503"
JS_API = "$JS.API."
_DENIED = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)


def backoff_s(attempt: int, *, base: float = 0.05, cap: float = MAX_BACKOFF_S) -> float:
    """Delay before try `attempt` (0, 1, ...): exponential with full jitter in its upper half, in seconds."""
    full = min(cap, base * 2.0 ** min(attempt, 16))
    return full * random.uniform(0.5, 1.0)


class Mesh:
    """A connected client of the mesh: what every service and producer holds exactly one of.

    `closed` is set once the connection is closed for good; a service that sees it ends and is
    restarted. While the broker is away the connection tries again for ever, with back-off and one log
    line for each try.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = check_token("name", name)
        self.subjects = Subjects(settings.prefix)
        self.topology = Topology(
            self.subjects,
            ack_wait_s=settings.ack_wait_s,
            max_bytes=settings.max_bytes,
            mailbox_messages=settings.mailbox_messages,
        )
        self.nc: Any = wire.Connection()
        self.closed = asyncio.Event()
        self.losses = 0
        """How often the connection was lost: what was delivered before a loss may be unknown to the broker after it."""
        self.read_by_subject: set[str] = set()
        """Streams of which this user may read some subjects only, as far as that was found out."""
        self._reconnected: list[Callable[[], None]] = []
        self._inbox = f"_INBOX.{self.name}.{NUID().next().decode()}"
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._api_requests: dict[str, str] = {}
        """Subjects of the requests of JetStream's API that wait, by reply."""
        self._attempts = 0
        self._down = True
        self._last_error: Exception | None = None

    @classmethod
    async def connect(cls, settings: Settings, *, name: str) -> Self:
        """Connect and return; raise `Unavailable` naming the address if nobody answers for five seconds."""
        mesh = cls(settings, name)
        await mesh._open()
        return mesh

    async def _open(self) -> None:
        s = self.settings
        options: dict[str, Any] = {
            "servers": s.url.split(","),
            "name": f"headrace-{self.name}",
            "inbox_prefix": f"_INBOX.{self.name}",
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": 0.05,
            "ping_interval": 20,
            "connect_timeout": 2,
            "pending_size": 8 << 20,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnect,
            "reconnected_cb": self._on_reconnect,
            "closed_cb": self._on_closed,
            "reconnect_to_server_handler": self._pick_server,
            "user_credentials": s.creds,
            "user": s.user,
            "password": s.password,
            "token": s.token,
        }
        try:
            async with asyncio.timeout(FIRST_CONNECT_S):
                await self.nc.connect(**options)
                # The library takes a connection that is closed in the middle of its greeting (wrong credentials, say)
                # for made, and goes on trying behind our back: an answer tells.
                await self.nc.flush(FIRST_CONNECT_S)
        except (OSError, TimeoutError, nats.errors.Error) as e:
            with contextlib.suppress(OSError, nats.errors.Error):
                wire.discard(self.nc)
                await self.nc.close()
            reason = self._last_error or e
            msg = f"no broker answers at {_shown(s.url)}: {str(reason) or type(reason).__name__}"
            raise Unavailable(msg) from None
        self._down = False
        await self.nc.subscribe(
            f"{self._inbox}.r.*", cb=self._on_reply, pending_msgs_limit=0, pending_bytes_limit=0
        )

    # --- properties --------------------------------------------------------------------------------
    @property
    def max_payload(self) -> int:
        """Largest payload plus headers that the broker takes, in bytes."""
        return int(self.nc.max_payload)

    @property
    def connected(self) -> bool:
        """Whether TCP is up right now (not: whether anything is received)."""
        return bool(self.nc.is_connected)

    @property
    def server_version(self) -> str:
        """The broker's version, as it says itself."""
        return str(self.nc.connected_server_version)

    def inbox(self) -> str:
        """A fresh subject under this connection's own prefix."""
        return f"{self._inbox}.i{next(self._numbers)}"

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each reconnect: pulls of the old connection are gone then."""
        self._reconnected.append(callback)

    def off_reconnect(self, callback: Callable[[], None]) -> None:
        """Undo `on_reconnect`."""
        if callback in self._reconnected:
            self._reconnected.remove(callback)

    # --- requests ----------------------------------------------------------------------------------
    async def request(
        self, subject: str, data: bytes, *, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None
    ) -> Msg:
        """Ask and return the one reply; `Unavailable` if nobody serves `subject` or the time is over."""
        block = wire.header_block(headers) if headers else b""
        return await self.ask(OutMessage(subject, data, block), timeout_s=timeout_s)

    async def ask(self, message: OutMessage, *, timeout_s: float = 5.0, more_headers: bytes = b"") -> Msg:
        """`request` for a prepared message."""
        wire.check_size(message, self.max_payload, len(more_headers))
        future, reply = self._expect()
        if message.subject.startswith(JS_API):
            self._api_requests[reply] = message.subject
        try:
            await wire.send(self.nc, (wire.frame(message, reply, more_headers),))
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            msg = f"no answer on {message.subject} within {timeout_s:g} s"
            raise Unavailable(msg) from None
        finally:
            self._waiting.pop(reply, None)
            self._api_requests.pop(reply, None)
        if answer.headers and answer.headers.get("Status") == NO_RESPONDERS:
            msg = f"nobody serves {message.subject}"
            raise Unavailable(msg, code="no_responders")
        return answer

    @contextlib.contextmanager
    def listen(self) -> Generator[tuple[str, asyncio.Future[Msg]]]:
        """A subject of this connection's own, and the first message that comes on it while the block lasts."""
        future, reply = self._expect()
        try:
            yield reply, future
        finally:
            self._waiting.pop(reply, None)

    def _expect(self) -> tuple[asyncio.Future[Msg], str]:
        reply = f"{self._inbox}.r.{next(self._numbers)}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = future
        return future, reply

    async def _on_reply(self, msg: Msg) -> None:
        future = self._waiting.pop(msg.subject, None)
        if future is not None and not future.done():
            future.set_result(msg)

    async def publish(self, message: OutMessage, reply: str = "") -> None:
        """Send without waiting for anything (acks, in-progress, reports). Not for work: that wants a PubAck."""
        wire.check_size(message, self.max_payload)
        await wire.send(self.nc, (wire.frame(message, reply),))

    async def publish_frames(self, frames: list[bytes]) -> None:
        """Send prepared frames in one piece."""
        await wire.send(self.nc, frames)

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return once the broker has read all that was sent before; `Unavailable` after `timeout_s`."""
        try:
            await wire.write_out(self.nc)  # the library's ping would overtake what is buffered
            await self.nc.flush(timeout_s)
        except (nats.errors.Error, TimeoutError) as e:
            msg = f"the broker did not answer a ping within {timeout_s:g} s"
            raise Unavailable(msg) from e

    async def subscribe(self, subject: str, heard: Callable[[str], None]) -> None:
        """Call `heard` with the subject of each message that matches, for as long as the connection lives.

        A hint and no more: what is sent while the connection is lost is not heard.
        """

        async def on_message(msg: Msg) -> None:
            heard(msg.subject)

        await self.nc.subscribe(subject, cb=on_message)

    # --- life --------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Write what is buffered, if the broker is there, and close; safe to call twice."""
        if not self.nc.is_closed:
            await wire.write_out(self.nc)
            wire.discard(self.nc)  # the library would write it to a lost connection, and raise
            await self.nc.close()
        self.closed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _pick_server(self, servers: list[Any], _info: dict[str, Any]) -> tuple[Any, float]:
        """Choose the next server and how long to wait before it: the back-off that nats-py lacks."""
        attempt, self._attempts = self._attempts, self._attempts + 1
        delay = 0.0 if attempt == 0 else backoff_s(attempt - 1)
        if attempt:
            log.warning("broker is away", extra={"attempt": attempt, "retry_in_s": round(delay, 2)})
        return servers[attempt % len(servers)], delay

    async def _on_error(self, error: Exception) -> None:
        # While connecting every failed try would be reported here too; `_pick_server` logs those.
        # What the broker says of credentials is the reason, and the end of file that follows it is not.
        if "authorization" not in str(self._last_error).lower():
            self._last_error = error
        if not self._down and not self._fail_denied(str(error)):
            log.warning("connection trouble", extra={"reason": f"{type(error).__name__}: {error}"[:300]})

    def _fail_denied(self, error: str) -> bool:
        """Tell those who ask JetStream's API what they may not, at once: such a request is never answered.

        A publish that wants a PubAck waits out its time all the same, since whoever sends it tries again.
        """
        denied = _DENIED.search(error)
        asked = {r: s for r, s in self._api_requests.items() if denied and s.lower() == denied[1].lower()}
        for reply, subject in asked.items():
            future = self._waiting.pop(reply, None)
            if future is not None and not future.done():
                future.set_exception(Unavailable(f"this user may not ask {subject}", code="denied"))
        return bool(asked)

    async def _on_disconnect(self) -> None:
        if not self.closed.is_set() and not self.nc.is_closed:
            self._down = True
        self.losses += 1
        # Whoever waits for an answer of the old connection would wait in vain until the time-out.
        self._fail_waiting("the connection was lost; whether the broker acted is not known")

    async def _on_reconnect(self) -> None:
        log.info("broker is back", extra={"attempts": self._attempts})
        self._attempts = 0
        self._down = False
        for callback in list(self._reconnected):
            callback()

    async def _on_closed(self) -> None:
        self.closed.set()
        self._fail_waiting("the connection to the broker is closed")

    def _fail_waiting(self, why: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(why))
        self._waiting.clear()


def _shown(url: str) -> str:
    """`url` without credentials."""
    return ",".join(part.rsplit("@", 1)[-1] for part in url.split(","))
