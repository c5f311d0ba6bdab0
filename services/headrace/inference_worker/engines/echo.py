"""The `echo` engine: returns its input at once. It tests and measures the mesh, not a model."""

from __future__ import annotations

from typing import Any, Final

from headrace.contracts.messages import ChatPrompt, Choice, Row, TextPrompt, TokenPrompt, Usage
from headrace.inference_worker.engines.checks import (
    ParameterTable,
    check_chat,
    check_ids,
    check_length,
    cut_at_stop,
    last_user_text,
    unsupported,
)
from headrace.inference_worker.engines.faults import Faults
from headrace.inference_worker.engines.options import EngineOptions, Extras
from headrace.inference_worker.engines.protocol import EngineDied, EngineInfo, ItemFailed, Output, Work

# Sampling has no meaning for a copy: every temperature gives the same text, so those fields are honoured as they
# stand. What would have to change the text or add to it, and does not, is refused.
HONOURED: Final = frozenset(
    {
        "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "include_stop_str_in_output",
        "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "priority",
    }
)  # fmt: skip
_TABLE: Final = ParameterTable("echo", HONOURED)


class EchoEngine:
    """Text gives its text, token ids give their ids (and, as text, the ids joined by spaces), a chat the text
    of its last user message, a row its value.

    Usage: prompt tokens are the number of ids, or what the task says; completion tokens are
    min(prompt tokens, max_tokens) for each of the n choices. Ids are cut at max_tokens, with the reason
    `length`; text has no tokens here and comes back whole. Settings: `vocab_size` (0: ids are not checked
    from above), and the faults of `faults.Faults`. `run` never suspends unless there is a `delay_ms`.
    """

    def __init__(self, options: EngineOptions) -> None:
        extras = Extras("echo", options.extra)
        self._info = EngineInfo(
            engine="echo",
            model=options.model or "echo",
            slots=options.slots or 4096,
            capacity_tokens=extras.integer("capacity_tokens", 1 << 24, minimum=1),
            max_model_len=options.context or 0,
            vocab_size=extras.integer("vocab_size", 0, maximum=2**31),
        )
        faults = Faults(extras)
        extras.finish()
        self._faults = faults
        self._faulty = faults.any
        self._alive = False
        self._tokens = 0
        self._items = 0
        self._running = 0

    @property
    def info(self) -> EngineInfo:
        """Capacity and identity."""
        return self._info

    async def start(self) -> None:
        """Nothing to load."""
        self._alive = True

    async def stop(self) -> None:
        """End delayed items with `EngineDied`."""
        self._alive = False
        self._faults.kill("the engine was stopped")

    def prepare(self, work: Work) -> Work:
        """Check parameters, ids and length; prompt tokens become exact for token prompts."""
        _TABLE.check(work.params)
        prompt, tokens = work.prompt, work.prompt_tokens
        if isinstance(prompt, TokenPrompt):
            check_ids(prompt.ids, self._info.vocab_size)
            tokens = len(prompt.ids)
        elif isinstance(prompt, ChatPrompt):
            check_chat(prompt)
            if prompt.tools:
                raise unsupported("echo", "tools")
        elif isinstance(prompt, TextPrompt) and not prompt.text:
            raise ItemFailed("invalid_prompt", "prompt is empty", field="prompt")
        info, n = self._info, work.params.n
        if not isinstance(prompt, Row) and (
            info.max_model_len or tokens + n * work.max_tokens > info.capacity_tokens
        ):
            limit, capacity = info.max_model_len, info.capacity_tokens
            check_length(tokens, work.max_tokens, limit=limit, capacity=capacity, n=n)
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
        """The item's own input."""
        if not self._alive:
            raise EngineDied("the engine is not running")
        if self._faulty:
            await self._strike(work)
        prompt = work.prompt
        self._items += 1
        if isinstance(prompt, Row):
            self._tokens += 1
            return Output(value=prompt.value, usage=Usage(prompt_tokens=work.prompt_tokens))
        if isinstance(prompt, TokenPrompt):
            return self._ids(prompt.ids, work)
        text = prompt.text if isinstance(prompt, TextPrompt) else last_user_text(prompt)
        tokens = work.prompt_tokens
        return self._output(work, text, None, tokens, min(tokens, work.max_tokens), length=False)

    def tokens_generated(self) -> int:
        """Completion tokens counted so far (a row counts as one)."""
        return self._tokens

    def stats(self) -> dict[str, Any]:
        """`steps` is the number of items: each is a step of its own."""
        return {"steps": self._items, "running": self._running, "waiting": 0}

    def _ids(self, ids: list[int], work: Work) -> Output:
        kept = ids if len(ids) <= work.max_tokens else ids[: work.max_tokens]
        text = " ".join(map(str, kept))
        return self._output(work, text, kept, len(ids), len(kept), length=len(kept) < len(ids))

    def _output(
        self, work: Work, text: str, ids: list[int] | None, prompt: int, completion: int, *, length: bool
    ) -> Output:
        params, reason, stopped = work.params, "length" if length else "stop", None
        if params.stop:
            text, stopped = cut_at_stop(text, params.stop, include=params.include_stop_str_in_output)
            if stopped is not None:
                reason, ids = "stop", None
        choice = Choice(text=text, finish_reason=reason, token_ids=ids, stop_reason=stopped)
        n = params.n
        # A copy counts at least one token, so that the watchdog sees an engine at work that knows no counts.
        self._tokens += completion * n or 1
        usage = Usage(prompt_tokens=prompt, completion_tokens=completion * n)
        return Output(choices=[choice] * n, usage=usage)

    async def _strike(self, work: Work) -> None:
        prompt = work.prompt
        if isinstance(prompt, TokenPrompt):
            text = " ".join(map(str, prompt.ids))
        elif isinstance(prompt, Row):
            text = bytes(prompt.value).decode(errors="replace")
        else:
            text = prompt.text if isinstance(prompt, TextPrompt) else last_user_text(prompt)
        self._running += 1
        try:
            await self._faults.strike(text)
        except EngineDied:
            self._alive = False
            raise
        finally:
            self._running -= 1
        if not self._alive:
            raise EngineDied("the engine died")
