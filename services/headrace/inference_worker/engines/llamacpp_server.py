"""llama.cpp's server inside this process, by xllamacpp: loading, tokenising, and answering items.

Its C++ side opens an HTTP listener that cannot be switched off. It is bound to a socket file in a folder that only
this user may enter, with a random key on top, and it is what we talk to: see `llamacpp_http`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.contracts.errors import InvalidInput, Unavailable
from headrace.inference_worker.engines.llamacpp_http import Questions, Stream
from headrace.inference_worker.engines.socket_folder import SocketFolder

GGUF_MAGIC: Final = b"GGUF"
SPARE_THREADS: Final = 4


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
    """A loaded model. Each `stream` is an item; llama.cpp batches what runs at once."""

    def __init__(self, settings: LlamaSettings) -> None:
        """Load the model: blocks, and holds the interpreter's lock, for as long as it takes."""
        _check_file(settings.path)
        self._folder = SocketFolder()
        self._socket = str(self._folder.path / "llama.sock")
        self._key = secrets.token_hex(16)
        self._headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._questions = Questions(self._socket, self._headers)
        try:
            self._server: Any = _native().Server(self._parameters(settings))
        except BaseException as e:
            self._folder.close()
            if not isinstance(e, RuntimeError):
                raise
            raise Unavailable(
                f"llama.cpp could not load {settings.path}: {e} Is it a model that this version knows, and is there "
                "memory for it? The setting llamacpp.verbosity=3 shows its own log.",
                code="engine",
            ) from e
        try:
            meta = self._questions.get("/v1/models")["data"][0]["meta"]
            slots = self._questions.get("/slots")
            caps: dict[str, Any] = self._questions.get("/props").get("chat_template_caps") or {}
        except BaseException:
            self.close()
            raise
        self.vocab_size = int(meta["n_vocab"])
        self.trained_context = int(meta.get("n_ctx_train") or 0)
        self.takes_tools = bool(caps.get("supports_tools"))
        self.context = min(int(slot["n_ctx"]) for slot in slots)
        self.slots = len(slots)

    def stream(self, request: dict[str, Any], *, chat: bool) -> Stream:
        """One item, not yet begun: iterate its `events`."""
        target = "/v1/chat/completions" if chat else "/v1/completions"
        return Stream(self._socket, self._headers, target, msgspec.json.encode(request))

    def count_text(self, text: str) -> int:
        """Tokens of a text prompt, with the special tokens that the model puts around one."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return len(self._questions.post("/tokenize", body)["tokens"])

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
        return self.count_text(self._questions.post("/apply-template", body)["prompt"])

    def close(self) -> None:
        """End the listener and the compute thread, and free the model. No stream may be under way."""
        self._questions.close()
        # Waits for the batch that is being computed.
        self._server = None
        self._folder.close()

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
        # A connection has a thread of its own; that of an item that was stopped is busy for up to a second more.
        p.n_threads_http = 2 * s.slots + SPARE_THREADS
        p.verbosity = s.verbosity
        return p


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
