"""The function that a worker hosts, as clients and other workers know it."""

from __future__ import annotations

import logging
from typing import Final

from headrace.contracts.errors import Conflict, NotFound, Unavailable
from headrace.contracts.messages import FunctionSpec
from headrace.contracts.subjects import MAX_SHAPE, shape_of
from headrace.forge.plans import ENGINE, rows_spec
from headrace.inference_worker.engines.protocol import EngineInfo
from headrace.mesh.connection import Mesh
from headrace.mesh.provision import get_function, register_function, update_function

log = logging.getLogger("headrace.worker")

DEFAULT_MAX_TOKENS: Final = 256
MIN_SHAPE: Final = 6
UNLIMITED_SHAPE: Final = 13
"""Largest shape of an engine that names no limit: what is longer is held in it too."""
_SAME: Final = ("model", "tokenizer_fingerprint", "vocab_size")


def spec_of(name: str, info: EngineInfo) -> FunctionSpec:
    """The spec of a function that runs on this engine.

    Shapes reach to the model's longest item. In a small context the default answer takes at most half of it,
    so that a prompt of half the context still works without naming `max_tokens`.
    """
    limit = info.max_model_len
    if info.rows:
        return rows_spec(
            name, engine=info.engine, model=info.model, version=info.version, max_model_len=info.max_model_len
        )
    top = min(MAX_SHAPE, max(1, shape_of(limit))) if limit else UNLIMITED_SHAPE
    return FunctionSpec(
        name=name,
        engine=info.engine,
        model=info.model[:512],
        max_model_len=limit,
        default_max_tokens=min(DEFAULT_MAX_TOKENS, max(1, limit // 2)) if limit else DEFAULT_MAX_TOKENS,
        vocab_size=info.vocab_size,
        tokenizer=info.tokenizer,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        min_shape=min(MIN_SHAPE, top),
        max_shape=top,
    )


async def ensure_function(mesh: Mesh, spec: FunctionSpec) -> FunctionSpec:
    """The registered function that this worker serves; registers `spec` if the name is free.

    Where it exists, the stored one counts, since clients validate against it. Raise `Conflict`, in one
    sentence, if it is another model's: tasks in its queue were tokenised for that one. A function over rows that is
    registered in another version is registered anew: the rows that it made bear the version that made them.
    """
    try:
        known = await get_function(mesh, spec.name)
    except NotFound:
        await register_function(mesh, spec)
        return spec
    if known.version != spec.version and _is_another_version(known, spec):
        known = await update_function(mesh, spec)
        log.info(
            "function is registered in another version",
            extra={"function": spec.name, "version": known.version},
        )
    else:
        _refuse_other(known, spec)
    try:
        await register_function(mesh, known)
    except Unavailable as e:
        # A worker with the least privilege may pull and ack but not look at consumers: it binds to what is
        # there.
        log.info("consumers are not looked at", extra={"function": spec.name, "reason": str(e)[:200]})
    return known


def _is_another_version(known: FunctionSpec, ours: FunctionSpec) -> bool:
    """Whether both are the same function over rows, which its author counted on."""
    return (
        known.engine == ours.engine == ENGINE
        and known.model.rpartition("@")[0] == ours.model.rpartition("@")[0]
    )


def _refuse_other(known: FunctionSpec, ours: FunctionSpec) -> None:
    for field in _SAME:
        stored, here = getattr(known, field), getattr(ours, field)
        if stored != here:
            raise Conflict(
                f"function {known.name!r} is registered with {field} {stored!r} and this worker's engine has {here!r}: "
                "serve it under another name (worker.function), or forget it first: headrace init --unregister NAME",
                code="other_function",
            )
    if ours.max_model_len and (not known.max_model_len or known.max_model_len > ours.max_model_len):
        longest = f"items of {known.max_model_len} tokens" if known.max_model_len else "items of any length"
        raise Conflict(
            f"function {known.name!r} takes {longest} and this worker's engine only {ours.max_model_len}: "
            "raise its context (worker.context), or serve it under another name (worker.function)",
            code="other_function",
        )
