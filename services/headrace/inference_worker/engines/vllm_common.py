"""What both ways of running vLLM share: loading, checking an item, making its answer."""

from __future__ import annotations

import itertools
from typing import Any

from headrace.contracts.errors import HeadraceError, Unavailable
from headrace.contracts.messages import ChatPrompt
from headrace.inference_worker.engines.checks import check_length
from headrace.inference_worker.engines.options import EngineOptions
from headrace.inference_worker.engines.protocol import (
    Engine,
    EngineDied,
    EngineInfo,
    ItemFailed,
    Output,
    Work,
)
from headrace.inference_worker.engines.vllm_args import (
    VllmSetup,
    engine_args,
    read_setup,
    set_environment,
    vllm,
)
from headrace.inference_worker.engines.vllm_params import refusal, sampling_params
from headrace.inference_worker.engines.vllm_stats import StepCounts
from headrace.inference_worker.engines.vllm_text import Texts, fingerprint
from headrace.inference_worker.engines.vllm_tools import Tools


class Prepared(Work, frozen=True, kw_only=True):
    """An item with its prompt as ids and its SamplingParams, so that `run` does neither again."""

    ids: list[int]
    sampling: Any


def create_vllm(options: EngineOptions) -> Engine:
    """The way that the options ask for: `async` where there is a GPU, `step` where there is none, or `vllm.mode`."""
    setup = read_setup(options)
    if setup.mode == "async":
        from headrace.inference_worker.engines.vllm_async import VllmAsyncEngine

        return VllmAsyncEngine(setup)
    from headrace.inference_worker.engines.vllm_step import VllmStepEngine

    return VllmStepEngine(setup)


