"""What vLLM's loop did, counted step by step by a logger that it calls after each."""

from __future__ import annotations

from typing import Any

from headrace.inference_worker.engines.vllm_args import vllm


class StepCounts:
    """Steps that produced something, tokens made, sequences running and waiting after the last step."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.running = 0
        self.waiting = 0
        self.preempted = 0
        self.kv_usage = 0.0
        self._batch_sum = 0

    def record(self, scheduler: Any, iteration: Any) -> None:
        """One step's statistics, in vLLM's form; either may be missing."""
        if iteration is not None:
            self.steps += 1
            self.tokens += iteration.num_generation_tokens
            self.prompt_tokens += iteration.num_prompt_tokens
            self.preempted += iteration.num_preempted_reqs
            # Without speculative decoding each sequence of the batch makes one token in a step.
            self._batch_sum += iteration.num_generation_tokens
        if scheduler is not None:
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs
            self.kv_usage = scheduler.kv_cache_usage

    def report(self) -> dict[str, Any]:
        """For `Engine.stats`: `mean_batch` is in sequences a step, `kv_usage` from 0 to 1."""
        return {
            "steps": self.steps,
            "mean_batch": self._batch_sum / self.steps if self.steps else 0.0,
            "running": self.running,
            "waiting": self.waiting,
            "completion_tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "preempted": self.preempted,
            "kv_usage": self.kv_usage,
        }


def logger_factory(counts: StepCounts) -> Any:
    """A factory of vLLM's stat loggers that counts into `counts`."""
    base = vllm("vllm.v1.metrics.loggers", "StatLoggerBase")

    class Logger(base):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            counts.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None: ...

    return Logger
