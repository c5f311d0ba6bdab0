"""The `llamacpp` engine: any GGUF model on the CPU (or a GPU that xllamacpp was built for), inside this process."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.contracts.errors import Unavailable
from headrace.contracts.messages import ChatPrompt, Row, TokenPrompt
from headrace.inference_worker.engines.background import in_daemon
from headrace.inference_worker.engines.checks import (
    check_chat,
    check_ids,
    check_length,
    flat_messages,
    unsupported,
)
from headrace.inference_worker.engines.llamacpp_answer import Answer, decode_chunk
from headrace.inference_worker.engines.llamacpp_http import Stream
from headrace.inference_worker.engines.llamacpp_request import build_request, check_parameters, json_schema
from headrace.inference_worker.engines.llamacpp_server import LlamaServer, LlamaSettings, restore_signals
from headrace.inference_worker.engines.options import EngineOptions, Extras
from headrace.inference_worker.engines.protocol import EngineDied, EngineInfo, ItemFailed, Output, Work
from headrace.inference_worker.engines.weights import fetch_demo_weights

DEFAULT_SLOTS: Final = 16
DEFAULT_CONTEXT: Final = 512


class _Run:
    """One item under way: why it must stop, if it must."""

    __slots__ = ("answer", "stop", "stream", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.answer = Answer(work)
        self.stop = ""
        self.stream: Stream | None = None

    def end(self, why: str) -> None:
        """From the event loop: the slot's thread sees `stop` if it has not begun, and its stream ended if it has."""
        self.stop = self.stop or why
        if self.stream is not None:
            self.stream.stop()


