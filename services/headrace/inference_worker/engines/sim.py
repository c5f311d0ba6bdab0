"""The `sim` engine: a seeded model of a GPU's step time with continuous batching, without a GPU.

It batches, fills its KV cache, starves and takes time as a real engine does, and its step count depends on
nothing but the work and when it came: tests and capacity planning use that count, free of timing noise.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any, Final

from headrace.contracts.messages import ChatPrompt, Row, TextPrompt, TokenPrompt, Usage
from headrace.inference_worker.engines.checks import (
    ParameterTable,
    check_chat,
    check_ids,
    check_length,
    message_text,
    unsupported,
)
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import (
    EngineDied,
    EngineInfo,
    ItemFailed,
    OutOfMemory,
    Output,
    Work,
)
from headrace.inference_worker.engines.sim_faults import Fault, SimFaults
from headrace.inference_worker.engines.sim_model import Answer, answer, digest, estimate_tokens, read_settings
from headrace.inference_worker.engines.sim_scheduler import DECODE, Scheduler, Sequence, Step

# Simulated text has no distribution to sample from, so temperature and its kin hold for it as they stand.
HONOURED: Final = frozenset(
    {
        "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "seed", "stop", "include_stop_str_in_output", "ignore_eos",
        "skip_special_tokens", "spaces_between_special_tokens", "priority",
    }
)  # fmt: skip
_TABLE: Final = ParameterTable("sim", HONOURED)
# Loop turns between two steps when nothing sleeps: enough for a finished item's awaiter, behind a task group or
# a wait_for, to hand in the next one before the step that would otherwise run without it.
_TURNS: Final = 6


class _Item:
    """One `run` under way: its answers, and how many of its sequences are still in the engine."""

    __slots__ = ("answers", "done", "fault", "left", "sequences")

    def __init__(self, answers: list[Answer], done: asyncio.Future[None]) -> None:
        self.answers = answers
        self.done = done
        self.left = len(answers)
        self.sequences: list[Sequence] = []
        self.fault: Fault | None = None


class SimEngine:
    """Answers known words of a seeded, log-normal length, at the pace of the machine that its settings describe.

    Settings (`sim_model.read_settings`): `prefill_tokens_per_s`, `step_ms`, `step_per_seq_ms`,
    `step_per_kv_token_us`, `capacity_tokens`, `max_num_seqs` (or options.slots), `max_num_batched_tokens`,
    `max_model_len` (or options.context), `vocab_size`, `output_median`, `output_sigma` (of the log), `time_scale`;
    and the faults of `sim_faults`.
    A text's prompt tokens are its UTF-8 bytes / 4, rounded up.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._settings = s = read_settings(options)
        self._scheduler = Scheduler(s)
        self._info = EngineInfo(
            engine="sim",
            model=options.model or "sim-8b",
            slots=s.max_num_seqs,
            capacity_tokens=s.capacity_tokens,
            max_model_len=s.max_model_len,
            vocab_size=s.vocab_size,
            queues=True,
        )
        self._items: set[_Item] = set()
        self._faults = SimFaults(s)
        self._armed: set[_Item] = set()
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._virtual_s = 0.0
        self._starved_s = 0.0
        self._idle_s = 0.0
        self._batch_sum = 0
        self._prompt_tokens = 0

    @property
    def info(self) -> EngineInfo:
        """Capacity and identity."""
        return self._info

    async def start(self) -> None:
        """Start the steps; a second start does nothing."""
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._steps(), name="sim-steps")
            self._loop_task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """End the steps; what is in the engine gets `EngineDied`."""
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._end_all("the engine was stopped")

    def prepare(self, work: Work) -> Work:
        """Count the prompt's tokens and check parameters, ids and length."""
        _TABLE.check(work.params)
        prompt = work.prompt
        if isinstance(prompt, Row):
            raise ItemFailed("invalid_prompt", "a row is for a function, and sim is a model", field="prompt")
        if isinstance(prompt, TokenPrompt):
            check_ids(prompt.ids, self._settings.vocab_size)
        elif isinstance(prompt, ChatPrompt):
            check_chat(prompt)
            if prompt.tools:
                raise unsupported("sim", "tools")
        elif not prompt.text:
            raise ItemFailed("invalid_prompt", "prompt is empty", field="prompt")
        text = _text(prompt)
        tokens = estimate_tokens(text) if isinstance(text, str) else len(text)
        limit, capacity = self._settings.max_model_len, self._settings.capacity_tokens
        # Each choice is a sequence of its own with its own prompt, and is admitted by itself: the largest must fit.
        check_length(tokens, work.max_tokens, limit=limit, capacity=capacity)
        if tokens == work.prompt_tokens:
            return work
        return Work(
            id=work.id,
            prompt=prompt,
            params=work.params,
            max_tokens=work.max_tokens,
            prompt_tokens=tokens,
            chat=work.chat,
            traceparent=work.traceparent,
            attempt=work.attempt,
        )

    async def run(self, work: Work) -> Output:
        """Queue the item, and return its answer at the step that ends it; a cancelled item frees its place at once."""
        if self._loop_task is None or self._loop_task.done():
            raise EngineDied("the engine is not running")
        text = _text(work.prompt)
        fault = self._faults.of(work, text) if self._faults.any else None
        seed = digest(text)
        n, prompt = work.params.n, max(1, work.prompt_tokens)
        answers = [answer(self._settings, seed, work.params, work.max_tokens, which) for which in range(n)]
        item = _Item(answers, asyncio.get_running_loop().create_future())
        for one in answers:
            seq = self._scheduler.add(item, prompt, work.max_tokens, one.tokens, work.params.priority)
            item.sequences.append(seq)
        self._items.add(item)
        if fault is not None:
            item.fault = fault
            self._armed.add(item)
        self._work.set()
        try:
            await item.done
        finally:
            self._drop(item)
        self._prompt_tokens += work.prompt_tokens
        made = sum(one.tokens for one in answers)
        usage = Usage(prompt_tokens=work.prompt_tokens, completion_tokens=made)
        return Output(choices=[one.choice for one in answers], usage=usage)

    def tokens_generated(self) -> int:
        """Tokens made in all steps so far."""
        return self._scheduler.tokens

    def stats(self) -> dict[str, Any]:
        """`steps`, `virtual_s` (time on the machine), `mean_batch` (sequences a step), `running`, `waiting`;
        `starved_s` (virtual time of steps with a free slot and none waiting) and `idle_s` (wall time without work).
        """
        s = self._scheduler
        return {
            "steps": s.steps,
            "virtual_s": self._virtual_s,
            "mean_batch": self._batch_sum / s.steps if s.steps else 0.0,
            "running": s.running,
            "waiting": s.waiting,
            "kv_tokens": s.kv_tokens,
            "reserved_tokens": s.reserved,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": s.tokens,
            "starved_s": self._starved_s,
            "idle_s": self._idle_s,
        }

    async def _steps(self) -> None:
        loop, scheduler, scale = asyncio.get_running_loop(), self._scheduler, self._settings.time_scale
        due = loop.time()
        while True:
            if not scheduler.running and not scheduler.waiting:
                self._work.clear()
                since = loop.time()
                await self._work.wait()
                due = loop.time()
                self._idle_s += due - since
                # What is handed in together starts together: let the others of this turn queue up first.
                await _turns()
            step = scheduler.step()
            if self._armed:
                await self._strike()
            seconds = self._account(step)
            if scale:
                # From one due time to the next, not from now: a late wake-up must not slow the machine down.
                due = max(due + seconds * scale, loop.time() - 1.0)
                await asyncio.sleep(max(0.0, due - loop.time()))
            for seq in step.finished:
                self._finish(seq)
            if not scale:
                await _turns() if step.finished else await asyncio.sleep(0)

    async def _strike(self) -> None:
        """Let happen what the items bring that were prefilled in this step."""
        for item in list(self._armed):
            if not any(seq.state >= DECODE for seq in item.sequences):
                continue
            self._armed.discard(item)
            if item.fault is Fault.POISON:
                raise EngineDied("the engine died of an item, as poison asked")
            if item.fault is Fault.HANG:
                await asyncio.Event().wait()
            if item.fault is Fault.FREEZE:
                threading.Event().wait()
            if item.fault is Fault.SEGFAULT:
                os.kill(os.getpid(), signal.SIGSEGV)
            if self._settings.oom_always or len(self._items) > 1:
                self._drop(item)
                if not item.done.done():
                    item.done.set_exception(OutOfMemory("there is no memory left, as oom_tokens asked"))

    def _account(self, step: Step) -> float:
        s = self._settings
        seconds = s.step_seconds(prefill=step.prefill, decoding=step.decoding, kv_tokens=step.kv_tokens)
        self._virtual_s += seconds
        self._batch_sum += step.running
        if step.running < s.max_num_seqs and not self._scheduler.waiting:
            self._starved_s += seconds
        return seconds

    def _finish(self, seq: Sequence) -> None:
        item = seq.owner
        assert isinstance(item, _Item)  # noqa: S101 -- the scheduler only carries what `run` gave it
        item.left -= 1
        if not item.left and not item.done.done():
            item.done.set_result(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end_all(str(error) if isinstance(error, EngineDied) else f"the steps failed: {error!r}")

    def _end_all(self, why: str) -> None:
        for item in list(self._items):
            self._drop(item)
            if not item.done.done():
                item.done.set_exception(EngineDied(why))

    def _drop(self, item: _Item) -> None:
        self._items.discard(item)
        self._armed.discard(item)
        for seq in item.sequences:
            self._scheduler.remove(seq)


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _text(prompt: TextPrompt | TokenPrompt | ChatPrompt | Row) -> str | list[int]:
    """What sim counts and hashes: the text, the ids, or the messages as `role: text` lines."""
    if isinstance(prompt, TokenPrompt):
        return prompt.ids
    if isinstance(prompt, ChatPrompt):
        return "\n".join(f"{m['role']}: {message_text(m)}" for m in prompt.messages)
    return prompt.text if isinstance(prompt, TextPrompt) else ""
