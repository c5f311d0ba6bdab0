"""How a function runs here: what its settings say, else what its decorator says, else the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, structs

from headrace.contracts.errors import InvalidInput
from headrace.contracts.messages import FunctionSpec
from headrace.forge.batching import DEFAULT, Batching, Order, parse_batching
from headrace.forge.function import Function
from headrace.forge.isolation import Isolation
from headrace.forge.pool import ProcessPool
from headrace.forge.sizes import ESTIMATE, SizeFunction, named_size
from headrace.mesh.forge_settings import FunctionSettings
from headrace.mesh.settings import Settings

MAX_WAIT_MS: Final = 50
ENGINE: Final = "python"
"""What stands as the engine of a row that a function made."""


class Plan(Struct, frozen=True, kw_only=True):
    """One function's way of running."""

    batching: Batching = DEFAULT
    order: Order = "free"
    size: SizeFunction = ESTIMATE
    max_wait_s: float = MAX_WAIT_MS / 1_000
    processes: int = 1
    concurrency: int = 1
    options: dict[str, str] = {}

    def pool(self, function: Function[..., object]) -> ProcessPool:
        """The processes that the plan asks for."""
        return ProcessPool(
            function, processes=self.processes, concurrency=self.concurrency, options=self.options
        )

    def isolated(self, function: Function[..., object]) -> tuple[ProcessPool, Isolation]:
        """The processes, and what runs batches on them."""
        pool = self.pool(function)
        return pool, Isolation(function, pool)


def plan_of(
    function: Function[..., object], settings: Settings, *, serving: bool, flag: str | None = None
) -> Plan:
    """The plan; `serving`: for a worker, whose batching is `worker_batching`. `flag` comes before all settings.

    In this order: the flag, `[functions.NAME]`, `[forge]`, the decorator, the default. Raise `InvalidInput`.
    """
    own, common, declared = (
        settings.functions.get(function.name, FunctionSettings()),
        settings.forge,
        function.declared,
    )

    def chosen(name: str) -> object:
        here = getattr(own, name)
        return here if here is not None else getattr(common, name)

    texts = [flag, own.worker_batching, common.worker_batching] if serving else [flag]
    texts += [own.batching, common.batching]
    batchings = [parse_batching(text) for text in texts if text is not None]
    if declared.batching is not None:
        batchings.append(declared.batching)
    if serving:
        if flag == "submit":
            msg = "a worker serves what was submitted: its batching is rows:N or tokens:BUDGET"
            raise InvalidInput(msg, field="batching", code="invalid_batching")
        batchings = [b for b in batchings if b.mode != "submit"]
    size, order, wait = chosen("size"), chosen("order") or declared.order, chosen("max_wait_ms")
    processes, concurrency = chosen("processes"), chosen("concurrency")
    if wait is None:
        wait = MAX_WAIT_MS if declared.max_wait_ms is None else declared.max_wait_ms
    return Plan(
        batching=batchings[0] if batchings else DEFAULT,
        order="ordered" if order == "ordered" else "free",
        size=named_size(str(size)) if size is not None else declared.size or ESTIMATE,
        max_wait_s=float(str(wait)) / 1_000,
        processes=declared.processes if processes is None else int(str(processes)),
        concurrency=declared.concurrency if concurrency is None else int(str(concurrency)),
        options=dict(own.options),
    )


def flags_first(settings: Settings, flags: Mapping[str, object]) -> Settings:
    """The settings in which what a flag of `[forge]` says comes before what `[functions.NAME]` says."""
    given = {
        key.removeprefix("forge."): None
        for key, value in flags.items()
        if key.startswith("forge.") and value is not None
    }
    if not given:
        return settings
    functions = {name: structs.replace(own, **given) for name, own in settings.functions.items()}
    return structs.replace(settings, functions=functions)


def spec_of(function: Function[..., object]) -> FunctionSpec:
    """How a function is registered: rows have no tokens to shape them by, so there is one queue for each lane."""
    return rows_spec(function.name, engine=ENGINE, model=function.identity, version=function.version)


def rows_spec(
    name: str, *, engine: str, model: str, version: str = "", max_model_len: int = 0
) -> FunctionSpec:
    """The spec of anything that takes rows."""
    return FunctionSpec(
        name=name,
        engine=engine,
        model=model[:512],
        version=version,
        max_model_len=max_model_len,
        default_max_tokens=1,
        min_shape=1,
        max_shape=0,
    )