class LlamaCppEngine:
    """One thread for each slot; llama.cpp batches the slots that are busy.

    `options.model` is a GGUF file; without one, the demo's weights are fetched (`weights.fetch_demo_weights`).
    Settings: `gpu_layers` (-1: all that fit), `batch` (prompt tokens of one step), `prompt_cache` (a slot reuses
    the prefix of its last prompt), `verbosity`. A cancelled item frees its thread at once; its slot is free at its next
    token, or, in the midst of its prompt, once llama.cpp has had nothing to say to anybody for a second.
    """

    def __init__(self, options: EngineOptions) -> None:
        extras = Extras("llamacpp", options.extra)
        self._options = options
        self._slots = options.slots or DEFAULT_SLOTS
        self._context = options.context or DEFAULT_CONTEXT
        self._gpu_layers = extras.integer("gpu_layers", -1, minimum=-1, maximum=10_000)
        self._batch = extras.integer("batch", 512, minimum=32, maximum=1 << 16)
        self._cache_prompt = extras.flag("prompt_cache", default=True)
        self._verbosity = extras.integer("verbosity", 0, maximum=10)
        extras.finish()
        self._info = EngineInfo(
            engine="llamacpp", model=options.model or "", slots=self._slots, capacity_tokens=0, queues=True
        )
        self._server: LlamaServer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._runs: set[_Run] = set()
        self._lock = threading.Lock()
        self._tokens = 0
        self._busy = 0
        self._items = 0

    @property
    def info(self) -> EngineInfo:
        """Capacity and identity; exact after `start`."""
        return self._info

    async def start(self) -> None:
        """Load the model. Raise `InvalidInput` for a path that is no model, `Unavailable` if it cannot be loaded."""
        if self._server is not None:
            return
        path = await asyncio.to_thread(_weights, self._options.model)
        settings = LlamaSettings(
            path=path,
            slots=self._slots,
            context=self._context,
            threads=self._options.threads or os.cpu_count() or 1,
            batch=self._batch,
            gpu_layers=self._gpu_layers,
            verbosity=self._verbosity,
        )
        try:
            server = await asyncio.to_thread(LlamaServer, settings)
        except ItemFailed as e:
            raise Unavailable(
                f"llama.cpp does not tell what it loaded from {path}: {e}", code="engine"
            ) from e
        finally:
            restore_signals()
        self._server = server
        self._pool = ThreadPoolExecutor(server.slots, thread_name_prefix="llama-slot")
        self._info = EngineInfo(
            engine="llamacpp",
            model=path.stem,
            slots=server.slots,
            capacity_tokens=server.slots * server.context,
            max_model_len=server.context,
            vocab_size=server.vocab_size,
            queues=True,
        )

    async def stop(self) -> None:
        """Stop every item (`EngineDied`), wait for their threads, and free the model."""
        server, self._server = self._server, None
        pool, self._pool = self._pool, None
        for run in list(self._runs):
            run.end("the engine was stopped")
        if pool is not None:
            await in_daemon(pool.shutdown)
        if server is not None:
            await in_daemon(server.close)

    def prepare(self, work: Work) -> Work:
        """Count the prompt's tokens under the model's own template, and check parameters, ids and length."""
        server = self._alive()
        check_parameters(work, server.slots)
        prompt = work.prompt
        if isinstance(prompt, Row):
            raise ItemFailed(
                "invalid_prompt", "a row is for a function, and llamacpp is a model", field="prompt"
            )
        if isinstance(prompt, TokenPrompt):
            check_ids(prompt.ids, server.vocab_size)
            tokens = len(prompt.ids)
        elif isinstance(prompt, ChatPrompt):
            check_chat(prompt)
            if prompt.tools and not server.takes_tools:
                raise unsupported("llamacpp", "tools", "the model's chat template knows none")
            messages, schema = flat_messages(prompt), json_schema(work)
            tokens = server.count_chat(messages, tools=prompt.tools, schema=schema)
        elif prompt.text:
            tokens = server.count_text(prompt.text)
        else:
            raise ItemFailed("invalid_prompt", "prompt is empty", field="prompt")
        for token in work.params.logit_bias or ():
            check_ids([token], server.vocab_size, field="logit_bias")
        check_length(tokens, work.max_tokens, limit=server.context)
        return msgspec.structs.replace(work, prompt_tokens=tokens)

    async def run(self, work: Work) -> Output:
        """Run the item in a slot's thread; more than `slots` wait their turn. Cancelling stops it at its next token."""
        self._alive()
        pool = self._pool
        if pool is None:
            raise EngineDied("the engine is not running")
        run = _Run(work)
        self._runs.add(run)
        try:
            await asyncio.get_running_loop().run_in_executor(pool, self._run_in_slot, run)
        except BaseException:
            run.end("the item was cancelled")
            raise
        finally:
            self._runs.discard(run)
        if run.stop:
            raise EngineDied(run.stop)
        return run.answer.output()

    def tokens_generated(self) -> int:
        """Tokens streamed so far, corrected by each finished item's exact usage."""
        return self._tokens

    def stats(self) -> dict[str, Any]:
        """`running` (slots busy), `waiting` (items without a slot yet), `items` (ended so far)."""
        busy = self._busy
        return {"running": busy, "waiting": max(0, len(self._runs) - busy), "items": self._items}

    def _alive(self) -> LlamaServer:
        if self._server is None:
            raise EngineDied("the engine is not running")
        return self._server

    def _run_in_slot(self, run: _Run) -> None:
        """In a slot's thread: what it does to the counters is under the lock, since threads share them."""
        server = self._server
        if run.stop or server is None:
            run.stop = run.stop or "the engine was stopped"
            return
        with self._lock:
            self._busy += 1
        try:
            request = build_request(run.work, seed=self._options.seed, cache_prompt=self._cache_prompt)
            run.stream = stream = server.stream(request, chat=isinstance(run.work.prompt, ChatPrompt))
            if run.stop:
                return
            try:
                for data in stream.events():
                    self._take(run, data)
            finally:
                stream.stop()
        finally:
            with self._lock:
                self._busy -= 1
                self._items += 1

    def _take(self, run: _Run, data: bytes) -> None:
        try:
            brought = run.answer.add(decode_chunk(data))
        except (msgspec.MsgspecError, IndexError) as e:
            raise ItemFailed(
                "engine_error", f"llama.cpp sent an event that cannot be read: {e}: {data[:200]!r}"
            ) from e
        if brought:
            with self._lock:
                self._tokens += brought


def _weights(model: str | None) -> Path:
    return Path(model).expanduser() if model else fetch_demo_weights()
