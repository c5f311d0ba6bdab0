"""HTTP over llama.cpp's socket file: short questions on a connection that is kept, and one connection for each item.

An item is a connection since that is what can be ended at any time, in the midst of its prompt too, and frees its
thread at once. The binding's own calls ask only at a token whether to stop, so a drain would wait for every prompt.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Generator
from typing import Any, Final

import msgspec

from headrace.inference_worker.engines.llamacpp_errors import failure
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed

COUNT_TIMEOUT_S: Final = 30.0
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class Stream:
    """One item under way. `events` is for one thread; `stop` may be called from any, at any time."""

    def __init__(self, path: str, headers: dict[str, str], target: str, body: bytes) -> None:
        self._path = path
        self._headers = headers | {"Connection": "close"}
        self._target = target
        self._body = body
        self._socket: socket.socket | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def events(self) -> Generator[bytes]:
        """The JSON of each event, until the item ends or is stopped; a refusal is one event with `error`.

        Raise `EngineDied` if the server does not answer. One that goes away in the midst of an answer ends it early.
        """
        try:
            yield from self._events()
        except (OSError, http.client.HTTPException) as e:
            if not self._stopped:
                raise EngineDied(f"llama.cpp ended an item in the middle: {e!r}") from e

    def stop(self) -> None:
        """End the item: `events` returns at once."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                _shut(self._socket)

    def _events(self) -> Generator[bytes]:
        # Without a timeout: an item may wait long for its first token, and the worker's watchdog counts tokens.
        connection = SocketConnection(self._path, None)
        try:
            connection.connect()
            with self._lock:
                if self._stopped:
                    return
                self._socket = connection.sock
            connection.request("POST", self._target, self._body, self._headers)
            # It owns the socket from here on, and closes it at the end of the body.
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    yield response.read()
                    return
                for line in response:
                    data = line[len(_DATA) :].strip() if line.startswith(_DATA) else b""
                    if data and data != _DONE:
                        yield data
        finally:
            with self._lock:
                self._socket = None
            connection.close()


class Questions:
    """Short requests from one thread, on a connection that is kept."""

    def __init__(self, path: str, headers: dict[str, str]) -> None:
        self._path = path
        self._headers = headers
        self._connection: SocketConnection | None = None

    def get(self, target: str) -> Any:
        """The decoded answer. Raise `ItemFailed` for what it refuses, `EngineDied` if it does not answer."""
        return self._call("GET", target, None)

    def post(self, target: str, body: dict[str, Any]) -> Any:
        """As `get`, with a JSON body."""
        return self._call("POST", target, msgspec.json.encode(body))

    def close(self) -> None:
        """Close the connection; a later question opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, method: str, target: str, body: bytes | None) -> Any:
        try:
            status, data = self._exchange(method, target, body)
        except (OSError, http.client.HTTPException):
            # It closes a connection after some requests, which shows only when the next one is sent.
            self.close()
            try:
                status, data = self._exchange(method, target, body)
            except (OSError, http.client.HTTPException) as e:
                self.close()
                raise EngineDied(f"llama.cpp does not answer on its socket: {e!r}") from e
        if status != http.HTTPStatus.OK:
            raise _refusal(data)
        return msgspec.json.decode(data)

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = SocketConnection(self._path, COUNT_TIMEOUT_S)
        self._connection.request(method, target, body, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()


class SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost")
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # With a timeout, connecting would fail where many connect at once, rather than wait for its turn.
        self.sock.connect(self._path)
        self.sock.settimeout(self._timeout_s)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # The other side was faster.
        return


def _refusal(data: bytes) -> Exception:
    try:
        error: Any = msgspec.json.decode(data)["error"]
        message, kind, code = str(error["message"]), str(error["type"]), int(error["code"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return ItemFailed("engine_error", f"llama.cpp: {data[:200].decode(errors='replace')}")
    refused = failure(message, kind, code)
    if isinstance(refused, ItemFailed) and refused.error.field is None:
        # What is counted here is a prompt: a template that refuses it is the prompt's fault, not a parameter's.
        return ItemFailed("invalid_prompt", f"llama.cpp cannot take the prompt: {message}", field="prompt")
    return refused
