"""llama.cpp's server inside this process, by xllamacpp: loading, tokenising, and answering one item.

Its C++ side opens an HTTP listener that cannot be switched off. It is bound to a socket file in a folder that only
this user may enter, with a random key on top, and serves our own counting of tokens (`/tokenize`).
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.contracts.errors import InvalidInput, Unavailable
from headrace.inference_worker.engines.llamacpp_errors import failure
from headrace.inference_worker.engines.protocol import EngineDied, ItemFailed

GGUF_MAGIC: Final = b"GGUF"
COUNT_TIMEOUT_S: Final = 30.0


class LlamaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is loaded. `context`: tokens of one slot. `verbosity`: llama.cpp's log level (0: nothing,
    1: errors, 3: information) on standard error.
    """

    path: Path
    slots: int
    context: int
    threads: int
    batch: int
    gpu_layers: int
    verbosity: int


class LlamaServer:
    """A loaded model. `answer` blocks its thread until the item ends; llama.cpp batches what runs at once."""

    def __init__(self, settings: LlamaSettings) -> None:
        """Load the model: blocks, and holds the interpreter's lock, for as long as it takes."""
        _check_file(settings.path)
        # The path of a socket file is bounded at about 100 bytes, which a deep TMPDIR would exceed.
        base = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(prefix="headrace-", dir=base if len(base) < 60 else "/tmp")  # noqa: S108, PLR2004
        self._socket = os.path.join(self._folder, "llama.sock")  # noqa: PTH118 -- a string is what both sides take
        self._key = secrets.token_hex(16)
        try:
            self._server: Any = _native().Server(self._parameters(settings))
        except RuntimeError as e:
            self._remove_folder()
            raise Unavailable(
                f"llama.cpp could not load {settings.path}: {e} Is it a model that this version knows, and is there "
                "memory for it? The setting llamacpp.verbosity=3 shows its own log.",
                code="engine",
            ) from e
        self._connection: http.client.HTTPConnection | None = None
        try:
            meta = self._get("/v1/models")["data"][0]["meta"]
            slots = self._get("/slots")
            caps: dict[str, Any] = self._get("/props").get("chat_template_caps") or {}
        except BaseException:
            self.close()
            raise
        self.vocab_size = int(meta["n_vocab"])
        self.trained_context = int(meta.get("n_ctx_train") or 0)
        self.takes_tools = bool(caps.get("supports_tools"))
        self.context = min(int(slot["n_ctx"]) for slot in slots)
        self.slots = len(slots)

    def answer(self, request: dict[str, Any], *, chat: bool, on_chunk: Callable[[bytes], bool]) -> None:
        """Run one request to its end; each event goes to `on_chunk`, which stops the item by returning True."""
        server = self._server
        if server is None:
            raise EngineDied("the engine was stopped")
        handle = server.handle_chat_completions if chat else server.handle_completions
        try:
            handle(msgspec.json.encode(request), on_chunk)
        except (ValueError, RuntimeError) as e:
            # What its C++ side throws while it reads the request; later errors come as an event.
            raise failure(str(e)) from e

    def count_text(self, text: str) -> int:
        """Tokens of a text prompt, with the special tokens that the model puts around one."""
        return len(
            self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        )

    def count_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        schema: dict[str, Any] | None = None,
    ) -> int:
        """Tokens of a conversation under the model's own chat template; refused if the template or the
        schema of its answer is refused.
        """
        body: dict[str, Any] = {"messages": messages}
        if tools:
            body["tools"] = tools
        if schema is not None:
            body["json_schema"] = schema
        return self.count_text(self._post("/apply-template", body)["prompt"])

    def close(self) -> None:
        """End the listener and the compute thread, and free the model. No `answer` may be under way."""
        self._disconnect()
        self._server = None
        self._remove_folder()

    def _parameters(self, s: LlamaSettings) -> Any:
        p: Any = _native().CommonParams()
        p.model.path = str(s.path)
        p.n_parallel, p.n_ctx = s.slots, s.slots * s.context
        p.n_batch = p.n_ubatch = s.batch
        p.n_gpu_layers = s.gpu_layers
        p.cpuparams.n_threads = s.threads
        p.cpuparams_batch.n_threads = s.threads
        p.cont_batching, p.warmup, p.ui = True, False, False
        # It would shrink the context by itself where memory is short; the capacity that we tell must hold.
        p.fit_params = False
        # Its cache of past prompts in main memory would grow to gigabytes over a job.
        p.cache_ram_mib = 0
        p.hostnames, p.api_keys = [self._socket], [self._key]
        p.endpoint_slots, p.endpoint_metrics, p.endpoint_props = True, False, False
        p.n_threads_http = 2
        p.verbosity = s.verbosity
        return p

    def _get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call("POST", path, msgspec.json.encode(body))

    def _call(self, method: str, path: str, body: bytes | None) -> Any:
        try:
            status, data = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException):
            # It closes a connection after some requests, which shows only when the next one is sent.
            self._disconnect()
            try:
                status, data = self._exchange(method, path, body)
            except (OSError, http.client.HTTPException) as e:
                self._disconnect()
                raise EngineDied(f"llama.cpp does not answer on its socket: {e!r}") from e
        if status != http.HTTPStatus.OK:
            raise _refusal(data)
        return msgspec.json.decode(data)

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = _SocketConnection(self._socket)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=COUNT_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(COUNT_TIMEOUT_S)
        self.sock.connect(self._path)


def restore_signals() -> None:
    """Give SIGINT and SIGTERM back to Python: loading installs handlers of its own, in C, that end only the model.

    Only the main thread may set handlers; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        # None: it was not set from Python, and what it was cannot be known.
        if handler is not None:
            signal.signal(number, handler)
            # As asyncio does for its own, so that system calls go on.
            with contextlib.suppress(OSError, ValueError):
                signal.siginterrupt(number, False)  # noqa: FBT003


def _native() -> Any:
    """xllamacpp, by name: its compiled module has no types that a checker could read."""
    # Its threads meet at barriers hundreds of times a token, and by default spin there for a millisecond. On cores that
    # others use too that turns 74 tokens/s into 5; waiting in the kernel costs little. Read when libgomp is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        return importlib.import_module("xllamacpp")
    except ImportError as e:
        raise Unavailable(
            f"xllamacpp is installed but cannot be loaded: {e} (it needs libgomp: apt-get install libgomp1)",
            code="engine",
        ) from e


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as f:
            magic = f.read(len(GGUF_MAGIC))
    except OSError as e:
        raise InvalidInput(f"the model {path} cannot be read: {e.strerror or e}", field="model") from e
    if magic != GGUF_MAGIC:
        raise InvalidInput(f"the model {path} is no GGUF file", field="model")


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