class VllmBase:
    """The shared half of an engine. A subclass loads vLLM with `_load`, hands it over with `_loaded`, and runs items.

    Settings: every engine argument of vLLM by its name (dtype, kv_cache_memory_bytes, tensor_parallel_size, …), `mode`
    (async, step, auto), `lora_adapters` (name=path,…), `tool_call_parser`.
    """

    def __init__(self, setup: VllmSetup) -> None:
        self._setup = setup
        self._counts = StepCounts()
        self._numbers = itertools.count()
        self._dead = "the engine is not running"
        self._config: Any = None
        self._input: Any = None
        self._texts: Texts | None = None
        self._tools: Tools | None = None
        self._defaults: dict[str, Any] = {}
        self._info = EngineInfo(
            engine="vllm",
            model=setup.model,
            slots=int(setup.arguments["max_num_seqs"]),
            capacity_tokens=0,
            queues=True,
        )

    @property
    def info(self) -> EngineInfo:
        """Capacity and identity; exact after `start`."""
        return self._info

    def prepare(self, work: Work) -> Work:
        """Tokenise, and check parameters, grammar, ids and length as vLLM itself would.

        vLLM cuts prompt + max_tokens to its limit without a word; here that is `too_long`.
        """
        texts, tools = self._texts, self._tools
        if self._dead or texts is None or tools is None:
            raise EngineDied(self._dead)
        params = work.params
        if isinstance(work.prompt, ChatPrompt):
            tools.check(work.prompt)
        if params.lora is not None and params.lora not in self._setup.adapters:
            known = ", ".join(self._setup.adapters) or "none"
            message = f"lora {params.lora!r} is not configured; this worker has: {known}"
            raise ItemFailed("invalid_parameter", message, field="lora")
        ids = texts.prompt_ids(work)
        info = self._info
        check_length(len(ids), work.max_tokens, limit=info.max_model_len, capacity=info.capacity_tokens)
        sampling = sampling_params(params, work.max_tokens, defaults=self._defaults)
        self._verify(sampling)
        return Prepared(
            id=work.id,
            prompt=work.prompt,
            params=params,
            max_tokens=work.max_tokens,
            prompt_tokens=len(ids),
            chat=work.chat,
            traceparent=work.traceparent,
            attempt=work.attempt,
            ids=ids,
            sampling=sampling,
        )

    def tokens_generated(self) -> int:
        """Tokens made in all steps so far."""
        return self._counts.tokens

    def stats(self) -> dict[str, Any]:
        """`steps`, `mean_batch`, `running`, `waiting`, tokens, `kv_usage`: see `vllm_stats`."""
        report = self._counts.report()
        # vLLM tells its counts after a step; with nothing left in it there is none to tell that it is empty.
        if not self._in_engine():
            report["running"] = report["waiting"] = 0
        return report

    def _in_engine(self) -> int:
        """Items handed to vLLM and not yet ended."""
        raise NotImplementedError

    # --- for the two ways ----------------------------------------------------------------------------

    def _engine_args(self) -> Any:
        """Set the environment, import vLLM and make its arguments."""
        set_environment(self._setup)
        return engine_args(self._setup)

    def _loaded(self, engine: Any) -> None:
        """Take from a loaded LLMEngine or AsyncLLM what items are checked against."""
        config = engine.vllm_config
        self._config, self._input = config, engine.input_processor
        model, cache = config.model_config, config.cache_config
        vocab_size = int(model.get_vocab_size())
        tokenizer = engine.get_tokenizer()
        self._texts = Texts(tokenizer, vocab_size)
        self._tools = Tools(self._setup.tool_call_parser, tokenizer)
        self._defaults = dict(model.get_diff_sampling_param())
        setup = self._setup
        self._info = EngineInfo(
            engine="vllm",
            model=setup.model,
            slots=int(config.scheduler_config.max_num_seqs),
            capacity_tokens=int(cache.num_gpu_blocks or 0) * int(cache.block_size),
            max_model_len=int(model.max_model_len),
            vocab_size=vocab_size,
            tokenizer=setup.model if (mark := fingerprint(setup.model)) else "",
            tokenizer_fingerprint=mark,
            queues=True,
        )
        self._dead = ""

    def _prepared(self, work: Work) -> Prepared:
        if self._dead:
            raise EngineDied(self._dead)
        prepared = work if isinstance(work, Prepared) else self.prepare(work)
        if not isinstance(prepared, Prepared):  # pragma: no cover -- for the type checker
            raise TypeError
        return prepared

    def _request_id(self, work: Work) -> str:
        """Unique in this process whatever the caller names: vLLM mixes the results of two requests with one id."""
        return f"{work.id}#{next(self._numbers)}"

    def _lora(self, work: Work) -> Any:
        name = work.params.lora
        if name is None:
            return None
        adapters = self._setup.adapters
        return vllm("vllm.lora.request", "LoRARequest")(name, list(adapters).index(name) + 1, adapters[name])

    def _output(self, work: Prepared, result: Any) -> Output:
        """The finished item; one that vLLM ended by itself is no answer."""
        if self._texts is None or self._tools is None:
            raise EngineDied(self._dead)
        reasons = {completion.finish_reason for completion in result.outputs}
        if "abort" in reasons:
            raise EngineDied(self._dead or "vLLM aborted the item")
        if "error" in reasons:
            raise ItemFailed("engine_error", "vLLM ended the item with an internal error")
        output = self._texts.output(work, result, len(work.ids))
        if isinstance(work.prompt, ChatPrompt) and work.prompt.tools:
            choices = [self._tools.read(work.prompt, choice) for choice in output.choices]
            output = Output(choices=choices, usage=output.usage)
        return output

    def _verify(self, sampling: Any) -> None:
        """The check of vLLM itself of the parameters against the model: ids, log probabilities, grammars."""
        config, processor = self._config, self._input
        try:
            sampling.verify(
                config.model_config,
                config.speculative_config,
                config.structured_outputs_config,
                processor.tokenizer,
            )
        except ItemFailed:
            raise
        except Exception as e:
            # Grammar compilers raise errors of their own kinds; each is about this item only.
            raise refusal(e) from e


def load_failure(model: str, error: BaseException) -> HeadraceError:
    """One sentence for an engine that could not be loaded."""
    if isinstance(error, HeadraceError):
        return error
    lines = str(error).strip().splitlines()
    why = lines[0] if lines else type(error).__name__
    return Unavailable(
        f"vLLM could not load {model}: {type(error).__name__}: {why[:500]} "
        "(VLLM_LOGGING_LEVEL=INFO shows its own log)",
        code="engine",
    )
